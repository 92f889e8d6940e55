"""Small vocabularies as GGUF metadata, and a tokenizer made of such metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from model_files import LLAMA_META, write_gguf

from vkdecode.text import Tokenizer, load_tokenizer
from vkdecode.text.stream import byte_level_alphabet
from vkdecode.weights import open_weights

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def load(folder: Path, meta: dict[str, Any]) -> Tokenizer:
    size = len(meta.get("tokenizer.ggml.tokens", [])) or 4
    path = write_gguf(folder / "m.gguf", {**LLAMA_META, **meta}, {"token_embd.weight": np.ones((size, 64), np.float32)})
    return load_tokenizer(open_weights(path))


def byte_level_meta(**more: Any) -> dict[str, Any]:
    """A byte-level vocabulary: all bytes, two merges, a control and a user-defined token."""
    tokens = [*byte_level_alphabet(), "he", "Ġhe", "<s>", "<|eot_id|>", "[tool]"]
    types = [NORMAL] * 258 + [CONTROL, CONTROL, USER]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "Ġ he"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 258,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_meta(pieces: dict[str, float], **more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, all bytes, then the pieces with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [float(score) for score in pieces.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "▁a": -4.0, "ab": -5.0, "▁ab": -6.0, "é": -7.0}
