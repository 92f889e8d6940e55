"""Mistral and Ministral: Llama with a sliding window over attention.

Jiang et al. 2023, "Mistral 7B". Follows `MistralForCausalLM`, where every layer has the window, and
`MinistralForCausalLM`, where `layer_types` says which have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, pre_norm_layer, rms_config
from vkdecode.models.config import known, layer_windows, size_or_none
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable

_WINDOW = 4096


@dataclass(frozen=True)
class MistralConfig(RmsConfig):
    """What shapes a Mistral graph; `windows` holds each layer's, 0 for none."""

    windows: tuple[int, ...]


def parse_config(config: Mapping[str, Any]) -> MistralConfig:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    fields = rms_config(config)
    window = size_or_none(config, "sliding_window", _WINDOW)
    windows = layer_windows(config, fields["num_hidden_layers"], window, lambda layer: window is not None)
    return MistralConfig(**fields, windows=windows)


def build_step(
    c: MistralConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer, window in enumerate(c.windows):
        x = pre_norm_layer(b, x, layer, c, window=window)
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


ARCHITECTURE = Architecture(parse_config, build_step)
