"""The graph: nodes with stable ids, and a topology generation that rises with every structural change."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from vkdecode.errors import InvalidInputError
from vkdecode.graph.nodes import (
    AttentionAttrs,
    Attrs,
    DataAttrs,
    ExpertSumAttrs,
    FactorAttrs,
    GroupMaxAttrs,
    KvAttrs,
    KvMoveAttrs,
    KvWriteAttrs,
    LinearAttrs,
    Node,
    NodeId,
    NormAttrs,
    Op,
    RopeAttrs,
    RouteAttrs,
    TopKAttrs,
    WeightSpec,
)
from vkdecode.graph.symbols import SymId
from vkdecode.weights.dtypes import DType

A = TypeVar("A")

_GROUP_MAX_WIDTH = 64


@dataclass(frozen=True)
class OptimizedGraph:
    """Which nodes to realize and the generation at which that was decided; all else is baked into the graph itself."""

    roots: tuple[NodeId, ...]
    generation: int


class Graph:
    """Nodes in single-assignment form.

    Ids are stable: an optimization rewrites a node in place or adds new ones, and what nothing reaches any more stays
    where it is. `placement` holds the stamps of the placement pass: where each node's value lives.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._symbols: list[SymId] = []
        self._constants: dict[object, NodeId] = {}
        self.placement: dict[NodeId, Hashable] = {}
        self.generation = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, node_id: NodeId) -> Node:
        """The node with this id."""
        return self._nodes[node_id]

    def attrs(self, node_id: NodeId, kind: type[A]) -> A:
        """A node's attributes, which must be of the given kind."""
        attrs = self._nodes[node_id].attrs
        if not isinstance(attrs, kind):
            raise InvalidInputError(f"node {node_id} ({self._nodes[node_id].op.value}) has no {kind.__name__}")
        return attrs

    def add_node(
        self, op: Op, inputs: Sequence[NodeId], shape: tuple[int, ...], attrs: Attrs = None, dtype: DType = DType.F32
    ) -> NodeId:
        """Append a node; the generation rises."""
        node_id = NodeId(len(self._nodes))
        if any(not 0 <= one < node_id for one in inputs):
            raise InvalidInputError(f"node {node_id} ({op.value}) names an input that does not exist: {list(inputs)}")
        self._nodes.append(Node(node_id, op, tuple(inputs), shape, dtype, attrs))
        self.generation += 1
        return node_id

    def rewrite(self, node_id: NodeId, op: Op, inputs: Sequence[NodeId], attrs: Attrs) -> None:
        """Give a node another definition with the same shape; the generation rises."""
        self._nodes[node_id] = replace(self._nodes[node_id], op=op, inputs=tuple(inputs), attrs=attrs)
        self.generation += 1

    def symbol(self, name: str) -> SymId:
        """A new symbol."""
        self._symbols.append(SymId(len(self._symbols), name))
        return self._symbols[-1]

    def reachable(self, roots: Iterable[NodeId]) -> list[NodeId]:
        """What the roots need, every node after its inputs; among free nodes the order of their making."""
        order: list[NodeId] = []
        done: set[NodeId] = set()
        for root in roots:
            stack = [(root, False)]
            while stack:
                node_id, expanded = stack.pop()
                if node_id in done:
                    continue
                if expanded:
                    done.add(node_id)
                    order.append(node_id)
                else:
                    stack.append((node_id, True))
                    stack += [(one, False) for one in reversed(self._nodes[node_id].inputs)]
        return order

    def consumers(self, roots: Iterable[NodeId]) -> dict[NodeId, list[NodeId]]:
        """For each reachable node the nodes that use it; a root counts as used once more, by itself."""
        roots = tuple(roots)
        users: dict[NodeId, list[NodeId]] = {one: [one] for one in roots}
        for node_id in self.reachable(roots):
            for one in dict.fromkeys(self._nodes[node_id].inputs):
                users.setdefault(one, []).append(node_id)
        return users

    def _constant(self, op: Op, key: object, shape: tuple[int, ...], attrs: Attrs, dtype: DType) -> NodeId:
        if key not in self._constants:
            self._constants[key] = self.add_node(op, (), shape, attrs, dtype)
        return self._constants[key]

    def weight(self, spec: WeightSpec) -> NodeId:
        """A weight constant; the same spec gives the same node."""
        shape = (spec.rows,) if spec.vector else (spec.rows, spec.columns)
        return self._constant(Op.WEIGHT, spec, shape, spec, spec.dtype)

    def data(self, name: str, shape: tuple[int, ...], dtype: DType = DType.F32) -> NodeId:
        """A data constant, bound anew for each step."""
        return self._constant(Op.DATA, name, shape, DataAttrs(name), dtype)

    def find_data(self, name: str) -> NodeId:
        """The data constant of this name, which must have been made."""
        if name not in self._constants:
            raise InvalidInputError(f"the graph has no data constant {name!r}, which this step needs")
        return self._constants[name]

    def kv(self, layer: int, which: int, shape: tuple[int, int, int], dtype: DType) -> NodeId:
        """A KV constant [kv_heads, cache rows, head_dim]."""
        return self._constant(Op.KV, (layer, which), shape, KvAttrs(layer, which), dtype)

    def embed(self, token_ids: NodeId, weight: NodeId) -> NodeId:
        """Rows of `weight` [vocab, hidden] for the token ids [tokens]."""
        shape = (self.node(token_ids).shape[0], self.node(weight).shape[1])
        return self.add_node(Op.EMBED, (token_ids, weight), shape)

    def rms_norm(self, x: NodeId, weight: NodeId, epsilon: float, groups: int = 1) -> NodeId:
        """Root-mean-square norm of each token, or of each of `groups` equal parts of it, such as heads."""
        return self.add_node(Op.RMS_NORM, (x, weight), self.node(x).shape, self._norm_attrs(x, weight, epsilon, groups))

    def layer_norm(self, x: NodeId, weight: NodeId, bias: NodeId | None, epsilon: float, groups: int = 1) -> NodeId:
        """Layer norm of each token: (x - mean) / sqrt(variance + epsilon) * weight + bias; Ba et al. 2016."""
        inputs = (x, weight) if bias is None else (x, weight, bias)
        attrs = replace(self._norm_attrs(x, weight, epsilon, groups), bias=bias is not None)
        return self.add_node(Op.LAYER_NORM, inputs, self.node(x).shape, attrs)

    def _norm_attrs(self, x: NodeId, weight: NodeId, epsilon: float, groups: int) -> NormAttrs:
        features, held = self.node(x).shape[1], self.node(weight).shape[0]
        if features % groups or held not in (features, features // groups):
            raise InvalidInputError(f"a norm of {features} features in {groups} groups has a weight of {held}")
        return NormAttrs(epsilon, groups, groups if held != features else 0)

    def linear(self, x: NodeId, weight: NodeId, bias: NodeId | None = None) -> NodeId:
        """x [tokens, columns] times weight [rows, columns] transposed, plus bias [rows]."""
        (tokens, columns), (rows, expected) = self.node(x).shape, self.node(weight).shape
        if columns != expected:
            raise InvalidInputError(f"a linear node multiplies {columns} features with a weight of {expected} columns")
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return self.add_node(Op.LINEAR, inputs, (tokens, rows), LinearAttrs(bias=bias is not None))

    def route(self, logits: NodeId, token_count: NodeId, used: int, normalized: bool) -> NodeId:
        """The experts of each token, from logits [tokens, experts]; see `RouteAttrs`."""
        tokens, experts = self.node(logits).shape
        if not 1 <= used <= experts:
            raise InvalidInputError(f"{used} of {experts} experts cannot be chosen")
        return self.add_node(
            Op.ROUTE, (logits, token_count), (tokens, 2 * used), RouteAttrs(used, normalized), DType.U32
        )

    def expert_linear(self, x: NodeId, weight: NodeId, route: NodeId, bias: NodeId | None = None) -> NodeId:
        """The products of a token's experts side by side, [tokens, used * rows].

        x is [tokens, columns], or [tokens, used * columns] where each expert has its own; `weight` and `bias` are
        stacks, see `WeightSpec`.
        """
        spec, used = self.attrs(weight, WeightSpec), self.attrs(route, RouteAttrs).used
        tokens, features = self.node(x).shape
        if not spec.experts or features not in (spec.columns, used * spec.columns):
            raise InvalidInputError(f"{features} features of {used} experts meet {spec.columns} columns of each")
        inputs = (x, weight, route) if bias is None else (x, weight, bias, route)
        attrs = LinearAttrs(bias=bias is not None, experts_used=used)
        return self.add_node(Op.LINEAR, inputs, (tokens, used * (spec.rows // spec.experts)), attrs)

    def expert_sum(
        self, x: NodeId, route: NodeId, shared: NodeId | None = None, shared_gate: NodeId | None = None
    ) -> NodeId:
        """The experts' outputs [tokens, used * features] by their weights, [tokens, features]; see `ExpertSumAttrs`.

        A shared expert's output is [tokens, features] and its gate's logit [tokens, 1].
        """
        if (shared is None) != (shared_gate is None):
            raise InvalidInputError("a shared expert needs its gate, and the gate its expert")
        used = self.attrs(route, RouteAttrs).used
        tokens, features = self.node(x).shape
        inputs = (x, route) if shared is None or shared_gate is None else (x, route, shared, shared_gate)
        attrs = ExpertSumAttrs(used, shared=shared is not None)
        return self.add_node(Op.EXPERT_SUM, inputs, (tokens, features // used), attrs)

    def rope(self, x: NodeId, cos: NodeId, sin: NodeId, heads: int, head_dim: int, rotary_dim: int) -> NodeId:
        """Turn the first `rotary_dim` dimensions of every head; cos and sin are [tokens, head_dim / 2]."""
        return self.add_node(Op.ROPE, (x, cos, sin), self.node(x).shape, RopeAttrs(heads, head_dim, rotary_dim))

    def add(self, a: NodeId, b: NodeId) -> NodeId:
        """Sum of two values of equal shape."""
        return self.add_node(Op.ADD, (a, b), self.node(a).shape)

    def mul(self, a: NodeId, b: NodeId) -> NodeId:
        """Product of two values of equal shape, element by element."""
        return self.add_node(Op.MUL, (a, b), self.node(a).shape)

    def silu(self, x: NodeId) -> NodeId:
        """x / (1 + exp(-x)); Elfwing et al. 2017."""
        return self.add_node(Op.SILU, (x,), self.node(x).shape)

    def gelu(self, x: NodeId) -> NodeId:
        """GELU, x times the normal distribution's probability of less than x; Hendrycks and Gimpel 2016."""
        return self.add_node(Op.GELU, (x,), self.node(x).shape)

    def gelu_tanh(self, x: NodeId) -> NodeId:
        """The tanh form of GELU, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); Hendrycks and Gimpel 2016."""
        return self.add_node(Op.GELU_TANH, (x,), self.node(x).shape)

    def clamped_swiglu(self, gate: NodeId, up: NodeId) -> NodeId:
        """The gated unit of gpt-oss: (clamp(up, -7, 7) + 1) g sigmoid(1.702 g) with g = min(gate, 7)."""
        return self.add_node(Op.CLAMPED_SWIGLU, (gate, up), self.node(gate).shape)

    def scale(self, x: NodeId, factor: float) -> NodeId:
        """x times a constant; x itself where that is 1."""
        return x if factor == 1.0 else self.add_node(Op.SCALE, (x,), self.node(x).shape, FactorAttrs(factor))

    def softcap(self, x: NodeId, cap: float) -> NodeId:
        """cap tanh(x / cap), Gemma 2's soft-capping; Bello et al. 2016."""
        return self.add_node(Op.SOFTCAP, (x,), self.node(x).shape, FactorAttrs(cap))

    def last_row(self, x: NodeId, token_count: NodeId) -> NodeId:
        """The row of the last real token, [1, features]."""
        return self.add_node(Op.LAST_ROW, (x, token_count), (1, self.node(x).shape[1]))

    def group_max(self, x: NodeId) -> NodeId:
        """The highest value of each group of x [1, columns]: what `top_k` of it starts from; see `GroupMaxAttrs`.

        About as many groups as `top_k` then looks at values in 64 of them, since it reads both.
        """
        rows, columns = self.node(x).shape
        if rows != 1:
            raise InvalidInputError(f"the highest values of {rows} rows were asked for; it must be one")
        attrs = GroupMaxAttrs(_GROUP_MAX_WIDTH, max(math.isqrt(columns // _GROUP_MAX_WIDTH), 1))
        blocks = -(-columns // (attrs.width * attrs.length))
        return self.add_node(Op.GROUP_MAX, (x,), (1, 2 * attrs.width * blocks), attrs, DType.U32)

    def top_k(self, x: NodeId, groups: NodeId, k: int) -> NodeId:
        """The k highest values of x [1, columns], whose GROUP_MAX is `groups`; see `TopKAttrs`."""
        columns = self.node(x).shape[1]
        if not 1 <= k <= min(columns, _GROUP_MAX_WIDTH):
            raise InvalidInputError(f"the {k} highest of {columns} values cannot be taken; at most 64 and all of them")
        return self.add_node(Op.TOP_K, (x, groups), (1, 2 * k), TopKAttrs(k), DType.U32)

    def kv_write(
        self,
        k: NodeId,
        v: NodeId,
        caches: tuple[NodeId, NodeId],
        token_count: NodeId,
        attrs: KvWriteAttrs,
        offset: NodeId | None = None,
    ) -> NodeId:
        """Put this step's rows into the caches of a layer."""
        inputs = [k, v, *caches, token_count] if offset is None else [k, v, *caches, token_count, offset]
        return self.add_node(Op.KV_WRITE, inputs, (), attrs)

    def attention(
        self,
        q: NodeId,
        caches: tuple[NodeId, NodeId],
        written: NodeId,
        token_count: NodeId,
        attrs: AttentionAttrs,
        mask: NodeId | None = None,
        offset: NodeId | None = None,
        sinks: NodeId | None = None,
    ) -> NodeId:
        """Attention of this step's tokens over the rows of the caches, behind the KV_WRITE `written`."""
        if (attrs.sinks, attrs.masked) != (sinks is not None, mask is not None):
            raise InvalidInputError("attention takes sinks and a mask exactly where its attributes say so")
        extra = [one for one in (sinks, mask, offset) if one is not None]
        return self.add_node(Op.ATTENTION, [q, *caches, written, token_count, *extra], self.node(q).shape, attrs)

    def kv_move(self, caches: tuple[NodeId, NodeId], after: NodeId, attrs: KvMoveAttrs) -> NodeId:
        """Move this step's rows from the landing rows to their place, once `after` (the attention) has read them."""
        return self.add_node(Op.KV_MOVE, [*caches, after], (), attrs)
