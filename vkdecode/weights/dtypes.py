"""Element types of tensors, in files and on devices."""

from __future__ import annotations

import enum

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike


class DType(enum.Enum):
    """Element type of a tensor; the value is the name users write."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    U32 = "u32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 2 if self in (DType.F16, DType.BF16) else 4

    @property
    def numpy(self) -> DTypeLike:
        """The numpy dtype with the same bits (bfloat16 through ml_dtypes)."""
        return _NUMPY[self]


_NUMPY: dict[DType, DTypeLike] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.U32: np.dtype(np.uint32),
}
