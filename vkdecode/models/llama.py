"""Llama, and what is Llama under another name: SmolLM2, TinyLlama, Llama 2 and 3.x, Yi.

Touvron et al. 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models"; grouped-query attention after Ainslie et
al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import ConfigError
from vkdecode.models.config import DecoderConfig, decoder_sizes, flag, known, positive_float
from vkdecode.models.rope import Rope, rope_from_config
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable

DEFAULT_KV_OFFSET = "device"


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """What shapes a Llama graph; names as in Hugging Face configs."""

    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


def parse_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Read and check a config.

    Raises:
        ConfigError: a value is missing, impossible, or contradicts another.
        UnsupportedModelError: it asks for something that would change the result and is not supported.

    """
    known(config, "hidden_act", "silu", ("silu",))
    return LlamaConfig(
        **decoder_sizes(config),
        rms_norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
    )


def rope(config: Mapping[str, Any], c: LlamaConfig) -> Rope:
    """The rotation of q and k."""
    return rope_from_config(config, c.head_dim)


def check_tensors(c: LlamaConfig, tensors: TensorTable) -> None:
    """Refuse what the config says is not there: ignoring it would change the result."""
    tensors.check_layers("model.layers.", c.num_hidden_layers)
    for name in tensors.names():
        if name.endswith("_proj.bias"):
            allowed = c.attention_bias if ".self_attn." in name else c.mlp_bias
            if not allowed:
                raise ConfigError(f"the file has a tensor {name}, but its config says that there is no such bias")


def build_step(
    c: LlamaConfig, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    x = b.embed("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        h = b.rms_norm(x, f"{name}.input_layernorm.weight", c.rms_norm_eps)
        q = b.rope(b.linear(h, f"{name}.self_attn.q_proj", q_size, c.attention_bias))
        k = b.rope(b.linear(h, f"{name}.self_attn.k_proj", kv_size, c.attention_bias))
        v = b.linear(h, f"{name}.self_attn.v_proj", kv_size, c.attention_bias)
        a = b.attention(layer, q, k, v)
        x = b.graph.add(x, b.linear(a, f"{name}.self_attn.o_proj", c.hidden_size, c.attention_bias))
        h = b.rms_norm(x, f"{name}.post_attention_layernorm.weight", c.rms_norm_eps)
        gate = b.graph.silu(b.linear(h, f"{name}.mlp.gate_proj", c.intermediate_size, c.mlp_bias))
        up = b.linear(h, f"{name}.mlp.up_proj", c.intermediate_size, c.mlp_bias)
        x = b.graph.add(x, b.linear(b.graph.mul(gate, up), f"{name}.mlp.down_proj", c.hidden_size, c.mlp_bias))
    if not b.wants_logits():
        return b.finish(x)
    x = b.rms_norm(b.last_row(x), "model.norm.weight", c.rms_norm_eps)
    head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
    return b.finish(b.linear(x, head, c.vocab_size))
