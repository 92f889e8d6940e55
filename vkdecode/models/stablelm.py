"""StableLM 2 (and 3B): layer norms, rotation of a part of each head, and by choice blocks side by side.

Bellagente et al. 2024, "Stable LM 2 1.6B Technical Report". Follows `StableLmForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.graph import NodeId
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import embed, gated_mlp, qkv
from vkdecode.models.config import DecoderConfig, decoder_sizes, flag, known, positive_float
from vkdecode.models.rope import Rope, rope_from_config, with_rope_default
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class StableLmConfig(DecoderConfig):
    """What shapes a StableLM graph; names as in Hugging Face configs."""

    layer_norm_eps: float
    tie_word_embeddings: bool
    use_qkv_bias: bool
    qk_layernorm: bool
    use_parallel_residual: bool


def parse_config(config: Mapping[str, Any]) -> StableLmConfig:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    return StableLmConfig(
        **decoder_sizes({**config, "head_dim": None}),
        layer_norm_eps=positive_float(config, "layer_norm_eps", 1e-5),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        use_qkv_bias=flag(config, "use_qkv_bias"),
        qk_layernorm=flag(config, "qk_layernorm"),
        use_parallel_residual=flag(config, "use_parallel_residual"),
    )


def rope(config: Mapping[str, Any], c: StableLmConfig) -> Rope:
    """The rotation of the first quarter of each head, unless the config says another part."""
    return rope_from_config(with_rope_default(config, "partial_rotary_factor", 0.25), c.head_dim)


def build_step(
    c: StableLmConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        h = b.layer_norm(x, f"{name}.input_layernorm", c.layer_norm_eps)
        x = b.graph.add(x, _attention(b, h, layer, c))
        if not c.use_parallel_residual:
            h = b.layer_norm(x, f"{name}.post_attention_layernorm", c.layer_norm_eps)
        x = b.graph.add(x, gated_mlp(b, h, f"{name}.mlp", c))
    if not b.wants_logits():
        return b.finish(x)
    x = b.layer_norm(b.last_row(x), "model.norm", c.layer_norm_eps)
    return b.finish(b.linear(x, "model.embed_tokens" if c.tie_word_embeddings else "lm_head", c.vocab_size))


def _attention(b: StepBuilder, h: NodeId, layer: int, c: StableLmConfig) -> NodeId:
    name = f"model.layers.{layer}.self_attn"
    q, k, v = qkv(b, h, name, c, c.use_qkv_bias)
    if c.qk_layernorm:  # each head has a norm of its own
        q = _head_norms(b, q, f"{name}.q_layernorm", c)
        k = _head_norms(b, k, f"{name}.k_layernorm", c)
    a = b.attention(layer, b.rope(q), b.rope(k), v)
    return b.linear(a, f"{name}.o_proj", c.hidden_size)


def _head_norms(b: StepBuilder, x: NodeId, name: str, c: StableLmConfig) -> NodeId:
    heads = b.graph.node(x).shape[1] // c.head_dim
    weight = b.tensors.vectors([f"{name}.norms.{head}.weight" for head in range(heads)], c.head_dim)
    return b.graph.layer_norm(x, b.graph.weight(weight), None, c.layer_norm_eps, heads)


ARCHITECTURE = Architecture(parse_config, build_step, rope)
