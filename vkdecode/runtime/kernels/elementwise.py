"""Operations on each value by itself."""

from __future__ import annotations

import math

from vkdecode.gpu import Lanes, registry
from vkdecode.graph import FactorAttrs, Graph, Node
from vkdecode.runtime.kernels.choice import MAX_WORKGROUPS, WORKGROUP, Choice, float_bits


def elementwise(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """One operation on each value."""
    count = math.prod(node.shape)
    groups = -(-count // WORKGROUP)
    width = min(groups, MAX_WORKGROUPS)
    kernel = registry().get("elementwise", OP=node.op.value)
    bindings = (node.inputs[0], node.id, *node.inputs[1:])
    constants = {"WORKGROUP": WORKGROUP, "COUNT": count}
    if isinstance(node.attrs, FactorAttrs):
        constants["FACTOR_BITS"] = float_bits(node.attrs.factor)
    return Choice(kernel, bindings, constants, (width, -(-groups // width), 1))
