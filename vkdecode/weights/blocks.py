"""Rows of block formats to and from float32, through the `gguf` package, which defines what their bytes mean."""

from __future__ import annotations

import functools

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from vkdecode.errors import ConfigError
from vkdecode.weights.dtypes import DType

QUANTIZED_AT_LOAD = (DType.Q8_0, DType.Q4_0)
"""Block formats that `encode_rows` makes."""

# The float16 scales of a block: byte offset, and a value with which random integers deviate by about 0.02 around 0, as
# weights do before training.
_SCALES = {
    DType.Q4_0: ((0, 4.3e-3),),
    DType.Q4_1: ((0, 4.3e-3), (2, -3.2e-2)),
    DType.Q5_0: ((0, 2.2e-3),),
    DType.Q5_1: ((0, 2.2e-3), (2, -3.4e-2)),
    DType.Q8_0: ((0, 2.7e-4),),
    DType.Q2_K: ((80, 1.3e-3), (82, 2.0e-3)),
    DType.Q3_K: ((108, 4.7e-4),),
    DType.Q4_K: ((0, 8.0e-5), (2, 6.0e-4)),
    DType.Q5_K: ((0, 4.0e-5), (2, 6.0e-4)),
    DType.Q6_K: ((208, 1.5e-5),),
    DType.IQ4_NL: ((0, 2.8e-4),),
}


def ggml_type(dtype: DType) -> GGMLQuantizationType:
    """The GGUF name of a type that files hold."""
    return GGMLQuantizationType[dtype.name]


def decode_rows(rows: NDArray[np.uint8], kind: GGMLQuantizationType, block_bytes: int) -> NDArray[np.float32]:
    """Turn raw rows, uint8 [n, bytes], into float32 [n, columns].

    `dequantize` works 16 rows at a time, so that few long rows are faster than many short ones.
    """
    blocks = rows.size // block_bytes
    width = next(width for width in (256, 128, 64, 32, 16, 8, 4, 2, 1) if blocks % width == 0)
    values = dequantize(rows.reshape(-1, width * block_bytes), kind)
    return np.asarray(values, np.float32).reshape(rows.shape[0], -1)


def encode_rows(values: NDArray[np.generic], dtype: DType, name: str) -> NDArray[np.uint8]:
    """Quantize rows [n, columns], columns a multiple of the block's, into raw rows, uint8 [n, bytes].

    Raises:
        ConfigError: a value is not finite or so large that its block's float16 scale is not, so no block can hold it.

    """
    wide = values.astype(np.float32)
    if not np.isfinite(wide).all():
        raise ConfigError(f"tensor {name} has values that are not finite, which {dtype.value} cannot hold")
    with np.errstate(all="ignore"):  # a scale that underflows makes a block of zeros, one that overflows is found below
        rows = np.ascontiguousarray(quantize(wide, ggml_type(dtype)))
    if not scales_are_finite(rows, dtype):
        raise ConfigError(f"tensor {name} has values beyond the range of {dtype.value}; use weights 'bf16' or 'f32'")
    return rows


@functools.cache
def can_decode(kind: GGMLQuantizationType, block_bytes: int) -> bool:
    """Whether the `gguf` package can turn this type into numbers."""
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def scales_are_finite(rows: NDArray[np.uint8], dtype: DType) -> bool:
    """Whether all blocks of these raw rows hold numbers: the scales are all that could be infinite or NaN in them."""
    blocks = rows.reshape(-1, dtype.block_bytes)
    # An exponent of all ones, in the high byte of a little-endian float16.
    return not any(((blocks[:, at + 1] & 0x7C) == 0x7C).any() for at, _ in _SCALES[dtype])


def random_rows(rng: np.random.Generator, rows: int, columns: int, dtype: DType) -> NDArray[np.uint8]:
    """Raw rows of random integers with fixed scales, uint8 [rows, bytes]; values have a deviation of about 0.02."""
    raw = rng.integers(0, 256, (rows, dtype.row_bytes(columns)), np.uint8)
    blocks = raw.reshape(-1, dtype.block_bytes)
    for at, scale in _SCALES[dtype]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return raw
