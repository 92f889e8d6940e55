"""Moving words between the host and device-only storage, which has no transfer usage, through a copy kernel."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import InvalidInputError
from vkdecode.gpu.device import Device
from vkdecode.gpu.kernels import registry
from vkdecode.gpu.recorder import Algorithm, Download, Recording, Run
from vkdecode.gpu.storage import Storage, StorageKind
from vkdecode.weights.dtypes import DType

_PIECE_BYTES = 4 << 20
_WORKGROUP = 64
_WORDS_EACH = 16


class Uploader:
    """Fills storage: what the host cannot see piece by piece, through one reused host buffer."""

    def __init__(self, device: Device, piece_bytes: int = _PIECE_BYTES) -> None:
        self._device = device
        self._host = device.allocate(min(piece_bytes, device.largest_buffer_bytes), DType.U32, StorageKind.HOST)
        self._algorithms: dict[Storage, Algorithm] = {}  # by the whole target, since making one costs most of a piece

    def write(self, target: Storage, start_byte: int, values: NDArray[Any]) -> None:
        """Put an array's bytes (a multiple of 4) into `target` from a byte offset (a multiple of 4) on.

        Raises:
            InvalidInputError: the piece does not fit or is not made of whole words.

        """
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if data.size % 4 or start_byte % 4 or not 0 <= start_byte <= target.nbytes - data.size:
            raise InvalidInputError(
                f"{data.size} bytes at {start_byte} do not fit a storage of {target.nbytes} bytes as whole words"
            )
        words = data.view(np.uint32)
        if target.kind is StorageKind.HOST:
            target.words[start_byte // 4 : start_byte // 4 + words.size] = memoryview(cast(Any, words))
            return
        step = self._host.nbytes // 4
        for first in range(0, words.size, step):
            piece = words[first : first + step]
            self._host.write(piece)
            self._copy(target, start_byte // 4 + first, piece.size)

    def _copy(self, target: Storage, start_word: int, count: int) -> None:
        whole = target.whole
        if whole not in self._algorithms:
            self._algorithms[whole] = copy_algorithm(self._device, self._host, whole, self._host.nbytes // 4)
        push = {"source_start": 0, "target_start": target.first_byte // 4 + start_word, "count": count}
        Recording(self._device, [Run(self._algorithms[whole], push)]).submit()

    def close(self) -> None:
        """Give the host buffer back."""
        self._algorithms.clear()
        self._host.close()


def read_words(device: Device, source: Storage, piece_bytes: int = _PIECE_BYTES) -> NDArray[np.uint32]:
    """All words of a device-only storage, uint32 [nbytes / 4]."""
    total = source.nbytes // 4
    step = min(piece_bytes // 4, device.largest_buffer_bytes // 4, total)
    staging = device.allocate(4 * step, DType.U32, StorageKind.STAGED)
    algorithm = copy_algorithm(device, source.whole, staging, step)
    result = np.empty(total, np.uint32)
    for first in range(0, total, step):
        count = min(step, total - first)
        push = {"source_start": source.first_byte // 4 + first, "target_start": 0, "count": count}
        Recording(device, [Run(algorithm, push), Download((staging,))]).submit()
        result[first : first + count] = staging.data[:count]
    staging.close()
    return result


def copy_algorithm(device: Device, source: Storage, target: Storage, most_words: int) -> Algorithm:
    """A copy kernel for up to `most_words`."""
    groups = -(-most_words // (_WORKGROUP * _WORDS_EACH))
    return Algorithm(
        device,
        registry().get("copy_words"),
        [source, target],
        {"WORKGROUP": _WORKGROUP},
        (min(groups, device.info.limits.max_compute_work_group_count[0]), 1, 1),
    )
