"""One safetensors file: the library checks its header, rows are read at the header's offsets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.weights.dtypes import DType
from vkdecode.weights.jsonfile import parse_json_object
from vkdecode.weights.rowfile import RowFile
from vkdecode.weights.source import TensorInfo, row_indices

_HELD = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]
    stored_as: str
    offset: int


class SafetensorsFile:
    """The tensors of one safetensors file, read by rows."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelFileError(f"{path} is missing or not a regular file; download it again")
        try:
            with safe_open(path, framework="numpy") as checked:
                self.names: list[str] = list(checked.keys())
        except (SafetensorError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ModelFileError(f"{path} is not a sound safetensors file ({reason}); download it again") from error
        self._file = RowFile(path)
        try:
            self._entries = _read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def info(self, name: str) -> TensorInfo:
        """Shape and element type; `UnsupportedModelError` when it is neither F32, F16 nor BF16."""
        entry = self._entries[name]
        held = _HELD.get(entry.stored_as)
        if held is None:
            raise UnsupportedModelError(
                f"tensor {name} in {self._file.path} is stored as {entry.stored_as}; "
                f"only {', '.join(_HELD)} are supported"
            )
        return TensorInfo(name, entry.shape, held, entry.stored_as)

    def read(self, name: str, rows: slice | NDArray[Any] | None) -> NDArray[Any]:
        """Return rows along axis 0 as a C-contiguous array."""
        info = self.info(name)
        offset = self._entries[name].offset
        if not info.shape:
            return self._read_whole(info, offset).reshape(())
        wanted = row_indices(rows, info.shape[0], name)
        row_bytes = int(np.prod(info.shape[1:], dtype=np.int64)) * info.dtype.itemsize
        if np.all(np.diff(wanted) == 1):
            out = self._file.read_rows(offset, row_bytes, wanted)
        else:
            out = np.empty((len(wanted), row_bytes), np.uint8)
            for where, block in self._file.read_blocks(offset, row_bytes, wanted):
                out[where] = block
        return out.reshape(-1).view(info.dtype.numpy).reshape(len(wanted), *info.shape[1:])

    def _read_whole(self, info: TensorInfo, offset: int) -> NDArray[Any]:
        raw: NDArray[np.uint8] = np.empty(info.dtype.itemsize, np.uint8)
        self._file.read_into(offset, raw)
        return raw.view(info.dtype.numpy)


def _read_header(file: RowFile) -> dict[str, _Entry]:
    """Return the entries of a header that the library has accepted, with offsets from the start of the file."""
    size: NDArray[np.uint8] = np.empty(8, np.uint8)
    file.read_into(0, size)
    length = int(size.view("<u8")[0])
    if length > min(_MAX_HEADER_BYTES, file.size - 8):
        raise ModelFileError(f"{file.path} claims a header of {length} bytes; download it again")
    text: NDArray[np.uint8] = np.empty(length, np.uint8)
    file.read_into(8, text)
    try:
        header = parse_json_object(text.tobytes().decode("utf-8"), f"the header of {file.path}")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"the header of {file.path} is not UTF-8; download it again") from error
    header.pop("__metadata__", None)
    return {
        name: _Entry(tuple(entry["shape"]), str(entry["dtype"]), 8 + length + int(entry["data_offsets"][0]))
        for name, entry in header.items()
    }
