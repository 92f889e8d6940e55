"""Where the activations of a plan lie in its arena, and the memory that the plans of a context use by turns."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

from vkdecode.gpu import Device, Storage, StorageKind, storage_bytes
from vkdecode.graph import NodeId
from vkdecode.runtime.order import Span
from vkdecode.weights.dtypes import DType

_ALIGNMENT = 256
"""A GPU writes whole lines of its cache, so that two activations in one line would cost it time."""

Uses = tuple[Sequence[NodeId], Sequence[NodeId]]
"""The nodes that a dispatch reads and those that it writes."""


def place_activations(
    uses: Sequence[Uses], segments: Sequence[int], sizes: Mapping[NodeId, int], max_bytes: int
) -> tuple[dict[NodeId, Span], tuple[int, ...]]:
    """Give every activation a span of an arena, which it shares with those that are dead when it is written.

    A span is free as soon as a barrier comes that is needed anyway: what a dispatch reads was written since the last
    one.

    Args:
        uses: of each dispatch, KV caches included.
        segments: how many dispatches each submission holds.
        sizes: bytes of each activation, that is of what has a place here.
        max_bytes: of one arena; where it is full, another one begins.

    Returns:
        The span of each activation, whose place is `arena_place` of its arena, and the bytes of each arena.

    """
    last_use = {node: index for index, use in enumerate(uses) for part in use for node in part}
    starts = {sum(segments[:number]) for number in range(len(segments))}
    ordered = 0  # every dispatch before this one has ended
    written_at: dict[NodeId, int] = {}
    spans: dict[NodeId, Span] = {}
    held: list[tuple[Span, int]] = []  # with the dispatch that uses it last
    arenas: list[int] = []
    for index, (reads, writes) in enumerate(uses):
        if index in starts or any(written_at.get(node, -1) >= ordered for node in reads):
            ordered = index
            held = [one for one in held if one[1] >= ordered]
        for node in writes:
            written_at[node] = index
            if node in sizes:
                nbytes = storage_bytes(sizes[node])
                spans[node] = span = _first_fit(nbytes, [span for span, _ in held], len(arenas), max_bytes)
                held.append((span, last_use[node]))
                if span.place == arena_place(len(arenas)):
                    arenas.append(0)
                arenas[-1 - span.place] = max(arenas[-1 - span.place], span.end)
    return spans, tuple(arenas)


def arena_place(number: int) -> int:
    """What stands for an arena among the places of `plan_order`; constants and results are their nodes."""
    return -1 - number


def _first_fit(nbytes: int, held: Collection[Span], arenas: int, max_bytes: int) -> Span:
    for number in range(arenas):
        start = 0
        for span in sorted(span for span in held if span.place == arena_place(number)):
            if span.start - start >= nbytes:
                break
            start = max(start, -(-span.end // _ALIGNMENT) * _ALIGNMENT)
        if start + nbytes <= max_bytes:
            return Span(arena_place(number), start, start + nbytes)
    return Span(arena_place(arenas), 0, nbytes)


class ArenaPool:
    """Memory for the activations and results of plans that never run at the same time, so that it can be the same.

    It only knows it: a storage lives as long as a plan holds it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: list[weakref.ref[Storage]] = []

    def take(self, sizes: Sequence[int], kind: StorageKind) -> list[Storage]:
        """A storage for each size in bytes, no two of them the same; one with a staging buffer has just that size.

        Raises:
            VkDecodeError: memory runs out, or a limit of the device is exceeded.

        """
        taken: list[Storage] = []
        made: list[Storage] = []
        try:
            for size in sizes:
                storage = next((one for one in self.held if one not in taken and _serves(one, size, kind)), None)
                if storage is None:
                    storage = self._device.allocate(size, DType.F32, kind)
                    made.append(storage)
                    self._known.append(weakref.ref(storage))
                taken.append(storage)
        except BaseException:
            # Now, not when the error is forgotten: whoever handles it may want the memory.
            for storage in made:
                storage.close()
            raise
        return taken

    @property
    def held(self) -> list[Storage]:
        """The storages that plans hold now."""
        found = [storage for known in self._known if (storage := known()) is not None and not storage.closed]
        self._known = [weakref.ref(storage) for storage in found]
        return found


def _serves(storage: Storage, size: int, kind: StorageKind) -> bool:
    fits = storage.nbytes >= size if kind is StorageKind.DEVICE else storage.nbytes == storage_bytes(size)
    return storage.kind is kind and fits
