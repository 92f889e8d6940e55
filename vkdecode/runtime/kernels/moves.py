"""Kernels that only carry values: embeddings, joined and copied columns, the last row."""

from __future__ import annotations

from vkdecode.gpu import Lanes, registry
from vkdecode.graph import Graph, Node, WeightSpec
from vkdecode.runtime.kernels.choice import WORKGROUP, Choice, over_columns, view_of
from vkdecode.weights.block_layout import PACK


def embed(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """Rows of the embedding."""
    token_ids, weight, *others = node.inputs
    spec = graph.attrs(weight, WeightSpec)
    chunks = -(-spec.columns // PACK)
    constants = {"WORKGROUP": WORKGROUP, "TILE": lanes.tile, "COLUMNS": spec.columns}
    if spec.unit_count:
        constants |= {"FIRST_ROW": spec.first_unit, "ROW_COUNT": spec.unit_count, "HAS_OTHERS": len(others)}
        others = others or [weight]  # a binding that the kernel does not read
    kernel = registry().get("embed", DTYPE=spec.dtype.value, PART=int(bool(spec.unit_count)))
    return Choice(kernel, (weight, token_ids, node.id, *others), constants, (-(-chunks // WORKGROUP), node.shape[0], 1))


def concat(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """Columns of two values side by side."""
    a, b = (graph.node(one).shape[1] for one in node.inputs)
    constants = {"WORKGROUP": WORKGROUP, "A_COLUMNS": a, "B_COLUMNS": b}
    return Choice(registry().get("concat"), (*node.inputs, node.id), constants, over_columns(node))


def contiguize(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """A view's columns, copied together."""
    offset, stride = view_of(graph, node.inputs[0])
    constants = {"WORKGROUP": WORKGROUP, "COLUMNS": node.shape[1], "X_OFFSET": offset, "X_STRIDE": stride}
    return Choice(registry().get("contiguize"), (*node.inputs, node.id), constants, over_columns(node))


def last_row(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """The row of the last real token."""
    constants = {"WORKGROUP": WORKGROUP, "COLUMNS": node.shape[1]}
    return Choice(registry().get("last_row"), (*node.inputs, node.id), constants, over_columns(node))
