"""GPT-2: learned position embeddings instead of RoPE, layer norms, biases everywhere, weights stored transposed.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Follows `GPT2LMHeadModel`, whose `Conv1D`
holds a weight as [inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.graph import NodeId, RowPick
from vkdecode.models.architecture import Architecture
from vkdecode.models.config import DecoderConfig, activation, decoder_sizes, flag, positive_float, refuse
from vkdecode.models.rope import Rope
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import Part, TensorTable

_OTHER_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


@dataclass(frozen=True)
class Gpt2Config(DecoderConfig):
    """What shapes a GPT-2 graph; `scales` holds the factor of each layer's scores.

    `transposed` is false where the source already holds weights as [outputs, inputs], which a config says with
    `conv1d_transposed` (GGUF files hold them so).
    """

    layer_norm_epsilon: float
    tie_word_embeddings: bool
    activation: str
    scales: tuple[float, ...]
    transposed: bool


def parse_config(config: Mapping[str, Any]) -> Gpt2Config:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    refuse(config, "gpt2", "add_cross_attention")
    plain = {name: config.get(own, config.get(name)) for name, own in _OTHER_NAMES.items()}
    if plain["intermediate_size"] is None and isinstance(plain["hidden_size"], int):
        plain["intermediate_size"] = 4 * plain["hidden_size"]
    if plain["max_position_embeddings"] is None:
        plain["max_position_embeddings"] = 1024
    sizes = decoder_sizes({"vocab_size": config.get("vocab_size"), **plain})
    scale = sizes["head_dim"] ** -0.5 if flag(config, "scale_attn_weights", True) else 1.0
    by_layer = flag(config, "scale_attn_by_inverse_layer_idx")
    return Gpt2Config(
        **sizes,
        layer_norm_epsilon=positive_float(config, "layer_norm_epsilon", 1e-5),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        activation=activation(config, "activation_function", "gelu_new"),
        scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(sizes["num_hidden_layers"])),
        transposed=flag(config, "conv1d_transposed", True),
    )


def rope(config: Mapping[str, Any], c: Gpt2Config) -> Rope:
    """No rotation, and no more positions than have an embedding."""
    return Rope(np.zeros(0), 1.0, 0, c.max_position_embeddings)


def build_step(c: Gpt2Config, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = b.embed("transformer.wte.weight", c.vocab_size, c.hidden_size)
    x = b.graph.add(x, b.position_embedding("transformer.wpe.weight", c.max_position_embeddings, c.hidden_size))

    def conv1d(h: NodeId, name: str, rows: int, part: Part | None = None) -> NodeId:
        return b.linear(h, name, rows, bias=True, part=part, transposed=c.transposed)

    for layer, scale in enumerate(c.scales):
        name = f"transformer.h.{layer}"
        h = b.layer_norm(x, f"{name}.ln_1", c.layer_norm_epsilon)
        starts = (0, c.hidden_size, 2 * c.hidden_size)
        q, k, v = (
            conv1d(h, f"{name}.attn.c_attn", c.hidden_size, Part(3 * c.hidden_size, RowPick(start))) for start in starts
        )
        a = b.attention(layer, q, k, v, scale=scale)
        x = b.graph.add(x, conv1d(a, f"{name}.attn.c_proj", c.hidden_size))
        h = b.layer_norm(x, f"{name}.ln_2", c.layer_norm_epsilon)
        m = b.activation(conv1d(h, f"{name}.mlp.c_fc", c.intermediate_size), c.activation)
        x = b.graph.add(x, conv1d(m, f"{name}.mlp.c_proj", c.hidden_size))
    if not b.wants_logits():
        return b.finish(x)
    x = b.layer_norm(b.last_row(x), "transformer.ln_f", c.layer_norm_epsilon)
    return b.finish(b.linear(x, "transformer.wte" if c.tie_word_embeddings else "lm_head", c.vocab_size))


ARCHITECTURE = Architecture(parse_config, build_step, rope, "transformer.h.")
