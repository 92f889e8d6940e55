"""Which kernel realizes a node, with which constants and how many workgroups; a file for each kind of operation."""

from __future__ import annotations

from collections.abc import Callable

from vkdecode.gpu import Lanes
from vkdecode.graph import Graph, Node, NodeId, Op
from vkdecode.runtime.kernels import attention, elementwise, experts, linear, moves, norm, top_k
from vkdecode.runtime.kernels.choice import Choice

__all__ = ["Choice", "choose_kernel"]

_CHOICES: dict[Op, Callable[[Graph, Node, Lanes], Choice]] = {
    Op.LINEAR: linear.linear,
    Op.EMBED: moves.embed,
    Op.RMS_NORM: norm.norm,
    Op.LAYER_NORM: norm.norm,
    Op.ROPE: norm.rope,
    Op.CONCAT: moves.concat,
    Op.CONTIGUIZE: moves.contiguize,
    Op.LAST_ROW: moves.last_row,
    Op.ADD: elementwise.elementwise,
    Op.MUL: elementwise.elementwise,
    Op.SILU: elementwise.elementwise,
    Op.GELU: elementwise.elementwise,
    Op.GELU_TANH: elementwise.elementwise,
    Op.SCALE: elementwise.elementwise,
    Op.SOFTCAP: elementwise.elementwise,
    Op.CLAMPED_SWIGLU: elementwise.elementwise,
    Op.ROUTE: experts.route,
    Op.EXPERT_SUM: experts.expert_sum,
    Op.GROUP_MAX: top_k.group_max,
    Op.TOP_K: top_k.top_k,
    Op.ATTENTION: attention.attention,
    Op.KV_WRITE: attention.kv_write,
    Op.KV_MOVE: attention.kv_move,
}


def choose_kernel(graph: Graph, node_id: NodeId, lanes: Lanes) -> Choice:
    """Pick the kernel for a node that computes something.

    Raises:
        UnsupportedModelError: no kernel has the node's geometry.

    """
    node = graph.node(node_id)
    return _CHOICES[node.op](graph, node, lanes)
