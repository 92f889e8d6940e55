"""How tests look at what a fusion left."""

from __future__ import annotations

from small_graphs import SmallGraph

from vkdecode.graph import Node, NodeId, WeightSpec
from vkdecode.graph.fusion import Fusion


def nodes_of(graph: SmallGraph) -> list[Node]:
    return [graph.node(NodeId(at)) for at in range(len(graph))]


def unchanged_by(fuse: Fusion, graph: SmallGraph, *roots: NodeId) -> bool:
    """Whether a pass leaves nodes, roots and generation as they are."""
    before, generation = nodes_of(graph), graph.generation
    assert fuse(graph, roots) == roots
    return nodes_of(graph)[: len(before)] == before and graph.generation == generation


def spec_of(graph: SmallGraph, node: NodeId) -> WeightSpec:
    return graph.attrs(node, WeightSpec)
