"""Mixtral: Mistral with eight MLPs in each layer, of which a token takes two.

Jiang et al. 2024, "Mixtral of Experts". Follows `MixtralForCausalLM`, whose softmax is over all experts and then
made to sum to 1 over the chosen ones, which is a softmax over those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.graph import NodeId
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, pre_norm_attention, rms_config
from vkdecode.models.config import known, size_or_none
from vkdecode.models.experts import Experts, expert_mlp, experts_from_config
from vkdecode.models.rope import Rope, rope_from_config, with_rope_default
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable

_TENSORS = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True)
class MixtralConfig(RmsConfig):
    """What shapes a Mixtral graph; a window of 0 is none."""

    window: int
    experts: Experts


def parse_config(config: Mapping[str, Any]) -> MixtralConfig:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    fields = rms_config(config, epsilon=1e-5)
    experts = experts_from_config(config, "num_local_experts", (8, 2), fields["intermediate_size"], normalized=True)
    return MixtralConfig(**fields, window=size_or_none(config, "sliding_window", None) or 0, experts=experts)


def build_step(
    c: MixtralConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        x = pre_norm_attention(b, x, layer, c, window=c.window)
        h = b.rms_norm(x, f"{name}.post_attention_layernorm.weight", c.rms_norm_eps)
        x = b.graph.add(x, _mixture(b, h, f"{name}.block_sparse_moe", c))
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


def _mixture(b: StepBuilder, h: NodeId, name: str, c: MixtralConfig) -> NodeId:
    e = c.experts
    route = b.route(b.linear(h, f"{name}.gate", e.count), e.used, e.normalized)
    out = expert_mlp(
        b, h, route, e, c.hidden_size, lambda expert, part: f"{name}.experts.{expert}.{_TENSORS[part]}.weight"
    )
    return b.graph.expert_sum(out, route)


def rope_mixtral(config: Mapping[str, Any], c: MixtralConfig) -> Rope:
    """The rotation, whose base is 1e6 where the config gives none."""
    return rope_from_config(with_rope_default(config, "rope_theta", 1e6), c.head_dim)


ARCHITECTURE = Architecture(parse_config, build_step, rope_mixtral)
