"""The choice of experts, and the sum of what they give."""

from __future__ import annotations

from vkdecode.errors import UnsupportedModelError
from vkdecode.gpu import Lanes, registry
from vkdecode.graph import ExpertSumAttrs, Graph, Node, RouteAttrs
from vkdecode.runtime.kernels.choice import WORKGROUP, Choice, over_columns

_MAX_EXPERTS = 1024


def route(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """The experts of each token."""
    attrs, experts = graph.attrs(node.id, RouteAttrs), graph.node(node.inputs[0]).shape[1]
    if experts > _MAX_EXPERTS:
        raise UnsupportedModelError(f"{experts} experts are not supported; {_MAX_EXPERTS} are the most")
    constants = {
        "WORKGROUP": WORKGROUP,
        "EXPERTS": experts,
        "USED": attrs.used,
        "NORMALIZED": int(attrs.normalized),
    }
    return Choice(registry().get("route"), (*node.inputs, node.id), constants, (node.shape[0], 1, 1))


def expert_sum(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """What the chosen experts give, by their weights."""
    attrs = graph.attrs(node.id, ExpertSumAttrs)
    x, route, *rest = node.inputs
    # What the kernel does not read is bound to x.
    shared, gate = (rest.pop(0), rest.pop(0)) if attrs.shared else (x, x)
    residual = rest.pop(0) if attrs.residual else x
    constants = {
        "WORKGROUP": WORKGROUP,
        "COLUMNS": node.shape[1],
        "USED": attrs.used,
        "HAS_SHARED": int(attrs.shared),
        "HAS_RESIDUAL": int(attrs.residual),
    }
    bindings = (x, route, shared, gate, residual, node.id)
    return Choice(registry().get("expert_sum"), bindings, constants, over_columns(node))
