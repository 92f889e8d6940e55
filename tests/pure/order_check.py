"""What the steps of a submission really order, derived from dispatches and spans alone: the judge of the planner.

Rules, from Vulkan: two dispatches with no barrier between them may run at once. A barrier lets all dispatches before
it end before those after it begin, and makes what was written to the memory that it names visible to them. So a write
after a read needs any barrier between the two, whatever it names; a read or a write after a write needs one that names
the memory. Submissions are ordered by the wait between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vkdecode.graph import Graph, NodeId, Op
from vkdecode.runtime import Dispatch, OrderStep, Plan


class Bytes(NamedTuple):
    """Bytes `start` to `end` of a memory, which a barrier names by `place`."""

    place: int
    start: int
    end: int


class Access(NamedTuple):
    reads: tuple[Bytes, ...]
    writes: tuple[Bytes, ...]


class Dependence(NamedTuple):
    """The second dispatch must wait for the first; `place` is what a barrier has to name, for WAR it may be any."""

    kind: str
    place: int
    first: int
    second: int


Order = Sequence[Sequence[OrderStep]]


def accesses_of(graph: Graph, plan: Plan) -> list[Access]:
    """What each dispatch of a plan reads and writes, by what its kernel declares of each binding."""
    return [Access(_bytes(graph, plan, run, "read"), _bytes(graph, plan, run, "write")) for run in plan.dispatches]


def dependences(accesses: Sequence[Access], groups: Iterable[Sequence[int]]) -> set[Dependence]:
    """Every dependence between two dispatches of one group, which are in the order of their submission."""
    found: set[Dependence] = set()
    for group in groups:
        for at, second in enumerate(group):
            for first in group[:at]:
                earlier, later = accesses[first], accesses[second]
                for kind, some, others in (
                    ("RAW", earlier.writes, later.reads),
                    ("WAR", earlier.reads, later.writes),
                    ("WAW", earlier.writes, later.writes),
                ):
                    found |= {Dependence(kind, one.place, first, second) for one in some if _meets(one, others)}
    return found


def faults(order: Order, accesses: Sequence[Access], expected: Sequence[Sequence[int]]) -> list[str]:
    """What the steps leave unordered or forget, one line each; [] where they are right.

    Args:
        order: the steps of each submission.
        accesses: of each dispatch.
        expected: the dispatches that each submission must run, in order.

    """
    runs = [runs_of(steps) for steps in order]
    if runs != [list(group) for group in expected]:
        return [f"runs {runs}, not {[list(group) for group in expected]}"]
    found = []
    for steps in order:
        where = {step.dispatch: at for at, step in enumerate(steps) if step.kind == "run"}
        for kind, place, first, second in sorted(dependences(accesses, [runs_of(steps)]), key=str):
            between = [step for step in steps[where[first] : where[second]] if step.kind == "barrier"]
            if not any(kind == "WAR" or place in step.places for step in between):
                found.append(f"{kind}: dispatches {first} and {second} on {place}")
    return found


def missing(graph: Graph, plan: Plan, kept: Iterable[int], wanted: Iterable[NodeId]) -> list[str]:
    """What dispatches, one after another, read that no longer holds what they expect, or not yet; [] where all does.

    A dispatch reads and writes at once, so that no two of its activations may share a byte.
    Weights, caches and data hold their values from the start. Results that are `wanted` must be there at the end.
    """
    held: dict[NodeId, Bytes] = {}
    found = []
    for index in kept:
        run = plan.dispatches[index]
        pairs = [
            (node, binding.access)
            for node, binding in zip(run.bindings, run.kernel.bindings, strict=True)
            if node not in plan.constants
        ]
        for node, access in pairs:
            if "read" in access and node not in held:
                found.append(f"dispatch {index} reads node {node} ({graph.node(node).op.value}), which is not there")
        for node, access in pairs:
            if "write" in access:
                written = region(graph, plan, node)
                if _meets(written, [region(graph, plan, one) for one, _ in pairs if one != node]):
                    found.append(f"dispatch {index} writes node {node} where another one is that it uses")
                held = {one: where for one, where in held.items() if not _meets(where, [written])} | {node: written}
    return found + [f"result {node} is not there" for node in wanted if node not in held]


def runs_of(steps: Iterable[OrderStep]) -> list[int]:
    return [step.dispatch for step in steps if step.kind == "run"]


def segments_of(order: Order, kept: Iterable[int] | None = None) -> list[list[int]]:
    """The dispatches of each submission, or those of them that are kept."""
    left = None if kept is None else set(kept)
    return [[one for one in runs_of(steps) if left is None or one in left] for steps in order]


def without_each_barrier(order: Order) -> Iterator[tuple[tuple[OrderStep, ...], ...]]:
    """The steps once for each barrier, with that one left out."""
    for number, steps in enumerate(order):
        for at, step in enumerate(steps):
            if step.kind == "barrier":
                yield tuple(
                    tuple(other for place, other in enumerate(inner) if (which, place) != (number, at))
                    for which, inner in enumerate(order)
                )


def barriers(order: Order) -> int:
    return sum(step.kind == "barrier" for steps in order for step in steps)


def region(graph: Graph, plan: Plan, node: NodeId) -> Bytes:
    """Where a node's value lies: in an arena, or in a memory of its own."""
    if node in plan.spans:
        span = plan.spans[node]
        return Bytes(span.place, span.start, span.end)
    assert node in plan.results or node in plan.constants
    held = graph.node(node)
    return Bytes(int(node), 0, math.prod(held.shape) * held.dtype.itemsize if held.op is not Op.WEIGHT else 1)


def _bytes(graph: Graph, plan: Plan, run: Dispatch, what: str) -> tuple[Bytes, ...]:
    pairs = zip(run.bindings, run.kernel.bindings, strict=True)
    return tuple(dict.fromkeys(region(graph, plan, node) for node, binding in pairs if what in binding.access))


def _meets(one: Bytes, others: Iterable[Bytes]) -> bool:
    return any(one.place == other.place and max(one.start, other.start) < min(one.end, other.end) for other in others)
