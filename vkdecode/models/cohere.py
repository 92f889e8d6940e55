"""Cohere's Command R: attention and MLP side by side after one layer norm without bias, interleaved rotation.

Cohere 2024, "Command R". Follows `CohereForCausalLM`, which turns the pairs (2i, 2i + 1) of a head. Scores do not
change when the dimensions of a q and a k head are put into another order together, so their rows are loaded in the
order in which those pairs are (i, i + head_dim / 2), as all other families have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import UnsupportedModelError
from vkdecode.graph import NodeId, RowPick
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import embed, gated_mlp
from vkdecode.models.config import DecoderConfig, decoder_sizes, flag, known, positive_float
from vkdecode.models.rope import Rope, rope_from_config
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import Part, TensorTable


@dataclass(frozen=True)
class CohereConfig(DecoderConfig):
    """What shapes a Cohere graph; names as in Hugging Face configs."""

    layer_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    use_qk_norm: bool
    logit_scale: float


def parse_config(config: Mapping[str, Any]) -> CohereConfig:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    return CohereConfig(
        **decoder_sizes(config),
        layer_norm_eps=positive_float(config, "layer_norm_eps", 1e-5),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        attention_bias=flag(config, "attention_bias"),
        use_qk_norm=flag(config, "use_qk_norm"),
        logit_scale=positive_float(config, "logit_scale", 0.0625),
    )


def rope(config: Mapping[str, Any], c: CohereConfig) -> Rope:
    """The rotation of whole heads: the order of rows here is that of pairs over a whole head."""
    made = rope_from_config(config, c.head_dim)
    if made.rotary_dim != c.head_dim:
        raise UnsupportedModelError("partial_rotary_factor is not supported for cohere; only 1 is")
    return made


def build_step(
    c: CohereConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        h = b.layer_norm(x, f"{name}.input_layernorm", c.layer_norm_eps, bias=False)
        x = b.graph.add(x, _attention(b, h, layer, c))
        x = b.graph.add(x, gated_mlp(b, h, f"{name}.mlp", c))
    if not b.wants_logits():
        return b.finish(x)
    x = b.layer_norm(b.last_row(x), "model.norm", c.layer_norm_eps, bias=False)
    logits = b.linear(x, "model.embed_tokens" if c.tie_word_embeddings else "lm_head", c.vocab_size)
    return b.finish(b.graph.scale(logits, c.logit_scale))


def _attention(b: StepBuilder, h: NodeId, layer: int, c: CohereConfig) -> NodeId:
    name = f"model.layers.{layer}.self_attn"
    q, k = (
        _turned(b, h, name, which, heads, c)
        for which, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads))
    )
    v = b.linear(h, f"{name}.v_proj", c.num_key_value_heads * c.head_dim, c.attention_bias)
    return b.linear(b.attention(layer, q, k, v), f"{name}.o_proj", c.hidden_size, c.attention_bias)


def _turned(b: StepBuilder, h: NodeId, name: str, which: str, heads: int, c: CohereConfig) -> NodeId:
    """Queries or keys, by choice with each head normalized by a weight of its own, and then turned."""
    size = heads * c.head_dim
    pairs = Part(size, RowPick(interleaved=c.head_dim))
    x = b.linear(h, f"{name}.{which}_proj", size, c.attention_bias, pairs)
    if c.use_qk_norm:
        weight = b.tensors.vector(f"{name}.{which}_norm.weight", size, pairs, shape=(heads, c.head_dim))
        x = b.graph.layer_norm(x, b.graph.weight(weight), None, c.layer_norm_eps, heads)
    return b.rope(x)


ARCHITECTURE = Architecture(parse_config, build_step, rope)
