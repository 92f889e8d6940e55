"""Shapes of well-known models, as their config.json files give them; no weights come with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int, **more: Any
) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        **more,
    }


def _llama3_rope(factor: float) -> Mapping[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rope_theta": 500000.0, "rope_scaling": scaling}


BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True, rope_theta=100000.0),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000, 2048),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, 131072, tie_word_embeddings=True, **_llama3_rope(32.0)),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, 131072, tie_word_embeddings=True, **_llama3_rope(32.0)),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256, 131072, **_llama3_rope(8.0)),
}
