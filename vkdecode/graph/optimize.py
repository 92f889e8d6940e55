"""The optimizer: fusions, splitting, layout and placement, in this order, baked into the graph in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from vkdecode.graph.fusion import FUSIONS, Fusion, fuse_rope_write
from vkdecode.graph.graph import Graph, OptimizedGraph
from vkdecode.graph.layout import contiguize
from vkdecode.graph.nodes import NodeId
from vkdecode.graph.placement import place
from vkdecode.graph.split import MaxUnits, split_weights


def optimize_graph(
    graph: Graph,
    roots: tuple[NodeId, ...],
    target: Hashable,
    homes: Mapping[NodeId, Hashable] | None = None,
    fusions: Sequence[Fusion] = FUSIONS,
    max_units: MaxUnits | None = None,
) -> OptimizedGraph:
    """Optimize what the roots need for a target place.

    Args:
        graph: changed in place; its generation rises.
        roots: the value wanted first, effects after it.
        target: where the work runs; opaque here.
        homes: constants that live elsewhere.
        fusions: the passes to run; an empty sequence runs every operation on its own.
        max_units: how much of a weight one storage buffer may hold; None for all of it.

    """
    for fuse in fusions:
        if fuse is not fuse_rope_write:
            roots = fuse(graph, roots)
    if max_units is not None:
        roots = split_weights(graph, roots, max_units)
    if fuse_rope_write in fusions:
        roots = fuse_rope_write(graph, roots)  # of products that were left whole
    roots = contiguize(graph, roots)
    roots = place(graph, roots, target, homes or {})
    return OptimizedGraph(roots, graph.generation)
