"""Which type a matrix is held in when another one than its file's is asked for, and turning its rows into that type."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ConfigError, InvalidInputError
from vkdecode.weights.blocks import QUANTIZED_AT_LOAD, decode_rows, encode_rows, ggml_type
from vkdecode.weights.dtypes import PLAIN_DTYPES, DType

ASKED_DTYPES = (*PLAIN_DTYPES, *QUANTIZED_AT_LOAD)
"""What `weights=` can name."""

_ASKED = {dtype.value: dtype for dtype in ASKED_DTYPES}
# As Hugging Face and as GGUF files call them.
_VOCABULARY = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "token_embd", "output")
_POSITIONS = ("wpe", "position_embd")
_ROUTERS = ("gate", "router", "shared_expert_gate", "ffn_gate_inp", "ffn_gate_inp_shexp")


def asked_dtype(weights: str | None) -> DType | None:
    """The type that a `weights` option names; raises `InvalidInputError` for another word."""
    if weights is None:
        return None
    if not isinstance(weights, str) or weights not in _ASKED:
        raise InvalidInputError(f"weights must be one of {sorted(_ASKED)} or None, not {weights!r}")
    return _ASKED[weights]


def keeps_its_type(name: str) -> bool:
    """Whether a tensor of this Hugging Face or GGUF name is small and delicate, so that nobody quantizes it.

    These are position embeddings, routers of experts, and norms that are kept as matrices.
    """
    module = _module(name)
    return module in (*_POSITIONS, *_ROUTERS) or module.endswith("_norm")


def dtype_for_matrix(name: str, stored: DType, columns: int, asked: DType | None) -> DType:
    """The type to hold a matrix in, `name` being its Hugging Face or GGUF name.

    None keeps the file's type. Q4_0 is too coarse for the embedding and the output head, which get Q8_0, as llama.cpp
    does. A matrix whose rows do not divide into blocks, or that `keeps_its_type`, is held at 16 bits instead: as it is
    stored, else as F16.
    """
    if asked is None:
        return stored
    wanted = DType.Q8_0 if asked is DType.Q4_0 and _module(name) in _VOCABULARY else asked
    if wanted.fits(columns) and not (wanted.is_block and keeps_its_type(name)):
        return wanted
    return stored if stored in (DType.F16, DType.BF16) else DType.F16


def _module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def recode_rows(values: NDArray[np.generic], stored: DType, held: DType, name: str) -> NDArray[np.generic]:
    """Rows of one type as rows of another; those of a block format are raw bytes, uint8 [n, bytes].

    Raises:
        ConfigError: a value is beyond the range of the other type.

    """
    if stored is held:
        return values
    if stored.is_block:
        values = decode_rows(values.view(np.uint8), ggml_type(stored), stored.block_bytes)
    if held.is_block:
        return encode_rows(values, held, name)
    with np.errstate(over="ignore"):
        converted = values.astype(held.numpy)
    if not np.isfinite(converted.astype(np.float32)).all() and np.isfinite(values.astype(np.float32)).all():
        raise ConfigError(f"tensor {name} holds values beyond the range of {held.value}; use weights 'bf16' or 'f32'")
    return converted
