"""Writes safetensors files a few rows at a time, which the library cannot: it wants each tensor whole.

The format is a length, a JSON header and the bytes (the safetensors library's README); the library checks what is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vkdecode.weights.dtypes import DType
from vkdecode.weights.output_tensor import OutputTensor, write_pieces

_ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Sequence[OutputTensor], progress: Callable[[int], None]) -> None:
    """Write one file of plain tensors; `progress` is called with the bytes of each piece.

    Wide elements come first, so that each tensor is aligned to its own. Raises `OSError` where the system refuses.
    """
    ordered = sorted(tensors, key=lambda tensor: -DType[tensor.encoding].itemsize)
    # Readers for several frameworks ask for a format; all of them accept this one.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        offsets = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.encoding, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered:
            write_pieces(tensor, file, progress)


def shards(tensors: Sequence[OutputTensor], most_bytes: int) -> list[list[OutputTensor]]:
    """Tensors in files of at most so many bytes, in their order; a larger tensor has a file of its own."""
    files: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.nbytes > most_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files
