"""Phi 3, 3.5 and 4: Llama whose q, k and v, and whose gate and up, are one tensor each; partial rotation, LongRoPE.

Abdin et al. 2024, "Phi-3 Technical Report"; Ding et al. 2024, "LongRoPE". Follows `Phi3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.graph import NodeId, RowPick
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, rms_config
from vkdecode.models.config import known, layer_windows, refuse, size_or_none
from vkdecode.models.rope import Rope, rope_from_config
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import Part, TensorTable

_ORIGINAL_POSITIONS = 4096


@dataclass(frozen=True)
class Phi3Config(RmsConfig):
    """What shapes a Phi 3 graph; `windows` holds each layer's, 0 for none."""

    windows: tuple[int, ...]


def parse_config(config: Mapping[str, Any]) -> Phi3Config:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    refuse(config, "phi3", "attention_bias", "mlp_bias", "lm_head_bias")
    fields = rms_config(config, epsilon=1e-5)
    window = size_or_none(config, "sliding_window", None)
    windows = layer_windows(config, fields["num_hidden_layers"], window, lambda layer: window is not None)
    return Phi3Config(**fields, windows=windows)


def rope(config: Mapping[str, Any], c: Phi3Config) -> Rope:
    """The rotation of q and k. Phi 3 has called LongRoPE `su` and `yarn` too."""
    given = {"original_max_position_embeddings": _ORIGINAL_POSITIONS, **config}
    for key in ("rope_scaling", "rope_parameters"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            names = {name: inner[name] for name in ("type", "rope_type") if inner.get(name) in ("su", "yarn")}
            given[key] = {**inner, **dict.fromkeys(names, "longrope")}
    return rope_from_config(given, c.head_dim)


def build_step(c: Phi3Config, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    x = embed(b, c)
    for layer, window in enumerate(c.windows):
        name = f"model.layers.{layer}"
        h = b.rms_norm(x, f"{name}.input_layernorm.weight", c.rms_norm_eps)
        q, k, v = _side_by_side(b, h, f"{name}.self_attn.qkv_proj", (q_size, kv_size, kv_size))
        a = b.attention(layer, b.rope(q), b.rope(k), v, window=window)
        x = b.graph.add(x, b.linear(a, f"{name}.self_attn.o_proj", c.hidden_size))
        h = b.rms_norm(x, f"{name}.post_attention_layernorm.weight", c.rms_norm_eps)
        gate, up = _side_by_side(b, h, f"{name}.mlp.gate_up_proj", (c.intermediate_size,) * 2)
        x = b.graph.add(x, b.linear(b.graph.mul(b.graph.silu(gate), up), f"{name}.mlp.down_proj", c.hidden_size))
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


def _side_by_side(b: StepBuilder, h: NodeId, name: str, sizes: tuple[int, ...]) -> list[NodeId]:
    """Products with the parts of one tensor, whose rows lie one part after another."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    parts = [Part(sum(sizes), RowPick(start)) for start in starts]
    return [b.linear(h, name, size, part=part) for size, part in zip(sizes, parts, strict=True)]


ARCHITECTURE = Architecture(parse_config, build_step, rope)
