"""Parses the header of a GGUF file: metadata and where each tensor lies.

The `gguf` package's own reader makes several arrays per vocabulary entry (seconds for a large vocabulary) and trusts
the counts in the file, so the header is parsed here with every count checked against the bytes that are left. Type
numbers, block sizes and dequantization come from the `gguf` package. Format: the GGUF specification in the ggml
repository, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from vkdecode.errors import ModelFileError, UnsupportedModelError

MetaValue = Any
"""A scalar, a str, a list of str, or a 1-D numpy array."""
MetaType = tuple[GGUFValueType, GGUFValueType | None]
"""The type of a value, and for an array that of its elements."""

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_OLD_MAGICS = {b"lmgg", b"tjgg", b"fmgg", b"algg"}
_MAX_STRING = 64 << 20
_MAX_NAME = 1 << 16
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies; `shape` is in numpy order (rows first), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file, under the names of the file."""

    metadata: dict[str, MetaValue]
    types: dict[str, MetaType]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads values one after another and knows how many bytes are left."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file = file
        self.path = path
        self.size = size
        self.at = 0

    @property
    def left(self) -> int:
        return self.size - self.at

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.error(f"{what} needs {count} bytes where {self.left} are left")
        data = self._file.read(count)
        if len(data) != count:
            raise self.error(f"{what} could not be read")
        self.at += count
        return data

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int = _MAX_STRING) -> str:
        length = self.u64(what)
        if length > limit:
            raise self.error(f"{what} claims {length} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text") from error

    def strings(self, count: int, what: str) -> list[str]:
        """Read so many strings; a vocabulary has a hundred thousand, so one check stands for all."""
        read, texts = self._file.read, []
        for _ in range(count):
            length = int.from_bytes(head := read(8), "little")
            data = read(length) if length <= min(self.left - 8, _MAX_STRING) else b""
            try:
                if len(head) != 8 or len(data) != length:
                    raise ValueError
                texts.append(data.decode("utf-8"))
            except ValueError:
                self._file.seek(self.at)
                texts.append(self.string(what))  # says what is wrong
                continue
            self.at += 8 + length
        return texts

    def count(self, what: str, smallest: int) -> int:
        """Read a count of things that take at least `smallest` bytes each."""
        value = self.u64(what)
        if value * smallest > self.left:
            raise self.error(f"the header claims {value} {what}, more than its {self.size} bytes can hold")
        return value

    def error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is a truncated or damaged GGUF file: {what}; download it again")


def read_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header, checking every count, type, offset and extent against the file's size.

    Raises `ModelFileError` for a damaged or foreign file, `UnsupportedModelError` for split files and unknown tensor
    types.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            cursor = _Cursor(file, path, size)
            _check_version(cursor)
            tensor_count = cursor.count("tensors", 24)
            metadata_count = cursor.count("metadata entries", 13)
            metadata, types = _read_metadata(cursor, metadata_count)
            _check_whole(path, metadata)
            return GgufHeader(metadata, types, _read_tensors(cursor, tensor_count, _alignment(cursor, metadata)))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error


def _check_version(cursor: _Cursor) -> None:
    if cursor.size < 24:
        raise ModelFileError(f"{cursor.path} has only {cursor.size} bytes; it is not a GGUF file or was cut short")
    magic = cursor.take(4, "the magic number")
    if magic in _OLD_MAGICS:
        raise ModelFileError(f"{cursor.path} is in a format older than GGUF; convert it again with a current llama.cpp")
    if magic != b"GGUF":
        raise ModelFileError(f"{cursor.path} is not a GGUF file: it starts with {magic!r}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise ModelFileError(f"{cursor.path} is a big-endian GGUF file; convert it to little-endian")
    if version > 3:
        raise ModelFileError(f"{cursor.path} is GGUF version {version}; versions 2 and 3 are supported")
    if version < 2:
        raise ModelFileError(f"{cursor.path} is GGUF version {version}; convert it again with a current llama.cpp")


def _read_metadata(cursor: _Cursor, count: int) -> tuple[dict[str, MetaValue], dict[str, MetaType]]:
    metadata: dict[str, MetaValue] = {}
    types: dict[str, MetaType] = {}
    for _ in range(count):
        key = cursor.string("a metadata key", _MAX_NAME)
        if key in metadata:
            raise cursor.error(f"the key {key!r} comes twice")
        metadata[key], types[key] = _read_value(cursor, key, cursor.u32(f"the type of {key}"))
    return metadata, types


def _value_type(cursor: _Cursor, key: str, number: int) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise cursor.error(f"{key!r} has the unknown value type {number}") from error


def _read_value(cursor: _Cursor, key: str, number: int) -> tuple[MetaValue, MetaType]:
    kind = _value_type(cursor, key, number)
    if kind is GGUFValueType.STRING:
        return cursor.string(f"the value of {key!r}"), (kind, None)
    if kind is not GGUFValueType.ARRAY:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(cursor.take(dtype.itemsize, f"the value of {key!r}"), dtype)[0].item(), (kind, None)
    element = _value_type(cursor, key, cursor.u32(f"the element type of {key!r}"))
    if element is GGUFValueType.ARRAY:
        raise cursor.error(f"{key!r} is an array of arrays")
    if element is GGUFValueType.STRING:
        count = cursor.count(f"strings in {key!r}", 8)
        return cursor.strings(count, f"a string of {key!r}"), (kind, element)
    dtype = np.dtype(_SCALARS[element])
    length = cursor.count(f"values in {key!r}", dtype.itemsize)
    return np.frombuffer(cursor.take(length * dtype.itemsize, f"the value of {key!r}"), dtype), (kind, element)


def _check_whole(path: Path, metadata: dict[str, MetaValue]) -> None:
    split = metadata.get("split.count")
    if isinstance(split, int) and split > 1:
        raise UnsupportedModelError(
            f"{path} is one of {split} parts of a split GGUF; join them with llama.cpp's gguf-split --merge "
            "and load the result"
        )


def _alignment(cursor: _Cursor, metadata: dict[str, MetaValue]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(f"general.alignment is {value!r}, not a power of two up to {_MAX_ALIGNMENT}")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    found: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
    for _ in range(count):
        name = cursor.string("a tensor name", _MAX_NAME)
        if name in found:
            raise cursor.error(f"tensor {name!r} comes twice")
        dims = cursor.u32(f"the dimensions of {name!r}")
        if not 1 <= dims <= 4:
            raise cursor.error(f"tensor {name!r} claims {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", cursor.take(8 * dims, f"the shape of {name!r}"))[::-1]
        kind = _tensor_type(cursor, name, cursor.u32(f"the type of {name!r}"))
        found[name] = (shape, kind, cursor.u64(f"the offset of {name!r}"))
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: _place(cursor, name, *entry, base, alignment) for name, entry in found.items()}
    _check_overlap(cursor, tensors)
    return tensors


def _tensor_type(cursor: _Cursor, name: str, number: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError as error:
        raise UnsupportedModelError(
            f"tensor {name!r} in {cursor.path} has the GGUF type {number}, which the installed gguf package does not "
            "know; a newer one may"
        ) from error


def _place(
    cursor: _Cursor,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
    offset: int,
    base: int,
    alignment: int,
) -> GgufTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape:
        raise cursor.error(f"tensor {name!r} has the empty shape {shape}")
    if shape[-1] % block:
        raise cursor.error(
            f"rows of {name!r} have {shape[-1]} values, not a multiple of the {kind.name} block of {block}"
        )
    row_bytes = shape[-1] // block * block_bytes
    if offset % alignment:
        raise cursor.error(f"tensor {name!r} starts at offset {offset}, which is not aligned to {alignment}")
    end = base + offset + row_bytes * math.prod(shape[:-1])
    if end > cursor.size:
        raise cursor.error(f"tensor {name!r} ends at byte {end} of a file of {cursor.size} bytes")
    return GgufTensor(name, shape, kind, base + offset, row_bytes)


def _check_overlap(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise cursor.error(f"tensors {last!r} and {tensor.name!r} overlap")
        end, last = tensor.offset + tensor.row_bytes * math.prod(tensor.shape[:-1]), tensor.name
