"""Order inside a submission: what makes one dispatch wait for another, planned from what each reads and writes.

Kompute records no barrier between dispatches. A sync of a buffer orders everything before it against everything after
it, and makes that buffer's writes visible; see `gpu.recorder`. This module knows buffers as plain numbers and no
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from vkdecode.errors import InvalidInputError
from vkdecode.graph import NodeId

Access = tuple[Sequence[NodeId], Sequence[NodeId]]


@dataclass(frozen=True)
class OrderStep:
    """`upload` or `sync` of buffers, or `run` of the dispatch with this index."""

    kind: str
    buffers: tuple[NodeId, ...] = ()
    dispatch: int = -1


@dataclass(frozen=True)
class Hazard:
    """A dependence between two dispatches of one segment, and the step (index in its segment) that orders it.

    `kind` is `RAW` or `WAR`; a second write of a buffer in one segment is refused.
    """

    kind: str
    buffer: NodeId
    first: int
    second: int
    ordered_by: int


def plan_order(
    accesses: Sequence[Access],
    segments: Sequence[int],
    syncable: AbstractSet[NodeId],
    uploads: Sequence[NodeId],
    targets: Sequence[NodeId],
    places: Mapping[NodeId, NodeId] = MappingProxyType({}),
) -> tuple[tuple[tuple[OrderStep, ...], ...], tuple[Hazard, ...]]:
    """Place the ordering operations.

    Args:
        accesses: for each dispatch the buffers it reads and those it writes.
        segments: how many dispatches each submission holds; submissions are ordered by the wait between them.
        syncable: buffers that can be synced (they have a host-visible twin).
        uploads: buffers copied from the host at the start.
        targets: buffers copied to the host at the end.
        places: for buffers that others lie in the place of, one after the other, what names the place.

    Returns:
        The steps of each segment, and every hazard with the step that orders it.

    Raises:
        InvalidInputError: a dependence cannot be ordered, because a buffer is written twice in a segment or cannot be
        synced.

    """
    order: list[tuple[OrderStep, ...]] = []
    hazards: list[Hazard] = []
    first = 0
    for number, count in enumerate(segments):
        is_last = number == len(segments) - 1
        segment = _Segment(syncable, tuple(uploads) if number == 0 else (), places)
        for index in range(first, first + count):
            segment.add(index, *accesses[index])
        segment.finish(tuple(targets) if is_last else ())
        order.append(tuple(segment.steps))
        hazards += segment.hazards
        first += count
    return tuple(order), tuple(hazards)


class _Segment:
    """The steps of one submission while they are laid out."""

    def __init__(
        self, syncable: AbstractSet[NodeId], uploads: tuple[NodeId, ...], places: Mapping[NodeId, NodeId]
    ) -> None:
        self.steps: list[OrderStep] = [OrderStep("upload", uploads)] if uploads else []
        self.hazards: list[Hazard] = []
        self._syncable = syncable
        self._places = places
        self._writer: dict[NodeId, int] = {}
        self._written: dict[NodeId, int] = {}  # places
        self._readers: dict[NodeId, list[int]] = {}
        self._synced: dict[NodeId, int] = {}
        self._last_sync = -1
        self._last_run_at: dict[int, int] = {}

    def add(self, index: int, reads: Sequence[NodeId], writes: Sequence[NodeId]) -> None:
        for place in map(self._place, writes):
            if place in self._written:
                raise InvalidInputError(
                    f"buffer {place} is written by dispatches {self._written[place]} and {index} of one segment"
                )
        for buffer in reads:
            if buffer not in self._writer and self._place(buffer) in self._written:
                raise InvalidInputError(
                    f"dispatch {index} reads buffer {buffer}, which another one has taken the place of"
                )
        waits = [buffer for buffer in reads if buffer in self._writer and buffer not in self._synced]
        for buffer in waits:
            if buffer not in self._syncable:
                raise InvalidInputError(
                    f"dispatch {index} reads buffer {buffer}, whose write cannot be synced in one segment"
                )
        earlier = [(buffer, one) for buffer in writes for one in self._readers.get(self._place(buffer), ())]
        if waits:
            self._sync(tuple(waits))
        elif any(self._last_sync < self._last_run_at[one] for _, one in earlier):
            pending = [one for one in self._writer if one in self._syncable and one not in self._synced]
            if not pending:
                raise InvalidInputError(
                    f"dispatch {index} overwrites what earlier ones read, and nothing can order them"
                )
            self._sync((pending[-1],))
        for buffer in reads:
            if buffer in self._writer:
                self.hazards.append(Hazard("RAW", buffer, self._writer[buffer], index, self._synced[buffer]))
        self.hazards += [Hazard("WAR", buffer, one, index, self._last_sync) for buffer, one in earlier]
        self.steps.append(OrderStep("run", dispatch=index))
        self._last_run_at[index] = len(self.steps) - 1
        for buffer in reads:
            self._readers.setdefault(self._place(buffer), []).append(index)
        self._writer.update(dict.fromkeys(writes, index))
        self._written.update(dict.fromkeys(map(self._place, writes), index))

    def finish(self, targets: tuple[NodeId, ...]) -> None:
        pending = tuple(one for one in targets if one not in self._synced)
        if pending:
            self._sync(pending)

    def _place(self, buffer: NodeId) -> NodeId:
        return self._places.get(buffer, buffer)

    def _sync(self, buffers: tuple[NodeId, ...]) -> None:
        self.steps.append(OrderStep("sync", buffers))
        self._last_sync = len(self.steps) - 1
        self._synced.update(dict.fromkeys(buffers, self._last_sync))
