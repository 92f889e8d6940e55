"""What a choice of a kernel says, and the few things that all kinds of operations need to make one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vkdecode.gpu import Kernel
from vkdecode.graph import Graph, Node, NodeId, Op, SymId, ViewAttrs

WORKGROUP = 64
"""Invocations of a workgroup of the kernels that share nothing between them."""

MAX_WORKGROUPS = 65535
"""The most workgroups on an axis that Vulkan promises; some devices allow no more."""


@dataclass(frozen=True)
class Choice:
    """A kernel and everything its dispatch needs.

    `bindings` are the nodes whose values it binds; where each begins is added to the push constants when it is
    recorded. `work` is about how many multiply-adds it takes at most.
    """

    kernel: Kernel
    bindings: tuple[NodeId, ...]
    spec: Mapping[str, int]
    workgroups: tuple[int, int, int]
    push: Mapping[str, int | SymId] = field(default_factory=dict)
    work: int = 0


def float_bits(value: float) -> int:
    """The bits of a float32, as specialization constants carry it."""
    return int(np.float32(value).view(np.uint32))


def view_of(graph: Graph, node_id: NodeId) -> tuple[int, int]:
    """Column offset and row stride of a node's value among the columns that it is a view of, in elements."""
    offset = 0
    node = graph.node(node_id)
    while node.op in (Op.VIEW, Op.COPY):
        if node.op is Op.VIEW:
            offset += graph.attrs(node.id, ViewAttrs).offset
        node = graph.node(node.inputs[0])
    return offset, node.shape[-1]


def over_columns(node: Node) -> tuple[int, int, int]:
    """Workgroups for one invocation a value."""
    return -(-node.shape[1] // WORKGROUP), node.shape[0], 1
