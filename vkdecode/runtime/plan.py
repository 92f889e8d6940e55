"""A plan: the dispatches that realize an optimized graph, what they bind, and how they are cut into submissions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from vkdecode.errors import TopologyChanged
from vkdecode.gpu import Kernel, Lanes
from vkdecode.graph import CopyAttrs, Graph, NodeId, Op, OptimizedGraph, SymId
from vkdecode.runtime.kernel_choice import choose_kernel
from vkdecode.runtime.order import Hazard, OrderStep, plan_order

# Drivers kill a submission that runs for seconds. This many multiply-adds take a slow integrated GPU a fraction of one.
WORK_PER_SUBMISSION = 1 << 36

_FREE_OPS = frozenset({Op.WEIGHT, Op.DATA, Op.KV, Op.VIEW, Op.COPY})


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch. Bindings and push constants are still nodes and symbols."""

    node: NodeId
    kernel: Kernel
    bindings: tuple[NodeId, ...]
    spec: Mapping[str, int]
    push: Mapping[str, int | SymId]
    workgroups: tuple[int, int, int]
    work: int

    @property
    def reads(self) -> tuple[NodeId, ...]:
        """Buffers that the kernel declares to read."""
        return self._with_access("read")

    @property
    def writes(self) -> tuple[NodeId, ...]:
        """Buffers that the kernel declares to write."""
        return self._with_access("write")

    @property
    def symbols(self) -> tuple[SymId, ...]:
        """Symbols that must be bound before this can be recorded."""
        return tuple(value for value in self.push.values() if isinstance(value, SymId))

    def _with_access(self, what: str) -> tuple[NodeId, ...]:
        pairs = zip(self.bindings, self.kernel.bindings, strict=True)
        return tuple(dict.fromkeys(node for node, binding in pairs if what in binding.access))


@dataclass(frozen=True)
class Plan:
    """What an executable is made from.

    Attributes:
        dispatches: in a valid order.
        segments: how many of them each submission holds, in order.
        order: the steps of each segment: uploads, dispatches (by index) and the operations that order them.
        hazards: every dependence inside a segment and the step that orders it.
        slots: for each activation the slot that holds it; once its last reader is ordered before it, a later segment
            reuses a slot.
        slot_bytes: bytes of each slot.
        targets: nodes whose values are copied to the host at the end.

    """

    dispatches: tuple[Dispatch, ...]
    segments: tuple[int, ...]
    order: tuple[tuple[OrderStep, ...], ...]
    hazards: tuple[Hazard, ...]
    slots: Mapping[NodeId, int]
    slot_bytes: tuple[int, ...]
    constants: tuple[NodeId, ...]
    targets: tuple[NodeId, ...]


def steps_for(plan: Plan, include: Callable[[Dispatch], bool]) -> tuple[tuple[OrderStep, ...], ...]:
    """The steps of each segment for a recording of only some dispatches: what only the others write is not synced.

    Leaving one out is right only where nothing that stays depends on it.
    """
    kept = [include(dispatch) for dispatch in plan.dispatches]
    unwritten = {
        one for dispatch, stays in zip(plan.dispatches, kept, strict=True) if not stays for one in dispatch.writes
    }
    order = []
    for steps in plan.order:
        made: list[OrderStep] = []
        for step in steps:
            buffers = tuple(one for one in step.buffers if step.kind != "sync" or one not in unwritten)
            if kept[step.dispatch] if step.kind == "run" else buffers:
                made.append(replace(step, buffers=buffers))
        order.append(tuple(made))
    return tuple(order)


def check_topology(graph: Graph, optimized: OptimizedGraph) -> None:
    """Raise `TopologyChanged` where the graph is no longer the one that was optimized."""
    if graph.generation != optimized.generation:
        raise TopologyChanged(
            f"the graph is at generation {graph.generation}, its optimization at {optimized.generation}; "
            "drop the session"
        )


def buffer_of(graph: Graph, node_id: NodeId) -> NodeId:
    """The node whose storage holds this node's value: views and copies share, a KV write's value is its cache."""
    while True:
        node = graph.node(node_id)
        if node.op in (Op.VIEW, Op.COPY):
            node_id = node.inputs[0]
        elif node.op is Op.KV_WRITE:
            node_id = node.inputs[1]
        else:
            return node_id


def lower(
    graph: Graph,
    optimized: OptimizedGraph,
    lanes: Lanes,
    cut_after: Collection[Op] = (),
    work_per_segment: int = WORK_PER_SUBMISSION,
) -> Plan:
    """Turn an optimized graph into a plan.

    Args:
        graph: the graph that was optimized.
        optimized: its roots; the first one's value, and any other root copied to the host, can be read afterwards.
        lanes: the device's kernel shape.
        cut_after: operations whose dispatch ends a submission.
        work_per_segment: most multiply-adds of one submission, unless a single dispatch takes more.

    Raises:
        TopologyChanged: the graph was changed after it was optimized.

    """
    check_topology(graph, optimized)
    reachable = graph.reachable(optimized.roots)
    dispatches = []
    for node_id in reachable:
        if graph.node(node_id).op not in _FREE_OPS:
            choice = choose_kernel(graph, node_id, lanes)
            bindings = tuple(buffer_of(graph, one) for one in choice.bindings)
            dispatches.append(
                Dispatch(node_id, choice.kernel, bindings, choice.spec, choice.push, choice.workgroups, choice.work)
            )
    copied = [one for one in reachable if graph.node(one).op is Op.COPY]
    targets = tuple(buffer_of(graph, one) for one in copied if graph.attrs(one, CopyAttrs).to == "host")
    targets = targets or (buffer_of(graph, optimized.roots[0]),)
    data = {buffer_of(graph, one) for one in reachable if graph.node(one).op is Op.DATA}
    data |= {buffer_of(graph, one) for one in copied if graph.attrs(one, CopyAttrs).to == "device"}
    cuts = [graph.node(one.node).op in cut_after for one in dispatches]
    segments = _segments([one.work for one in dispatches], cuts, work_per_segment)
    slots, slot_bytes = _assign_slots(graph, dispatches, segments, targets)
    order, hazards = plan_order(
        [(one.reads, one.writes) for one in dispatches],
        segments,
        syncable=set(slots),
        places={node: NodeId(-1 - slot) for node, slot in slots.items()},
        uploads=sorted(data),
        targets=targets,
    )
    constants = tuple(sorted({one for dispatch in dispatches for one in dispatch.bindings} - set(slots)))
    return Plan(tuple(dispatches), segments, order, hazards, slots, slot_bytes, constants, targets)


def _segments(works: Sequence[int], cuts: Sequence[bool], most_work: int) -> tuple[int, ...]:
    segments: list[int] = []
    held, ended = 0, True
    for work, cut in zip(works, cuts, strict=True):
        if ended or held + work > most_work:
            segments.append(0)
            held = 0
        segments[-1] += 1
        held += work
        ended = cut
    return tuple(segments)


def _assign_slots(
    graph: Graph, dispatches: Sequence[Dispatch], segments: tuple[int, ...], targets: tuple[NodeId, ...]
) -> tuple[dict[NodeId, int], tuple[int, ...]]:
    """Give every activation a slot. No slot is written twice in a segment; later segments reuse freed ones.

    Within the segment that reads a slot's last value it is free for a dispatch that waits for what was written at that
    reading or after: so the layers of a prompt hold their values in the same slots, and bind the same buffers.
    """
    first_of = [start for start, count in zip(accumulate((0, *segments)), segments, strict=False) for _ in range(count)]
    writer: dict[NodeId, int] = {}
    last: dict[NodeId, int] = {}
    for index, dispatch in enumerate(dispatches):
        for buffer in dispatch.bindings:
            last[buffer] = index
        for buffer in dispatch.writes:
            if graph.node(buffer).op is not Op.KV:
                writer[buffer] = index
    for buffer in targets:
        last[buffer] = len(dispatches)
    slots: dict[NodeId, int] = {}
    slot_bytes: list[int] = []
    held: list[NodeId] = []
    for buffer, index in writer.items():
        tokens, features = graph.node(buffer).shape
        nbytes = tokens * features * 4
        first = first_of[index]
        # What ran up to this one is ordered before the dispatch: by the wait between segments, or that for an input.
        waited = [writer[one] for one in dispatches[index].reads if writer.get(one, -1) >= first]
        ordered = max(waited, default=first - 1)
        fits = [
            slot
            for slot, size in enumerate(slot_bytes)
            if size == nbytes and last[held[slot]] <= ordered and writer[held[slot]] < first
        ]
        # Rather where a like dispatch wrote: values of equal size then keep to their places from layer to layer.
        like = [slot for slot in fits if _are_alike(dispatches[writer[held[slot]]], dispatches[index])]
        slot = next(iter(like or fits), len(slot_bytes))
        if slot == len(slot_bytes):
            slot_bytes.append(nbytes)
            held.append(buffer)
        slots[buffer], held[slot] = slot, buffer
    return slots, tuple(slot_bytes)


def _are_alike(one: Dispatch, other: Dispatch) -> bool:
    return (one.kernel.key, one.spec) == (other.kernel.key, other.spec)
