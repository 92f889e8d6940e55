"""Llama, and what is Llama under another name: SmolLM2, TinyLlama, Llama 2 and 3.x, Yi.

Touvron et al. 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models"; grouped-query attention after Ainslie et
al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import ConfigError
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, pre_norm_layer, rms_config
from vkdecode.models.config import flag, known
from vkdecode.models.rope import Rope, rope_from_config
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class LlamaConfig(RmsConfig):
    """What shapes a Llama graph; names as in Hugging Face configs."""

    attention_bias: bool
    mlp_bias: bool


def parse_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Read and check a config.

    Raises:
        ConfigError: a value is missing, impossible, or contradicts another.
        UnsupportedModelError: it asks for something that would change the result and is not supported.

    """
    known(config, "hidden_act", "silu", ("silu",))
    return LlamaConfig(
        **rms_config(config),
        attention_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
    )


def rope(config: Mapping[str, Any], c: LlamaConfig) -> Rope:
    """The rotation of q and k."""
    return rope_from_config(config, c.head_dim)


def check_tensors(c: LlamaConfig, tensors: TensorTable) -> None:
    """Refuse what the config says is not there: ignoring it would change the result."""
    for name in tensors.names():
        if name.endswith("_proj.bias"):
            allowed = c.attention_bias if ".self_attn." in name else c.mlp_bias
            if not allowed:
                raise ConfigError(f"the file has a tensor {name}, but its config says that there is no such bias")


def build_step(
    c: LlamaConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer in range(c.num_hidden_layers):
        biases = {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias, "mlp_bias": c.mlp_bias}
        x = pre_norm_layer(b, x, layer, c, **biases)
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


ARCHITECTURE = Architecture(parse_config, build_step, rope, check_tensors=check_tensors)
