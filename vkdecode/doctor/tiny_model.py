"""A tiny random Llama: its files, and its logits in float64 without graphs, plans or caches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from vkdecode.doctor import references
from vkdecode.doctor.dispatch import generator

F64 = NDArray[np.float64]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TOKEN_IDS = tuple(int(i) for i in generator("tokens").integers(0, CONFIG["vocab_size"], 16))
PROMPT_TOKENS = 11


def make_weights() -> dict[str, NDArray[np.float32]]:
    """The tensors by their Hugging Face names; the same on every machine."""
    rng, c = generator("tiny llama"), CONFIG
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    q_size, kv_size = (c[f"num_{which}_heads"] * c["head_dim"] for which in ("attention", "key_value"))

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return np.asarray(rng.standard_normal((rows, columns)) * 1.5 / columns**0.5, np.float32)

    def norm() -> NDArray[np.float32]:
        return np.asarray(1 + 0.1 * rng.standard_normal(hidden), np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(c["vocab_size"], hidden),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(c["vocab_size"], hidden),
    }
    for layer in range(c["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.self_attn.q_proj.weight": matrix(q_size, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(kv_size, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, q_size),
            f"{name}.post_attention_layernorm.weight": norm(),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def write_model(folder: Path) -> None:
    """Write the model as a Hugging Face folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(make_weights(), folder / "model.safetensors")


def logits_of(token_ids: Sequence[int]) -> F64:
    """The logits after each token, [tokens, vocab]; Touvron et al. 2023, without any cache."""
    c, epsilon = CONFIG, CONFIG["rms_norm_eps"]
    weights = {name: values.astype(np.float64) for name, values in make_weights().items()}
    heads, kv_heads, head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    tokens = len(token_ids)
    frequencies = c["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(tokens)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    x = weights["model.embed_tokens.weight"][list(token_ids)]
    for layer in range(c["num_hidden_layers"]):
        part = {name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): w for name, w in weights.items()}
        h = references.rms_norm(x, part["input_layernorm"], epsilon)
        q = references.rotate((h @ part["self_attn.q_proj"].T).reshape(tokens, heads, head_dim), cos, sin)
        k = references.rotate((h @ part["self_attn.k_proj"].T).reshape(tokens, kv_heads, head_dim), cos, sin)
        v = (h @ part["self_attn.v_proj"].T).reshape(tokens, kv_heads, head_dim)
        mixed = references.attention(q, k, v, head_dim**-0.5)
        x = x + mixed.reshape(tokens, -1) @ part["self_attn.o_proj"].T
        h = references.rms_norm(x, part["post_attention_layernorm"], epsilon)
        inner = references.silu(h @ part["mlp.gate_proj"].T) * (h @ part["mlp.up_proj"].T)
        x = x + inner @ part["mlp.down_proj"].T
    x = references.rms_norm(x, weights["model.norm.weight"], epsilon)
    return np.asarray(x @ weights["lm_head.weight"].T)
