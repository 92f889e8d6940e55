"""What every weight file offers, whatever its format.

A `WeightSource` speaks Hugging Face: its config keys and tensor names are those of a Hugging Face folder, so the models
above know one dialect only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.weights.dtypes import DType

_Source = TypeVar("_Source", bound="ClosableSource")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and element type of one tensor.

    `dtype` is what `WeightSource.read` returns; `stored_as` is the file's own name for the encoding ("F16", "BF16",
    "Q4_1"). `shape` counts numbers, also where `dtype` is a block format.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    stored_as: str

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of the array that `WeightSource.read` returns for all rows: raw bytes for a block format."""
        return (*self.shape[:-1], self.dtype.row_bytes(self.shape[-1])) if self.dtype.is_block else self.shape


class WeightSource(Protocol):
    """A model on disk: a config and named tensors, read a few rows at a time.

    `config` is a Hugging Face style dict and always has the string "model_type"; `generation_config` is {} where there
    is none. Tensors whose encoding cannot be held are listed by `names`, and refused by `info` and `read`.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def names(self) -> Sequence[str]:
        """Hugging Face names of all tensors."""
        ...

    def __contains__(self, name: object) -> bool:
        """Whether a tensor of that name is there."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and element type; `ModelFileError` if it is missing, `UnsupportedModelError` if it cannot be held."""
        ...

    def read(self, name: str, rows: slice | NDArray[Any] | None = None) -> NDArray[Any]:
        """Return rows along axis 0 as a C-contiguous array of `info(name).dtype`.

        A row of a block format comes as its raw bytes, uint8; see `TensorInfo.read_shape`.

        `rows` is a slice, an integer index array, or None for all of them. No more than the asked rows and one bounded
        block are held in memory.
        """
        ...

    def close(self) -> None:
        """Release the files; reading afterwards raises `ClosedError`."""
        ...


class ClosableSource:
    """The part that all sources share: closing once, and use as a context manager."""

    path: Path
    _closed: bool = False

    def close(self) -> None:
        """Release the files; reading afterwards raises `ClosedError`."""
        self._closed = True

    def __enter__(self: _Source) -> _Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path} was closed; open the weights again to read from them")


def row_indices(rows: slice | NDArray[Any] | None, count: int, name: str) -> NDArray[np.int64]:
    """Turn a row selection into indices 0 ≤ i < count, int64 [n]; `InvalidInputError` if one is wrong."""
    if rows is None:
        return np.arange(count, dtype=np.int64)
    if isinstance(rows, slice):
        return np.arange(*rows.indices(count), dtype=np.int64)
    given = np.asarray(rows)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidInputError(
            f"rows of {name} must be a slice or a 1-D integer array, not {given.dtype} with {given.ndim} dimensions"
        )
    if given.size and (int(given.min()) < 0 or int(given.max()) >= count):
        raise InvalidInputError(
            f"rows {int(given.min())}..{int(given.max())} of {name} are outside its {count} rows (0..{count - 1})"
        )
    return given.astype(np.int64)
