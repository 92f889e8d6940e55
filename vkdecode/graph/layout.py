"""Layout: kernels that take whole rows only get a contiguous copy of a view."""

from __future__ import annotations

from vkdecode.graph.graph import Graph
from vkdecode.graph.nodes import NodeId, Op

# How many leading inputs of an operation may be views; its kernel has an offset and a stride for each of them.
_VIEWS_ALLOWED = {
    Op.ATTENTION: 1,
    Op.KV_WRITE: 2,
    Op.ROPE: 1,
    Op.CONTIGUIZE: 1,
    Op.RMS_NORM: 1,
    Op.LAYER_NORM: 1,
}


def contiguize(graph: Graph, roots: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Insert CONTIGUIZE between a view and each user whose kernel reads whole rows, once per view."""
    made: dict[NodeId, NodeId] = {}

    def whole(node_id: NodeId) -> NodeId:
        node = graph.node(node_id)
        if node.op is not Op.VIEW:
            return node_id
        if node_id not in made:
            made[node_id] = graph.add_node(Op.CONTIGUIZE, [node_id], node.shape)
        return made[node_id]

    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        allowed = _VIEWS_ALLOWED.get(node.op, 0)
        inputs = [one if at < allowed else whole(one) for at, one in enumerate(node.inputs)]
        if tuple(inputs) != node.inputs and node.op is not Op.VIEW:
            graph.rewrite(node_id, node.op, inputs, node.attrs)
    return tuple(whole(root) for root in roots)
