"""A tensor on its way into a file: what it will be, and its bytes a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vkdecode.weights.dtypes import DType
from vkdecode.weights.families import AS_IS, Layout
from vkdecode.weights.recode import recode_rows
from vkdecode.weights.source import WeightSource

Progress = Callable[[int, int], None]
_PIECE_BYTES = 8 << 20  # of float32 values, which is what a piece is at most while its type is changed


@dataclass(frozen=True)
class OutputTensor:
    """Name, shape (rows first), encoding and bytes of a tensor to write.

    `encoding` is the name that both GGUF and safetensors use, such as "F32" or "BF16". The pieces are contiguous, are
    written one after another, and have `nbytes` together.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    nbytes: int
    pieces: Callable[[], Iterator[NDArray[Any]]]


def recoded(source: WeightSource, name: str, held: DType) -> OutputTensor:
    """A tensor of an open source in the type `held`, under its own name."""
    return in_layout(source, (name,), name, source.info(name).shape, held, AS_IS, 1)


def in_layout(
    source: WeightSource,
    names: Sequence[str],
    output_name: str,
    shape: tuple[int, ...],
    held: DType,
    layout: Layout,
    heads: int,
) -> OutputTensor:
    """Tensors of an open source as one tensor of a GGUF file, in the type `held`.

    Args:
        source: where they are.
        names: their names there, in the order of a stack.
        output_name: the name of the one tensor.
        shape: its shape.
        held: its type.
        layout: how a GGUF file keeps it.
        heads: the head count that its row order depends on.

    """
    columns = shape[-1] if len(shape) > 1 else 1
    nbytes = held.row_bytes(columns) * (math.prod(shape) // max(columns, 1))

    def pieces() -> Iterator[NDArray[Any]]:
        for name in names if nbytes else ():
            for values, dtype in _ordered(source, name, layout, heads):
                rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
                yield np.ascontiguousarray(recode_rows(rows, dtype, held, name))

    return OutputTensor(output_name, shape, held.name, nbytes, pieces)


def _ordered(source: WeightSource, name: str, layout: Layout, heads: int) -> Iterator[tuple[NDArray[Any], DType]]:
    """The values of one tensor as a GGUF file keeps them, a few rows at a time.

    A matrix that is kept transposed is read whole, and from a stack of such matrices one after another.
    """
    info = source.info(name)
    count = info.shape[0] if info.shape else 1
    if layout.transposed or layout.parts > 1:
        stacked = len(info.shape) > 2
        for first in range(count if stacked else 1):
            matrix = source.read(name, slice(first, first + 1))[0] if stacked else source.read(name)
            part = matrix[..., layout.part :: layout.parts]
            yield (part.T if layout.transposed else part), info.dtype
        return
    step = max(1, _PIECE_BYTES // (4 * math.prod(info.shape[1:])))
    for start in range(0, count, step):
        there = np.arange(start, min(start + step, count))
        values = source.read(name, layout.original_rows(there, count, heads))
        if layout.plus_one:
            yield values.astype(np.float32) + np.float32(1), DType.F32
        else:
            yield values, info.dtype


def write_pieces(tensor: OutputTensor, file: BinaryIO, progress: Callable[[int], None]) -> None:
    """Write a tensor's bytes; `progress` is called with the bytes of each piece."""
    written = 0
    for piece in tensor.pieces():
        # Not ndarray.tofile, whose errors do not say why.
        file.write(piece.reshape(-1).view(np.uint8).data)
        written += piece.nbytes
        progress(piece.nbytes)
    assert written == tensor.nbytes, f"{tensor.name} has {written} bytes, not {tensor.nbytes}"


def counted(tensors_nbytes: int, progress: Progress | None) -> Callable[[int], None]:
    """A function that adds up bytes and tells `progress` how many are done of all."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, tensors_nbytes)

    return add
