"""Phi 1, 1.5 and 2: layer norms with bias, attention and MLP side by side, rotation of a part of each head.

Li et al. 2023, "Textbooks Are All You Need II: phi-1.5 technical report".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import UnsupportedModelError
from vkdecode.models.architecture import Architecture
from vkdecode.models.config import DecoderConfig, decoder_sizes, flag, known, positive_float, positive_int
from vkdecode.models.rope import Rope, rope_from_config, with_rope_default
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable

_ROTARY_FACTOR = 0.5


@dataclass(frozen=True)
class PhiConfig(DecoderConfig):
    """What shapes a Phi graph; names as in Hugging Face configs."""

    layer_norm_eps: float


def parse_config(config: Mapping[str, Any]) -> PhiConfig:
    """Read and check a config.

    Raises:
        ConfigError: a value is missing, impossible, or contradicts another.
        UnsupportedModelError: it asks for something that would change the result and is not supported.

    """
    known(config, "hidden_act", "gelu_new", ("gelu_new",))
    for key in ("qk_layernorm", "tie_word_embeddings"):
        if flag(config, key):
            raise UnsupportedModelError(f"{key} is not supported for phi")
    # Phi has no head_dim of its own; a config that gives one anyway does not change the model.
    sizes = decoder_sizes({"intermediate_size": 4 * positive_int(config, "hidden_size"), **config, "head_dim": None})
    return PhiConfig(**sizes, layer_norm_eps=positive_float(config, "layer_norm_eps", 1e-5))


def rope(config: Mapping[str, Any], c: PhiConfig) -> Rope:
    """The rotation of the first half of each q and k head, unless the config says another part."""
    return rope_from_config(with_rope_default(config, "partial_rotary_factor", _ROTARY_FACTOR), c.head_dim)


def build_step(c: PhiConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    x = b.embed("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        h = b.layer_norm(x, f"{name}.input_layernorm", c.layer_norm_eps)
        q = b.rope(b.linear(h, f"{name}.self_attn.q_proj", q_size, bias=True))
        k = b.rope(b.linear(h, f"{name}.self_attn.k_proj", kv_size, bias=True))
        v = b.linear(h, f"{name}.self_attn.v_proj", kv_size, bias=True)
        a = b.attention(layer, q, k, v)
        x = b.graph.add(x, b.linear(a, f"{name}.self_attn.dense", c.hidden_size, bias=True))
        m = b.graph.gelu_tanh(b.linear(h, f"{name}.mlp.fc1", c.intermediate_size, bias=True))
        x = b.graph.add(x, b.linear(m, f"{name}.mlp.fc2", c.hidden_size, bias=True))
    if not b.wants_logits():
        return b.finish(x)
    x = b.layer_norm(b.last_row(x), "model.final_layernorm", c.layer_norm_eps)
    return b.finish(b.linear(x, "lm_head", c.vocab_size, bias=True))


ARCHITECTURE = Architecture(parse_config, build_step, rope, default_kv_offset="symenv")
