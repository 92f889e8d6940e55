"""Element types of tensors, in files and on devices: plain numbers, and the GGUF formats that hold a block of columns.

A block format stores consecutive columns of one row together: small integers, and the scales that turn them into
numbers. What the bytes of a block mean is known to `blocks.py` (on the host) and to `shaders/blocks.glsl`.
"""

from __future__ import annotations

import enum

import ml_dtypes
import numpy as np


class DType(enum.Enum):
    """Element type of a tensor; the value is the name users write."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    U32 = "u32"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_NL = "iq4_nl"

    @property
    def is_block(self) -> bool:
        """Whether it is a block format; its rows are held as raw bytes."""
        return self in _BLOCKS

    @property
    def block_columns(self) -> int:
        """Columns of a row that are stored together; 1 for a plain type."""
        return _BLOCKS[self][0] if self in _BLOCKS else 1

    @property
    def block_bytes(self) -> int:
        """Bytes of `block_columns` columns."""
        return _BLOCKS[self][1] if self in _BLOCKS else self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element of `numpy`: 1 for a block format, whose rows are bytes."""
        return _NUMPY[self].itemsize

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype with the same bits: bfloat16 through ml_dtypes, uint8 for the raw bytes of a block format."""
        return _NUMPY[self]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row as files store it; `columns` is a multiple of `block_columns`."""
        return columns // self.block_columns * self.block_bytes

    def fits(self, columns: int) -> bool:
        """Whether a row of this many columns can be stored so."""
        return columns % self.block_columns == 0


PLAIN_DTYPES = (DType.F32, DType.F16, DType.BF16)
"""What matrices can be held in besides the block formats."""

# Columns and bytes of a block, as ggml defines them (the `gguf` package's GGML_QUANT_SIZES).
_BLOCKS = {
    DType.Q4_0: (32, 18),
    DType.Q4_1: (32, 20),
    DType.Q5_0: (32, 22),
    DType.Q5_1: (32, 24),
    DType.Q8_0: (32, 34),
    DType.Q2_K: (256, 84),
    DType.Q3_K: (256, 110),
    DType.Q4_K: (256, 144),
    DType.Q5_K: (256, 176),
    DType.Q6_K: (256, 210),
    DType.IQ4_NL: (32, 18),
}
BLOCK_DTYPES = tuple(_BLOCKS)
"""The block formats that devices hold as files store them."""

_NUMPY: dict[DType, np.dtype[np.generic]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.U32: np.dtype(np.uint32),
    **dict.fromkeys(_BLOCKS, np.dtype(np.uint8)),
}
