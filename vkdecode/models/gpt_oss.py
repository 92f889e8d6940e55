"""gpt-oss: attention with sinks and a window in every other layer, and experts with a clamped gate and biases.

OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card". Follows `GptOssForCausalLM`. The experts' matrices are one tensor
for a layer, in which columns of gate and up take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import UnsupportedModelError
from vkdecode.graph import NodeId, RowPick
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, pre_norm_attention, rms_config
from vkdecode.models.config import flag, known, layer_windows, positive_float, positive_int
from vkdecode.models.experts import Experts, experts_from_config
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import Part, TensorTable

_CLAMPED_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


@dataclass(frozen=True)
class GptOssConfig(RmsConfig):
    """What shapes a gpt-oss graph; `windows` holds each layer's, 0 for none."""

    attention_bias: bool
    windows: tuple[int, ...]
    experts: Experts


def parse_config(config: Mapping[str, Any]) -> GptOssConfig:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    for key, only in _CLAMPED_SWIGLU.items():
        if positive_float(config, key, only) != only:
            raise UnsupportedModelError(f"{key} {config[key]!r} is not supported for gpt_oss; only {only} is")
    fields = rms_config({"head_dim": 64, **config}, epsilon=1e-5)
    window = positive_int(config, "sliding_window", 128)
    return GptOssConfig(
        **fields,
        attention_bias=flag(config, "attention_bias", True),
        windows=layer_windows(config, fields["num_hidden_layers"], window, lambda layer: layer % 2 == 0),
        experts=experts_from_config(
            config, "num_local_experts", (128, 4), fields["intermediate_size"], normalized=True
        ),
    )


def build_step(
    c: GptOssConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer, window in enumerate(c.windows):
        name = f"model.layers.{layer}"
        bias = c.attention_bias
        x = pre_norm_attention(b, x, layer, c, qkv_bias=bias, out_bias=bias, window=window, sinks=True)
        h = b.rms_norm(x, f"{name}.post_attention_layernorm.weight", c.rms_norm_eps)
        x = b.graph.add(x, _mixture(b, h, f"{name}.mlp", c))
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


def _mixture(b: StepBuilder, h: NodeId, name: str, c: GptOssConfig) -> NodeId:
    e, size = c.experts, c.experts.intermediate_size
    route = b.route(b.linear(h, f"{name}.router", e.count, bias=True), e.used, e.normalized)

    def product(x: NodeId, part: str, rows: int, columns: int, pick: Part | None = None) -> NodeId:
        weight = b.tensors.stacked(f"{name}.experts.{part}", e.count, rows, columns, pick)
        bias = b.tensors.stacked_vectors(f"{name}.experts.{part}_bias", e.count, rows, pick)
        return b.graph.expert_linear(x, b.graph.weight(weight), route, b.graph.weight(bias))

    gate, up = (
        product(h, "gate_up_proj", size, c.hidden_size, Part(2 * size, RowPick(start, run=1, stride=2)))
        for start in (0, 1)
    )
    out = product(b.graph.clamped_swiglu(gate, up), "down_proj", c.hidden_size, size)
    return b.graph.expert_sum(out, route)


ARCHITECTURE = Architecture(parse_config, build_step)
