"""Qwen 2 MoE and Qwen 3 MoE: Qwen with routed experts in most layers, and in Qwen 2 one more that every token takes.

Qwen team 2024, "Qwen1.5-MoE", and Yang et al. 2025, "Qwen3 Technical Report". Follows `Qwen2MoeForCausalLM` and
`Qwen3MoeForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import ConfigError
from vkdecode.graph import NodeId
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, gated_mlp, head_logits, pre_norm_attention, rms_config
from vkdecode.models.config import flag, known, layer_windows, positive_int, size_or_none
from vkdecode.models.experts import Experts, expert_mlp, experts_from_config
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class QwenMoeConfig(RmsConfig):
    """What shapes the graph of a Qwen with experts.

    `windows` holds each layer's, 0 for none; `routed` says which layers have experts, the others having one MLP; a
    `shared_expert_intermediate_size` of 0 is no shared expert.
    """

    qkv_bias: bool
    out_bias: bool
    head_norms: bool
    windows: tuple[int, ...]
    routed: tuple[bool, ...]
    experts: Experts
    shared_expert_intermediate_size: int


def parse_qwen2_moe(config: Mapping[str, Any]) -> QwenMoeConfig:
    """Read and check a config of Qwen 2 MoE; raises `ConfigError` or `UnsupportedModelError`."""
    full_layers = positive_int(config, "max_window_layers", 28) if config.get("max_window_layers") != 0 else 0
    fields = _parse(config, "num_experts", (60, 4), 1408, full_layers)
    shared = positive_int(config, "shared_expert_intermediate_size", 5632)
    qkv_bias = flag(config, "qkv_bias", True)
    return QwenMoeConfig(
        **fields, qkv_bias=qkv_bias, out_bias=False, head_norms=False, shared_expert_intermediate_size=shared
    )


def parse_qwen3_moe(config: Mapping[str, Any]) -> QwenMoeConfig:
    """Read and check a config of Qwen 3 MoE; raises like `parse_qwen2_moe`."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    fields = _parse(config, key, (128, 8), 768, 0)
    bias = flag(config, "attention_bias")
    return QwenMoeConfig(**fields, qkv_bias=bias, out_bias=bias, head_norms=True, shared_expert_intermediate_size=0)


def _parse(
    config: Mapping[str, Any], key: str, experts: tuple[int, int], expert_size: int, full_layers: int
) -> dict[str, Any]:
    known(config, "hidden_act", "silu", ("silu",))
    fields: dict[str, Any] = rms_config(config)
    layers = fields["num_hidden_layers"]
    window = size_or_none(config, "sliding_window", 4096) if flag(config, "use_sliding_window") else None
    size = positive_int(config, "moe_intermediate_size", expert_size)
    return {
        **fields,
        "windows": layer_windows(config, layers, window, lambda layer: layer >= full_layers),
        "routed": _routed(config, layers),
        "experts": experts_from_config(config, key, experts, size, flag(config, "norm_topk_prob")),
    }


def _routed(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but for those that `mlp_only_layers` lists."""
    step = positive_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ConfigError(f"mlp_only_layers must be a list of layers, not {dense!r}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def build_step(
    c: QwenMoeConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer, (window, routed) in enumerate(zip(c.windows, c.routed, strict=True)):
        name = f"model.layers.{layer}"
        x = pre_norm_attention(
            b, x, layer, c, qkv_bias=c.qkv_bias, out_bias=c.out_bias, head_norms=c.head_norms, window=window
        )
        h = b.rms_norm(x, f"{name}.post_attention_layernorm.weight", c.rms_norm_eps)
        x = b.graph.add(x, _mixture(b, h, f"{name}.mlp", c) if routed else gated_mlp(b, h, f"{name}.mlp", c))
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


def _mixture(b: StepBuilder, h: NodeId, name: str, c: QwenMoeConfig) -> NodeId:
    e, shared_size = c.experts, c.shared_expert_intermediate_size
    route = b.route(b.linear(h, f"{name}.gate", e.count), e.used, e.normalized)
    out = expert_mlp(b, h, route, e, c.hidden_size, lambda expert, part: f"{name}.experts.{expert}.{part}_proj.weight")
    if not shared_size:
        return b.graph.expert_sum(out, route)
    shared = gated_mlp(b, h, f"{name}.shared_expert", replace(c, intermediate_size=shared_size))
    return b.graph.expert_sum(out, route, shared, b.linear(h, f"{name}.shared_expert_gate", 1))


QWEN2_MOE = Architecture(parse_qwen2_moe, build_step)
QWEN3_MOE = Architecture(parse_qwen3_moe, build_step)
