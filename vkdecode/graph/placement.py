"""Placement: a stamp on every node, and a COPY where a value lives somewhere else than its user."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from vkdecode.graph.graph import Graph
from vkdecode.graph.nodes import CONSTANTS, CopyAttrs, NodeId, Op

HOST: Hashable = "host"


def splice_host_copy(graph: Graph, root: NodeId) -> NodeId:
    """Put the device-to-host COPY behind a root and return it; the copied node stays the one to capture."""
    node = graph.node(root)
    return graph.add_node(Op.COPY, [root], node.shape, CopyAttrs("host"), node.dtype)


def place(
    graph: Graph, roots: tuple[NodeId, ...], target: Hashable, homes: Mapping[NodeId, Hashable]
) -> tuple[NodeId, ...]:
    """Stamp every reachable node with its place, and insert a COPY before each use of a constant that lives elsewhere.

    `homes` names the constants that do not live on `target`. A COPY to the host is stamped as living there.
    """
    copies: dict[NodeId, NodeId] = {}
    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        if node.op in CONSTANTS:
            graph.placement[node_id] = homes.get(node_id, target)
            continue
        to_host = node.op is Op.COPY and graph.attrs(node_id, CopyAttrs).to == "host"
        graph.placement[node_id] = HOST if to_host else target
        if node.op is Op.COPY:
            continue
        inputs = [_resident(graph, one, target, copies) for one in node.inputs]
        if tuple(inputs) != node.inputs:
            graph.rewrite(node_id, node.op, inputs, node.attrs)
    return roots


def _resident(graph: Graph, node_id: NodeId, target: Hashable, copies: dict[NodeId, NodeId]) -> NodeId:
    if graph.placement[node_id] == target:
        return node_id
    if node_id not in copies:
        node = graph.node(node_id)
        copies[node_id] = graph.add_node(Op.COPY, [node_id], node.shape, CopyAttrs("device"), node.dtype)
        graph.placement[copies[node_id]] = target
    return copies[node_id]
