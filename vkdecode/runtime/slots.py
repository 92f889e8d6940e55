"""Activation memory that several plans use by turns."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

from vkdecode.gpu import Device, Storage, StorageKind
from vkdecode.weights.dtypes import DType


class SlotPool:
    """Storages for the activations of plans that never run at the same time, so that they can be the same ones.

    It only knows them: a storage lives as long as a plan holds it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[int, int], weakref.ref[Storage]] = {}

    def take(self, sizes: Sequence[int]) -> list[Storage]:
        """A storage for each size in bytes, no two of them the same.

        Raises:
            VkDecodeError: memory runs out, or a limit of the device is exceeded.

        """
        taken: list[Storage] = []
        made: list[Storage] = []
        count: Counter[int] = Counter()
        try:
            for size in sizes:
                key = size, count[size]
                count[size] += 1
                known = self._known.get(key)
                storage = known() if known is not None else None
                if storage is None or storage.closed:
                    storage = self._device.allocate(size, DType.F32, StorageKind.STAGED)
                    made.append(storage)
                    self._known[key] = weakref.ref(storage)
                taken.append(storage)
        except BaseException:
            # Now, not when the error is forgotten: whoever handles it may want the memory.
            for storage in made:
                storage.close()
            raise
        return taken
