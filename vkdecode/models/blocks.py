"""Parts of decoder layers that families share; tensors are named as in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.graph import NodeId
from vkdecode.models.config import DecoderConfig, decoder_sizes, flag, positive_float
from vkdecode.models.step_builder import StepBuilder


@dataclass(frozen=True)
class RmsConfig(DecoderConfig):
    """A decoder with RMS norms, and a head of its own or the embedding's."""

    rms_norm_eps: float
    tie_word_embeddings: bool


def rms_config(config: Mapping[str, Any], tied: bool = False, epsilon: float = 1e-6) -> dict[str, Any]:
    """The fields of `RmsConfig`; `tied` and `epsilon` are what an absent key means."""
    return {
        **decoder_sizes(config),
        "rms_norm_eps": positive_float(config, "rms_norm_eps", epsilon),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", tied),
    }


def embed(b: StepBuilder, c: DecoderConfig) -> NodeId:
    """Embeddings of the step's tokens."""
    return b.embed("model.embed_tokens.weight", c.vocab_size, c.hidden_size)


def qkv(b: StepBuilder, h: NodeId, name: str, c: DecoderConfig, bias: bool = False) -> tuple[NodeId, NodeId, NodeId]:
    """Queries, keys and values of h."""
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    q, k, v = (b.linear(h, f"{name}.{part}_proj", q_size if part == "q" else kv_size, bias) for part in "qkv")
    return q, k, v


def gated_mlp(
    b: StepBuilder, h: NodeId, name: str, c: DecoderConfig, bias: bool = False, activation: str = "silu"
) -> NodeId:
    """down(activation(gate(h)) * up(h)); Shazeer 2020, "GLU Variants Improve Transformer"."""
    gate = b.activation(b.linear(h, f"{name}.gate_proj", c.intermediate_size, bias), activation)
    up = b.linear(h, f"{name}.up_proj", c.intermediate_size, bias)
    return b.linear(b.graph.mul(gate, up), f"{name}.down_proj", c.hidden_size, bias)


def pre_norm_layer(
    b: StepBuilder,
    x: NodeId,
    layer: int,
    c: RmsConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    rope: bool = True,
    window: int = 0,
    scale: float | None = None,
    residual: float = 1.0,
) -> NodeId:
    """A layer of Llama, and of the families that differ from it in a few places; `pre_norm_attention`, then an MLP.

    `mlp_bias` says whether the MLP's products have biases.
    """
    name = f"model.layers.{layer}"
    x = pre_norm_attention(
        b,
        x,
        layer,
        c,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        head_norms=head_norms,
        rope=rope,
        window=window,
        scale=scale,
        residual=residual,
    )
    h = b.rms_norm(x, f"{name}.post_attention_layernorm.weight", c.rms_norm_eps)
    return b.graph.add(x, b.graph.scale(gated_mlp(b, h, f"{name}.mlp", c, mlp_bias), residual))


def pre_norm_attention(
    b: StepBuilder,
    x: NodeId,
    layer: int,
    c: RmsConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norms: bool = False,
    rope: bool = True,
    window: int = 0,
    scale: float | None = None,
    residual: float = 1.0,
    sinks: bool = False,
) -> NodeId:
    """The first half of such a layer: the residual stream with attention added.

    Args:
        b: the step under construction.
        x: the residual stream.
        layer: which one.
        c: sizes and the norms' epsilon.
        qkv_bias: whether q, k and v have biases.
        out_bias: whether attention's output has.
        head_norms: whether each head of q and k is normalized before it is turned.
        rope: whether they are turned.
        window: how many positions a token sees; 0 for all.
        scale: of the scores; None for 1 / sqrt(head_dim).
        residual: factor of what is added to the residual stream.
        sinks: whether each head has a sink.

    """
    name = f"model.layers.{layer}"
    h = b.rms_norm(x, f"{name}.input_layernorm.weight", c.rms_norm_eps)
    q, k, v = qkv(b, h, f"{name}.self_attn", c, qkv_bias)
    if head_norms:
        q = b.head_norm(q, f"{name}.self_attn.q_norm.weight", c.rms_norm_eps)
        k = b.head_norm(k, f"{name}.self_attn.k_norm.weight", c.rms_norm_eps)
    if rope:
        q, k = b.rope(q), b.rope(k)
    sink = b.graph.weight(b.tensors.vector(f"{name}.self_attn.sinks", c.num_attention_heads)) if sinks else None
    a = b.attention(layer, q, k, v, scale=scale, window=window, sinks=sink)
    out = b.linear(a, f"{name}.self_attn.o_proj", c.hidden_size, out_bias)
    return b.graph.add(x, b.graph.scale(out, residual))


def head_logits(b: StepBuilder, x: NodeId, c: RmsConfig, plus_one: bool = False) -> NodeId:
    """The last norm, and the product with the output head or the embedding."""
    x = b.rms_norm(b.last_row(x), "model.norm.weight", c.rms_norm_eps, plus_one)
    return b.linear(x, "model.embed_tokens" if c.tie_word_embeddings else "lm_head", c.vocab_size)
