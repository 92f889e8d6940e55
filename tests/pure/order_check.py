"""What a submission's steps really order, derived from the accesses alone: the judge of the planner in tests.

Rules, from what Kompute records: two dispatches in a row are not ordered at all. A sync of buffers copies them to the
host; it runs after all dispatches before it and before all after it, and makes earlier writes of just these buffers
visible to what comes after. An upload makes what it copies visible to what comes after. Submissions are ordered by the
wait between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vkdecode.graph import NodeId
from vkdecode.runtime import OrderStep, Plan

Access = tuple[Iterable[int], Iterable[int]]
Dependence = tuple[str, int, int, int]


def dependences(accesses: Sequence[Access], segments: Sequence[int]) -> set[Dependence]:
    """Every (kind, buffer, first, second) of two dispatches in one segment."""
    found: set[Dependence] = set()
    start = 0
    for count in segments:
        for second in range(start, start + count):
            reads, writes = (set(one) for one in accesses[second])
            for first in range(start, second):
                earlier_reads, earlier_writes = (set(one) for one in accesses[first])
                found |= {("RAW", buffer, first, second) for buffer in earlier_writes & reads}
                found |= {("WAR", buffer, first, second) for buffer in earlier_reads & writes}
                found |= {("WAW", buffer, first, second) for buffer in earlier_writes & writes}
        start += count
    return found


def faults(
    order: Sequence[Sequence[OrderStep]],
    accesses: Sequence[Access],
    segments: Sequence[int],
    uploads: Iterable[int] = (),
    targets: Iterable[int] = (),
) -> list[str]:
    """What the steps leave unordered or forget, one line each; [] where the plan is right."""
    found = [
        f"segment {number}: runs {runs_of(steps)}, not {list(wanted)}"
        for number, (steps, wanted) in enumerate(zip(order, _ranges(segments), strict=True))
        if runs_of(steps) != list(wanted)
    ]
    if found:
        return found
    written: set[int] = set()
    arrived: set[int] = set()
    on_host: set[int] = set()
    for number, steps in enumerate(order):
        found += [f"segment {number}: {text}" for text in _segment_faults(steps, accesses)]
        for step in steps:
            if step.kind == "run":
                reads, writes = (set(one) for one in accesses[step.dispatch])
                found += [
                    f"dispatch {step.dispatch} reads {one} before its upload" for one in reads & set(uploads) - arrived
                ]
                written |= writes
                on_host -= writes
            elif step.kind == "upload":
                arrived |= set(step.buffers)
            else:
                on_host |= written & set(step.buffers)
    found += [f"upload of {one} is missing" for one in set(uploads) - arrived]
    found += [f"target {one} never reaches the host" for one in set(targets) - on_host]
    return found


def places(plan: Plan, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Buffers, activations by the memory that holds them."""
    return tuple(NodeId(-1 - plan.slots[one]) if one in plan.slots else one for one in nodes)


def runs_of(steps: Iterable[OrderStep]) -> list[int]:
    return [step.dispatch for step in steps if step.kind == "run"]


def without_each_sync(
    order: Sequence[Sequence[OrderStep]],
) -> Iterator[tuple[tuple[OrderStep, ...], ...]]:
    """The plan once for each sync buffer, with that one left out."""
    for number, steps in enumerate(order):
        for at, step in enumerate(steps):
            if step.kind == "sync":
                yield tuple(
                    tuple(other for place, other in enumerate(inner) if (which, place) != (number, at))
                    for which, inner in enumerate(order)
                )


def _ranges(segments: Sequence[int]) -> list[range]:
    starts = [sum(segments[:number]) for number in range(len(segments))]
    return [range(start, start + count) for start, count in zip(starts, segments, strict=True)]


def _segment_faults(steps: Sequence[OrderStep], accesses: Sequence[Access]) -> Iterator[str]:
    syncs: list[tuple[int, set[int]]] = [
        (at, set(step.buffers)) for at, step in enumerate(steps) if step.kind == "sync"
    ]
    runs: list[tuple[int, set[int], set[int]]] = []
    for at, step in enumerate(steps):
        if step.kind == "run":
            run_reads, run_writes = accesses[step.dispatch]
            runs.append((at, set(run_reads), set(run_writes)))
    for second, reads, writes in runs:
        for first, earlier_reads, earlier_writes in runs:
            if first >= second:
                continue
            between = [buffers for at, buffers in syncs if first < at < second]
            yield from (
                f"step {second} may read {one} before step {first} wrote it"
                for one in earlier_writes & reads
                if not any(one in buffers for buffers in between)
            )
            yield from (
                f"step {second} may overwrite {one} before step {first} read it"
                for one in earlier_reads & writes
                if not between
            )
            yield from (f"steps {first} and {second} both write {one}" for one in earlier_writes & writes)
    for at, buffers in syncs:
        for earlier, others in syncs:
            if earlier < at:
                yield from (f"steps {earlier} and {at} both copy {one} to the host" for one in buffers & others)
        # The copy reads the buffer, and nothing makes a later write wait for it but another sync.
        for second, _, writes in runs:
            if at < second and not any(at < other < second for other, _ in syncs):
                yield from (f"step {second} may overwrite {one} while step {at} copies it" for one in buffers & writes)
    for at, step in enumerate(steps):
        if step.kind == "upload" and at > 0:
            yield f"step {at} uploads after work has begun"
