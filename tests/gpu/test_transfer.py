"""Words to device-only storage and back, at odd sizes and across the pieces they travel in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Device, Storage, Uploader, read_words
from vkdecode.weights.dtypes import DType


def filled(device: Device, words: int) -> tuple[Storage, NDArray[np.uint32]]:
    """A storage whose words are all known, and they."""
    storage = device.allocate(4 * words, DType.U32)
    values = np.arange(storage.nbytes // 4, dtype=np.uint32) * np.uint32(2654435761)
    uploader = Uploader(device)
    uploader.write(storage, 0, values)
    uploader.close()
    return storage, values


@pytest.mark.parametrize("words", [1, 3, 4, 63, 64, 65, 1000, 4099])
@pytest.mark.parametrize("chunk_bytes", [16, 256, 1040, 4 << 20])
def test_words_come_back(device: Device, words: int, chunk_bytes: int) -> None:
    storage = device.allocate(4 * words, DType.U32)
    values = np.random.default_rng(words).integers(0, 1 << 32, storage.nbytes // 4, np.uint32)
    uploader = Uploader(device, chunk_bytes)
    uploader.write(storage, 0, values)
    uploader.close()
    for read_bytes in (chunk_bytes, 4 << 20):
        np.testing.assert_array_equal(read_words(device, storage, read_bytes), values)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 1), (5, 0), (63, 66), (130, 70), (199, 1)])
def test_a_piece_changes_only_itself(device: Device, start: int, count: int) -> None:
    storage, values = filled(device, 200)
    piece = np.full(count, 7, np.uint32)
    uploader = Uploader(device, 256)
    uploader.write(storage, 4 * start, piece)
    uploader.close()
    values[start : start + count] = 7
    np.testing.assert_array_equal(read_words(device, storage), values)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6, dtype=np.float16).reshape(3, 2),
        np.arange(12, dtype=np.uint8),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        np.arange(4, dtype=np.float64),
    ],
)
def test_any_array_travels_as_its_bytes(device: Device, values: NDArray[Any]) -> None:
    storage = device.allocate(64, DType.U32)
    uploader = Uploader(device)
    uploader.write(storage, 4, values)
    uploader.close()
    assert read_words(device, storage)[1:].tobytes()[: values.nbytes] == np.ascontiguousarray(values).tobytes()


def test_one_uploader_fills_several_storages(device: Device) -> None:
    storages = [device.allocate(4 * words, DType.U32) for words in (4, 100, 4)]
    uploader = Uploader(device, 64)
    for number, storage in enumerate([*storages, *storages]):
        uploader.write(storage, 0, np.full(storage.nbytes // 4, number, np.uint32))
    uploader.close()
    assert [int(word) for storage in storages for word in set(read_words(device, storage))] == [3, 4, 5]


@pytest.mark.parametrize(
    ("start", "values"),
    [
        (2, np.zeros(1, np.uint32)),
        (60, np.zeros(2, np.uint32)),
        (68, np.zeros(0, np.uint32)),
        (-4, np.zeros(1, np.uint32)),
        (0, np.zeros(3, np.uint8)),
        (0, np.zeros(3, np.float16)),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(device: Device, start: int, values: NDArray[Any]) -> None:
    storage = device.allocate(64, DType.U32)
    uploader = Uploader(device)
    with pytest.raises(InvalidInputError):
        uploader.write(storage, start, values)
    uploader.close()


def test_transfers_give_their_memory_back(device: Device) -> None:
    before = device.allocated_bytes
    storage, _ = filled(device, 100)
    read_words(device, storage)
    storage.close()
    assert device.allocated_bytes == before
