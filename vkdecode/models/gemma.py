"""Gemma 2 and 3: norms before and after attention and MLP, windows in most layers, a scaled embedding, GELU gates.

Gemma team 2024, "Gemma 2", which also caps scores and logits softly, and 2025, "Gemma 3 Technical Report", which
normalizes the heads of q and k instead and turns those of windowed layers at another base. Follows `Gemma2ForCausalLM`
and `Gemma3ForCausalLM`; of `Gemma3ForConditionalGeneration` the part that reads text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import ConfigError
from vkdecode.graph import NodeId
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, gated_mlp, head_logits, qkv, rms_config
from vkdecode.models.config import flag, known, layer_windows, number_or_none, positive_float, positive_int, refuse
from vkdecode.models.rope import Rope, rope_from_config, with_rope_default
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable

# What a key that a config leaves out means, where that is not what it means elsewhere.
_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_GEMMA2 = {**_SIZES, "vocab_size": 256000, "max_position_embeddings": 8192}
_GEMMA3 = {**_SIZES, "vocab_size": 262208, "max_position_embeddings": 131072}


@dataclass(frozen=True)
class GemmaConfig(RmsConfig):
    """What shapes a Gemma graph; `windows` holds each layer's, 0 for none, and a cap of 0 is none."""

    query_pre_attn_scalar: float
    attention_bias: bool
    attn_logit_softcapping: float
    final_logit_softcapping: float
    windows: tuple[int, ...]
    head_norms: bool
    local_rope: bool


def parse_gemma2(config: Mapping[str, Any]) -> GemmaConfig:
    """Read and check a config of Gemma 2; raises `ConfigError` or `UnsupportedModelError`."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _parse({**_GEMMA2, **caps, **config}, "gemma2", lambda layer: layer % 2 == 0)


def parse_gemma3(config: Mapping[str, Any]) -> GemmaConfig:
    """Read and check a config of Gemma 3; raises like `parse_gemma2`."""
    config = {**_GEMMA3, **_text(config)}
    key = "_sliding_window_pattern" if "_sliding_window_pattern" in config else "sliding_window_pattern"
    pattern = positive_int(config, key, 6)
    return _parse(config, "gemma3", lambda layer: (layer + 1) % pattern != 0)


def _parse(config: Mapping[str, Any], family: str, windowed: Any) -> GemmaConfig:
    known(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    refuse(config, family, "use_bidirectional_attention")
    fields = rms_config(config, tied=True)
    window = positive_int(config, "sliding_window", 4096)
    return GemmaConfig(
        **fields,
        query_pre_attn_scalar=positive_float(config, "query_pre_attn_scalar", 256.0),
        attention_bias=flag(config, "attention_bias"),
        attn_logit_softcapping=number_or_none(config, "attn_logit_softcapping") or 0.0,
        final_logit_softcapping=number_or_none(config, "final_logit_softcapping") or 0.0,
        windows=layer_windows(config, fields["num_hidden_layers"], window, windowed),
        head_norms=family == "gemma3",
        local_rope=family == "gemma3",
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the model of text."""
    if config.get("model_type") != "gemma3":
        return config
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ConfigError("a gemma3 config needs a text_config")
    return inner


def rope_gemma3(config: Mapping[str, Any], c: GemmaConfig) -> Rope:
    """The rotation of layers without a window, and as its `local` the one of layers with one, which is never scaled."""
    text = _text(config)
    inner = text.get("rope_parameters")
    if isinstance(inner, Mapping) and ("full_attention" in inner or "sliding_attention" in inner):
        both = [rope_from_config(text, c.head_dim, layer_type=kind) for kind in ("full_attention", "sliding_attention")]
        return replace(both[0], local=both[1])
    base = positive_float(text, "rope_local_base_freq", 10000.0)
    made = rope_from_config(with_rope_default(text, "rope_theta", 1e6), c.head_dim)
    return replace(made, local=rope_from_config({"rope_theta": base}, c.head_dim))


def build_step(
    c: GemmaConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    # The reference rounds this factor to the type that it computes in; here that is float32.
    x = b.graph.scale(embed(b, c), c.hidden_size**0.5)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        h = _norm(b, x, f"{name}.input_layernorm", c)
        a = _norm(b, _attention(b, h, layer, c), f"{name}.post_attention_layernorm", c)
        x = b.graph.add(x, a)
        h = _norm(b, x, f"{name}.pre_feedforward_layernorm", c)
        m = _norm(b, gated_mlp(b, h, f"{name}.mlp", c, activation="gelu_tanh"), f"{name}.post_feedforward_layernorm", c)
        x = b.graph.add(x, m)
    if not b.wants_logits():
        return b.finish(x)
    logits = head_logits(b, x, c, plus_one=True)
    cap = c.final_logit_softcapping
    return b.finish(b.graph.softcap(logits, cap) if cap else logits)


def _attention(b: StepBuilder, h: NodeId, layer: int, c: GemmaConfig) -> NodeId:
    name = f"model.layers.{layer}.self_attn"
    q, k, v = qkv(b, h, name, c, c.attention_bias)
    if c.head_norms:
        q = b.head_norm(q, f"{name}.q_norm.weight", c.rms_norm_eps, plus_one=True)
        k = b.head_norm(k, f"{name}.k_norm.weight", c.rms_norm_eps, plus_one=True)
    window = c.windows[layer]
    q, k = (b.rope(one, local=c.local_rope and window > 0) for one in (q, k))
    scale = c.query_pre_attn_scalar**-0.5
    a = b.attention(layer, q, k, v, scale=scale, window=window, softcap=c.attn_logit_softcapping)
    return b.linear(a, f"{name}.o_proj", c.hidden_size, c.attention_bias)


def _norm(b: StepBuilder, x: NodeId, name: str, c: GemmaConfig) -> NodeId:
    """RMS norm whose weight is held as the difference from 1."""
    return b.rms_norm(x, f"{name}.weight", c.rms_norm_eps, plus_one=True)


GEMMA2 = Architecture(parse_gemma2, build_step)
GEMMA3 = Architecture(parse_gemma3, build_step, rope_gemma3)
