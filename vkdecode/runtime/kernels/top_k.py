"""The highest values of a row."""

from __future__ import annotations

from vkdecode.gpu import Lanes, registry
from vkdecode.graph import Graph, GroupMaxAttrs, Node, TopKAttrs
from vkdecode.runtime.kernels.choice import Choice


def group_max(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """The highest value of each group of a row."""
    attrs, columns = graph.attrs(node.id, GroupMaxAttrs), graph.node(node.inputs[0]).shape[1]
    constants = {"WORKGROUP": attrs.width, "COLUMNS": columns, "LENGTH": attrs.length}
    blocks = node.shape[1] // (2 * attrs.width)
    return Choice(registry().get("group_max"), (*node.inputs, node.id), constants, (blocks, 1, 1))


def top_k(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """The highest values of a row."""
    x, groups = node.inputs
    k, cut = graph.attrs(node.id, TopKAttrs).k, graph.attrs(groups, GroupMaxAttrs)
    workgroup = lanes.tile if lanes.form == "subgroup" else lanes.workgroup
    constants = {
        "WORKGROUP": workgroup,
        "COLUMNS": graph.node(x).shape[1],
        "GROUPS": graph.node(groups).shape[1] // 2,
        "K": k,
        "LISTED": max(4 * k, workgroup),
        "BLOCK": cut.width,
        "LENGTH": cut.length,
    }
    return Choice(registry().get("top_k", LANES=lanes.form), (x, groups, node.id), constants, (1, 1, 1))
