"""GPT-NeoX, such as Pythia: attention and MLP side by side, each with a layer norm of its own; q, k, v by head.

Black et al. 2022, "GPT-NeoX-20B"; Biderman et al. 2023, "Pythia". Follows `GPTNeoXForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.graph import NodeId, RowPick
from vkdecode.models.architecture import Architecture
from vkdecode.models.config import DecoderConfig, activation, decoder_sizes, flag, positive_float
from vkdecode.models.rope import Rope, rope_from_config, with_rope_default
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import Part, TensorTable


@dataclass(frozen=True)
class GptNeoXConfig(DecoderConfig):
    """What shapes a GPT-NeoX graph; names as in Hugging Face configs."""

    layer_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    use_parallel_residual: bool
    activation: str


def parse_config(config: Mapping[str, Any]) -> GptNeoXConfig:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    return GptNeoXConfig(
        **decoder_sizes({**config, "head_dim": None, "num_key_value_heads": None}),
        layer_norm_eps=positive_float(config, "layer_norm_eps", 1e-5),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention_bias=flag(config, "attention_bias", True),
        use_parallel_residual=flag(config, "use_parallel_residual", True),
        activation=activation(config, "hidden_act", "gelu"),
    )


def rope(config: Mapping[str, Any], c: GptNeoXConfig) -> Rope:
    """The rotation of the first quarter of each head, unless the config says another part, in its older words too."""
    older = {"partial_rotary_factor": config.get("rotary_pct"), "rope_theta": config.get("rotary_emb_base")}
    given = {**{key: value for key, value in older.items() if value is not None}, **config}
    return rope_from_config(with_rope_default(given, "partial_rotary_factor", 0.25), c.head_dim)


def build_step(
    c: GptNeoXConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = b.embed("gpt_neox.embed_in.weight", c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        name = f"gpt_neox.layers.{layer}"
        h = b.layer_norm(x, f"{name}.input_layernorm", c.layer_norm_eps)
        q, k, v = (_head_part(b, h, f"{name}.attention.query_key_value", which, c) for which in range(3))
        a = b.attention(layer, b.rope(q), b.rope(k), v)
        before = x
        x = b.graph.add(x, b.linear(a, f"{name}.attention.dense", c.hidden_size, c.attention_bias))
        h = before if c.use_parallel_residual else x
        h = b.layer_norm(h, f"{name}.post_attention_layernorm", c.layer_norm_eps)
        m = b.activation(b.linear(h, f"{name}.mlp.dense_h_to_4h", c.intermediate_size, bias=True), c.activation)
        x = b.graph.add(x, b.linear(m, f"{name}.mlp.dense_4h_to_h", c.hidden_size, bias=True))
    if not b.wants_logits():
        return b.finish(x)
    x = b.layer_norm(b.last_row(x), "gpt_neox.final_layer_norm", c.layer_norm_eps)
    return b.finish(b.linear(x, "gpt_neox.embed_in" if c.tie_word_embeddings else "embed_out", c.vocab_size))


def _head_part(b: StepBuilder, h: NodeId, name: str, which: int, c: GptNeoXConfig) -> NodeId:
    """q (0), k (1) or v (2): the tensor holds these three of the first head, then those of the second, and so on."""
    part = Part(3 * c.hidden_size, RowPick(which * c.head_dim, c.head_dim, 3 * c.head_dim))
    return b.linear(h, name, c.hidden_size, c.attention_bias, part)


ARCHITECTURE = Architecture(parse_config, build_step, rope, "gpt_neox.layers.")
