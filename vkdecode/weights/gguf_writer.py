"""Writes GGUF files through the `gguf` package's writer, tensors a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType

from vkdecode.weights.gguf_header import MetaType
from vkdecode.weights.output_tensor import OutputTensor, write_pieces

# What says how this file lies on the disk, which the writer decides.
_LAYOUT_KEYS = ("general.architecture", "general.alignment", "split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class MetaEntry:
    """One value of GGUF metadata with its type."""

    value: Any
    type: MetaType


def entry(value: bool | int | float | str | Sequence[str]) -> MetaEntry:
    """A value in the type that llama.cpp's converter gives it: uint32, float32, bool, string, or array of strings."""
    if isinstance(value, bool):
        return MetaEntry(value, (GGUFValueType.BOOL, None))
    if isinstance(value, int):
        return MetaEntry(value, (GGUFValueType.UINT32, None))
    if isinstance(value, float):
        return MetaEntry(value, (GGUFValueType.FLOAT32, None))
    if isinstance(value, str):
        return MetaEntry(value, (GGUFValueType.STRING, None))
    return MetaEntry(list(value), (GGUFValueType.ARRAY, GGUFValueType.STRING))


def plain_values(metadata: Mapping[str, MetaEntry]) -> dict[str, Any]:
    """Metadata as a reader of the file will see it: without types, numbers rounded, arrays of numbers as numpy's."""
    return {key: _as_read(one) for key, one in metadata.items()}


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, MetaEntry],
    tensors: Sequence[OutputTensor],
    progress: Callable[[int], None],
) -> None:
    """Write a file; `progress` is called with the bytes of each piece. Raises `OSError` where the system refuses."""
    writer = gguf.GGUFWriter(path, arch)
    for key, one in metadata.items():
        value = one.value.tolist() if isinstance(one.value, np.ndarray) else one.value
        # The format has empty arrays, the writer does not; neither says anything.
        if key not in _LAYOUT_KEYS and not (isinstance(value, list) and not value):
            writer.add_key_value(key, value, *one.type)
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.encoding]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        for tensor in tensors:
            write_pieces(tensor, file, progress)
            writer.write_padding(file, tensor.nbytes)
    except BaseException:
        with suppress(OSError):  # closing writes what is left, and may fail like what failed before
            writer.close()
        raise
    writer.close()


def _as_read(one: MetaEntry) -> Any:
    kind, element = one.type
    if kind is GGUFValueType.FLOAT32:
        return float(np.float32(one.value))
    if element in (None, GGUFValueType.STRING):
        return one.value
    widths = {GGUFValueType.INT32: np.int32, GGUFValueType.FLOAT32: np.float32}
    return one.value if isinstance(one.value, np.ndarray) else np.array(one.value, widths.get(element))
