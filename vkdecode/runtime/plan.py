"""A plan: the dispatches that realize an optimized graph, what they bind, and how they are cut into submissions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vkdecode.errors import TopologyChanged
from vkdecode.gpu import Kernel, Lanes
from vkdecode.graph import CopyAttrs, Graph, NodeId, Op, OptimizedGraph, SymId
from vkdecode.runtime.arena import place_activations
from vkdecode.runtime.kernels import choose_kernel
from vkdecode.runtime.order import OrderStep, Span, plan_order

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
        order: the steps of each submission: dispatches (by index) and the barriers between them.
        spans: where each activation lies in the arenas.
        arena_bytes: bytes of each arena.
        results: the nodes whose values can be copied to the host, with their bytes; each has a storage of its own.
        constants: the weights, KV caches and data that are bound.
        data: those of them that are bound anew for each step.

    """

    dispatches: tuple[Dispatch, ...]
    order: tuple[tuple[OrderStep, ...], ...]
    spans: Mapping[NodeId, Span]
    arena_bytes: tuple[int, ...]
    results: Mapping[NodeId, int]
    constants: tuple[NodeId, ...]
    data: tuple[NodeId, ...]


def steps_for(plan: Plan, include: Callable[[Dispatch], bool]) -> tuple[tuple[OrderStep, ...], ...]:
    """The steps of each submission for a recording of only some dispatches; barriers that then meet become one.

    Leaving one out is right only where nothing that stays depends on it.
    """
    order = []
    for steps in plan.order:
        made: list[OrderStep] = []
        places: set[int] = set()
        for step in steps:
            if step.kind == "barrier":
                places.update(step.places)
            elif include(plan.dispatches[step.dispatch]):
                if places and made:
                    made.append(OrderStep("barrier", tuple(sorted(places))))
                places = set()
                made.append(step)
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
    """The node whose storage holds this node's value: views and copies share."""
    while (node := graph.node(node_id)).op in (Op.VIEW, Op.COPY):
        node_id = node.inputs[0]
    return node_id


def lower(
    graph: Graph,
    optimized: OptimizedGraph,
    lanes: Lanes,
    max_buffer_bytes: int,
    work_per_submission: int = WORK_PER_SUBMISSION,
) -> Plan:
    """Turn an optimized graph into a plan.

    Args:
        graph: the graph that was optimized.
        optimized: its roots; the first one's value, and any other root copied to the host, can be read afterwards.
        lanes: the device's kernel shape.
        max_buffer_bytes: how large a storage buffer may be.
        work_per_submission: most multiply-adds of one submission, unless a single dispatch takes more.

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
    copied = [one for one in reachable if graph.node(one).op is Op.COPY and graph.attrs(one, CopyAttrs).to == "host"]
    read_back = {buffer_of(graph, one) for one in copied or optimized.roots[:1]}
    segments = _segments([one.work for one in dispatches], work_per_submission)
    uses = [(one.reads, one.writes) for one in dispatches]
    made = {node for _, writes in uses for node in writes if graph.node(node).op is not Op.KV}
    sizes = {node: value_bytes(graph, node) for node in made}
    results = {node: sizes.pop(node) for node in sorted(read_back)}
    spans, arena_bytes = place_activations(uses, segments, sizes, max_buffer_bytes)
    constants = sorted({one for dispatch in dispatches for one in dispatch.bindings} - made)
    for node in (*results, *(one for one in constants if graph.node(one).op is Op.KV)):
        spans[node] = Span(node, 0, results.get(node) or value_bytes(graph, node))
    accesses = [tuple([spans[one] for one in part if one in spans] for part in use) for use in uses]
    data = tuple(one for one in constants if graph.node(one).op in (Op.DATA, Op.COPY))
    return Plan(
        tuple(dispatches),
        plan_order([(reads, writes) for reads, writes in accesses], segments),
        {node: span for node, span in spans.items() if node in sizes},
        arena_bytes,
        results,
        tuple(constants),
        data,
    )


def value_bytes(graph: Graph, node_id: NodeId) -> int:
    """Bytes of a node's value where nothing pads it."""
    node = graph.node(node_id)
    return math.prod(node.shape) * node.dtype.itemsize


def _segments(works: Sequence[int], max_work: int) -> list[int]:
    """How many dispatches each submission holds."""
    segments: list[int] = []
    held = 0
    for work in works:
        if not segments or held + work > max_work:
            segments.append(0)
            held = 0
        segments[-1] += 1
        held += work
    return segments
