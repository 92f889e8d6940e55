"""Reads rows of a tensor from a file at a known offset.

Reads, unlike a memory map, turn a file that shrinks while it is open into an error instead of a bus fault, and leave no
pages of the file counted as this process's memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ModelFileError

BLOCK_BYTES = 1 << 20
"""Stored bytes handled at once; the working memory of a read on top of its result is a small multiple of this."""


class RowFile:
    """A file opened for reading byte ranges and rows; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._file = path.open("rb", buffering=0)
            self.size = self._file.seek(0, 2)
        except OSError as error:
            raise ModelFileError(f"cannot open {path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` (contiguous) with the bytes at `offset`."""
        view = out.data.cast("B") if out.size else memoryview(b"")
        with self._lock:
            try:
                self._file.seek(offset)
                while view:
                    got = self._file.readinto(view)
                    if not got:
                        raise ModelFileError(f"{self.path} ends early: {len(view)} bytes missing; download it again")
                    view = view[got:]
            except OSError as error:
                raise ModelFileError(f"cannot read {self.path}: {error.strerror or error}") from error

    def read_rows(self, offset: int, row_bytes: int, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the given rows of the table at `offset`, uint8 [len(rows), row_bytes].

        Indices may come in any order; each run of consecutive rows is one read.
        """
        out: NDArray[np.uint8] = np.empty((len(rows), row_bytes), np.uint8)
        for start, stop in _runs(rows):
            self.read_into(offset + int(rows[start]) * row_bytes, out[start:stop])
        return out

    def read_blocks(self, offset: int, row_bytes: int, rows: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield (where in `rows`, uint8 [n, row_bytes]) in blocks of about `BLOCK_BYTES`.

        A shuffled selection that nearly fills its span is read in one go and picked from.
        """
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            low, high = int(part.min()), int(part.max()) + 1
            if high - low <= 2 * len(part) and np.any(np.diff(part) != 1):
                span: NDArray[np.uint8] = np.empty((high - low, row_bytes), np.uint8)
                self.read_into(offset + low * row_bytes, span)
                yield slice(start, start + len(part)), span[part - low]
            else:
                yield slice(start, start + len(part)), self.read_rows(offset, row_bytes, part)


def _runs(rows: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Split indices into runs of consecutive rows, as (start, stop) positions."""
    edges = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [0, *edges.tolist(), len(rows)]
    for start, stop in itertools.pairwise(bounds):
        if stop > start:
            yield start, stop
