"""StarCoder 2: layer norms, biases everywhere, an MLP without a gate, and a sliding window.

Lozhkov et al. 2024, "StarCoder 2 and The Stack v2". Follows `Starcoder2ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import embed, qkv
from vkdecode.models.config import (
    DecoderConfig,
    activation,
    decoder_sizes,
    flag,
    layer_windows,
    positive_float,
    size_or_none,
)
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class Starcoder2Config(DecoderConfig):
    """What shapes a StarCoder 2 graph; `windows` holds each layer's, 0 for none."""

    norm_epsilon: float
    tie_word_embeddings: bool
    use_bias: bool
    activation: str
    windows: tuple[int, ...]


def parse_config(config: Mapping[str, Any]) -> Starcoder2Config:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    sizes = decoder_sizes(config)
    window = size_or_none(config, "sliding_window", None)
    return Starcoder2Config(
        **sizes,
        norm_epsilon=positive_float(config, "norm_epsilon", 1e-5),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        use_bias=flag(config, "use_bias", True),
        activation=activation(config, "hidden_act", "gelu_pytorch_tanh"),
        windows=layer_windows(config, sizes["num_hidden_layers"], window, lambda layer: window is not None),
    )


def build_step(
    c: Starcoder2Config, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer, window in enumerate(c.windows):
        name = f"model.layers.{layer}"
        h = b.layer_norm(x, f"{name}.input_layernorm", c.norm_epsilon)
        q, k, v = qkv(b, h, f"{name}.self_attn", c, c.use_bias)
        a = b.attention(layer, b.rope(q), b.rope(k), v, window=window)
        x = b.graph.add(x, b.linear(a, f"{name}.self_attn.o_proj", c.hidden_size, c.use_bias))
        h = b.layer_norm(x, f"{name}.post_attention_layernorm", c.norm_epsilon)
        m = b.activation(b.linear(h, f"{name}.mlp.c_fc", c.intermediate_size, c.use_bias), c.activation)
        x = b.graph.add(x, b.linear(m, f"{name}.mlp.c_proj", c.hidden_size, c.use_bias))
    if not b.wants_logits():
        return b.finish(x)
    x = b.layer_norm(b.last_row(x), "model.norm", c.norm_epsilon)
    return b.finish(b.linear(x, "model.embed_tokens" if c.tie_word_embeddings else "lm_head", c.vocab_size))


ARCHITECTURE = Architecture(parse_config, build_step)
