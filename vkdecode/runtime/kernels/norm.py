"""Norms, of whole rows or of heads, and the rotation of heads."""

from __future__ import annotations

from vkdecode.gpu import Lanes, registry
from vkdecode.graph import Graph, Node, NormAttrs, Op, RopeAttrs
from vkdecode.runtime.kernels.choice import WORKGROUP, Choice, float_bits, over_columns, view_of


def norm(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """A norm, and what is fused behind it."""
    attrs = graph.attrs(node.id, NormAttrs)
    x, weight, *rest = node.inputs
    # What the kernel does not read is bound to x.
    bias = rest.pop(0) if attrs.bias else x
    cos, sin = (rest.pop(0), rest.pop(0)) if attrs.rope else (x, x)
    residual = rest.pop(0) if attrs.residual else x
    offset, stride = view_of(graph, x)
    constants = {
        "WORKGROUP": lanes.workgroup,
        "COLUMNS": node.shape[1] // attrs.groups,
        "EPSILON_BITS": float_bits(attrs.epsilon),
        "X_OFFSET": offset,
        "X_STRIDE": stride,
        "FIRST_GROUPS": attrs.first_groups,
        "HAS_RESIDUAL": int(attrs.residual),
        "HEAD_DIM": attrs.rope.head_dim if attrs.rope else 1,
        "ROTARY_DIM": attrs.rope.rotary_dim if attrs.rope else 0,
    }
    bindings = [x, weight, node.id, residual, cos, sin]
    if node.op is Op.LAYER_NORM:
        constants["HAS_NORM_BIAS"] = int(attrs.bias)
        bindings.append(bias)
    kernel = registry().get("norm", LANES=lanes.form, NORM="layer" if node.op is Op.LAYER_NORM else "rms")
    return Choice(kernel, tuple(bindings), constants, (node.shape[0], attrs.groups, 1))


def rope(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """The rotation of heads."""
    attrs = graph.attrs(node.id, RopeAttrs)
    offset, stride = view_of(graph, node.inputs[0])
    constants = {
        "WORKGROUP": WORKGROUP,
        "HEADS": attrs.heads,
        "HEAD_DIM": attrs.head_dim,
        "ROTARY_DIM": attrs.rotary_dim,
        "X_OFFSET": offset,
        "X_STRIDE": stride,
    }
    return Choice(registry().get("rope"), (*node.inputs, node.id), constants, over_columns(node))
