"""Order inside a submission: a barrier wherever a dispatch depends on one that ran since the last barrier.

Vulkan orders nothing by itself: two dispatches in a row may run at once. This module knows memory as spans of bytes
and no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Bytes `start` to `end` of a place; places are numbers, and what they stand for is the caller's."""

    place: int
    start: int
    end: int

    def overlaps(self, other: Span) -> bool:
        """Whether a byte belongs to both."""
        return self.place == other.place and self.start < other.end and other.start < self.end


Access = tuple[Sequence[Span], Sequence[Span]]
"""What a dispatch reads and what it writes."""


@dataclass(frozen=True)
class OrderStep:
    """`run` of the dispatch with this index, or a `barrier` behind the writes to these places."""

    kind: str
    places: tuple[int, ...] = ()
    dispatch: int = -1


def plan_order(accesses: Sequence[Access], segments: Sequence[int]) -> tuple[tuple[OrderStep, ...], ...]:
    """Place the barriers: before each read after a write, write after a read and write after a write of a byte.

    A barrier orders all that ran before it, and names every place written since the last one, so that nothing older is
    left to look at.

    Args:
        accesses: of each dispatch.
        segments: how many dispatches each submission holds; submissions are ordered by the wait between them.

    """
    order: list[tuple[OrderStep, ...]] = []
    first = 0
    for count in segments:
        steps: list[OrderStep] = []
        read: list[Span] = []
        written: list[Span] = []
        for index in range(first, first + count):
            reads, writes = accesses[index]
            if _meet(reads, written) or _meet(writes, written) or _meet(writes, read):
                # Reads alone need no memory made visible, only an end: then any place will do.
                places = written or read
                steps.append(OrderStep("barrier", tuple(sorted({span.place for span in places}))))
                read, written = [], []
            steps.append(OrderStep("run", dispatch=index))
            read += reads
            written += writes
        order.append(tuple(steps))
        first += count
    return tuple(order)


def _meet(some: Iterable[Span], others: Sequence[Span]) -> bool:
    return any(one.overlaps(other) for one in some for other in others)
