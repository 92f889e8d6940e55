"""Qwen 2, 2.5 and 3: Llama with biases on q, k and v (2), or with each head of q and k normalized (3).

Yang et al. 2024, "Qwen2 Technical Report", and 2025, "Qwen3 Technical Report". Follows `Qwen2ForCausalLM` and
`Qwen3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, pre_norm_layer, rms_config
from vkdecode.models.config import flag, known, layer_windows, positive_int, size_or_none
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class QwenConfig(RmsConfig):
    """What shapes a Qwen graph; `windows` holds each layer's, 0 for none."""

    qkv_bias: bool
    out_bias: bool
    head_norms: bool
    windows: tuple[int, ...]


def parse_qwen2(config: Mapping[str, Any]) -> QwenConfig:
    """Read and check a config of Qwen 2; raises `ConfigError` or `UnsupportedModelError`."""
    return _parse(config, qkv_bias=True, out_bias=False, head_norms=False)


def parse_qwen3(config: Mapping[str, Any]) -> QwenConfig:
    """Read and check a config of Qwen 3; raises like `parse_qwen2`."""
    bias = flag(config, "attention_bias")
    return _parse({"head_dim": 128, **config}, qkv_bias=bias, out_bias=bias, head_norms=True)


def _parse(config: Mapping[str, Any], **more: bool) -> QwenConfig:
    known(config, "hidden_act", "silu", ("silu",))
    fields = rms_config(config)
    window = size_or_none(config, "sliding_window", 4096) if flag(config, "use_sliding_window") else None
    full_layers = positive_int(config, "max_window_layers", 28) if config.get("max_window_layers") != 0 else 0
    windows = layer_windows(config, fields["num_hidden_layers"], window, lambda layer: layer >= full_layers)
    return QwenConfig(**fields, **more, windows=windows)


def build_step(c: QwenConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer, window in enumerate(c.windows):
        x = pre_norm_layer(
            b, x, layer, c, qkv_bias=c.qkv_bias, out_bias=c.out_bias, head_norms=c.head_norms, window=window
        )
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


QWEN2 = Architecture(parse_qwen2, build_step)
QWEN3 = Architecture(parse_qwen3, build_step)
