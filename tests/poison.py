"""Memory that holds NaN: what relies on zeroed memory, or on rows that it did not write, gives a wrong answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkdecode.decode import KvCache
from vkdecode.gpu import Device, Recording, Run, Storage, StorageKind, Upload, Uploader, copy_algorithm
from vkdecode.weights.dtypes import DType

# NaN as float32 and in both halves as f16 and bf16; as an id or a count far out of range.
POISON = np.uint32(0xFFFFFFFF)


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill every storage that is allocated from now on, on the device and on the host; its sizes in the list."""
    allocate = Device.allocate
    poisoned: list[int] = []

    def poisoning(device: Device, nbytes: int, dtype: DType, *args: Any, **kwargs: Any) -> Storage:
        storage = allocate(device, nbytes, dtype, *args, **kwargs)
        if storage.kind is StorageKind.DEVICE:
            source = allocate(device, storage.nbytes, DType.U32, StorageKind.HOST)
            source.data.view(np.uint32)[:] = POISON
            _copy(device, source, storage)
            source.close()
        else:
            storage.data.view(np.uint32)[:] = POISON
            if storage.kind is StorageKind.STAGED:
                Recording(device, [Upload((storage,))]).submit()
        poisoned.append(storage.nbytes)
        return storage

    monkeypatch.setattr(Device, "allocate", poisoning)
    return poisoned


def poison_storages(device: Device, *storages: Storage) -> None:
    """Fill storages: a kernel that still reads them shows it."""
    uploader = Uploader(device, max(storage.nbytes for storage in storages))
    for storage in storages:
        uploader.write(storage, 0, np.full(storage.nbytes // 4, POISON))
    uploader.close()


def poison_cache(device: Device, kv: KvCache) -> None:
    """Fill a cache's rows: its memory may have been another one's, whose rows hide that a step wrote none."""
    poison_storages(device, *(storage for layer in kv.layers for storage in (layer.k, layer.v)))


def _copy(device: Device, source: Storage, target: Storage) -> None:
    words = target.nbytes // 4
    copy = copy_algorithm(device, source, target, words)
    Recording(device, [Run(copy, {"source_start": 0, "target_start": 0, "count": words})]).submit()
