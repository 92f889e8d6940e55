"""The optimizer: fusions, layout and placement, in this order, baked into the graph in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from vkdecode.graph.fusion import FUSIONS, Fusion
from vkdecode.graph.graph import Graph, OptimizedGraph
from vkdecode.graph.layout import contiguize
from vkdecode.graph.nodes import NodeId
from vkdecode.graph.placement import place


def optimize_graph(
    graph: Graph,
    roots: tuple[NodeId, ...],
    target: Hashable,
    homes: Mapping[NodeId, Hashable] | None = None,
    fusions: Sequence[Fusion] = FUSIONS,
) -> OptimizedGraph:
    """Optimize what the roots need for a target place.

    Args:
        graph: changed in place; its generation rises.
        roots: the value wanted first, effects after it.
        target: where the work runs; opaque here.
        homes: constants that live elsewhere.
        fusions: the passes to run; an empty sequence runs every operation on its own.

    """
    for fuse in fusions:
        roots = fuse(graph, roots)
    roots = contiguize(graph, roots)
    roots = place(graph, roots, target, homes or {})
    return OptimizedGraph(roots, graph.generation)
