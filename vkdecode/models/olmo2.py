"""OLMo 2: norms after attention and MLP instead of before them, and over the whole width of q and of k.

OLMo team 2024, "2 OLMo 2 Furious". Follows `Olmo2ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, gated_mlp, head_logits, qkv, rms_config
from vkdecode.models.config import flag, known, refuse
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class Olmo2Config(RmsConfig):
    """What shapes an OLMo 2 graph; names as in Hugging Face configs."""

    attention_bias: bool


def parse_config(config: Mapping[str, Any]) -> Olmo2Config:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    refuse(config, "olmo2", "clip_qkv")
    return Olmo2Config(**rms_config(config, epsilon=1e-5), attention_bias=flag(config, "attention_bias"))


def build_step(
    c: Olmo2Config, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        q, k, v = qkv(b, x, f"{name}.self_attn", c, c.attention_bias)
        q = b.rope(b.rms_norm(q, f"{name}.self_attn.q_norm.weight", c.rms_norm_eps))
        k = b.rope(b.rms_norm(k, f"{name}.self_attn.k_norm.weight", c.rms_norm_eps))
        a = b.attention(layer, q, k, v)
        a = b.linear(a, f"{name}.self_attn.o_proj", c.hidden_size, c.attention_bias)
        x = b.graph.add(x, b.rms_norm(a, f"{name}.post_attention_layernorm.weight", c.rms_norm_eps))
        m = gated_mlp(b, x, f"{name}.mlp", c)
        x = b.graph.add(x, b.rms_norm(m, f"{name}.post_feedforward_layernorm.weight", c.rms_norm_eps))
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


ARCHITECTURE = Architecture(parse_config, build_step)
