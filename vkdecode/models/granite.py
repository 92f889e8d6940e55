"""Granite 3: Llama with four multipliers: of the embedding, the scores, what each half layer adds, and the logits.

IBM 2024, "Granite 3.0 Language Models"; the multipliers after Yang et al. 2022, "Tensor Programs V". Follows
`GraniteForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, pre_norm_layer, rms_config
from vkdecode.models.config import flag, known, positive_float
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class GraniteConfig(RmsConfig):
    """What shapes a Granite graph; names as in Hugging Face configs."""

    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def parse_config(config: Mapping[str, Any]) -> GraniteConfig:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    return GraniteConfig(
        **rms_config(config),
        attention_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
        embedding_multiplier=positive_float(config, "embedding_multiplier", 1.0),
        attention_multiplier=positive_float(config, "attention_multiplier", 1.0),
        residual_multiplier=positive_float(config, "residual_multiplier", 1.0),
        logits_scaling=positive_float(config, "logits_scaling", 1.0),
    )


def build_step(
    c: GraniteConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = b.graph.scale(embed(b, c), c.embedding_multiplier)
    for layer in range(c.num_hidden_layers):
        biases = {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias, "mlp_bias": c.mlp_bias}
        x = pre_norm_layer(b, x, layer, c, **biases, scale=c.attention_multiplier, residual=c.residual_multiplier)
    if not b.wants_logits():
        return b.finish(x)
    return b.finish(b.graph.scale(head_logits(b, x, c), 1.0 / c.logits_scaling))


ARCHITECTURE = Architecture(parse_config, build_step)
