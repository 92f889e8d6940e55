"""Fusions: each pass finds one pattern, rewrites it in place, and returns the roots.

A pass keeps the id of the value that the pattern ends in, so node ids held outside stay good. What fuses must have no
other user, because its value is no longer computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vkdecode.graph.graph import Graph
from vkdecode.graph.nodes import (
    ExpertSumAttrs,
    KvWriteAttrs,
    LinearAttrs,
    Node,
    NodeId,
    NormAttrs,
    Op,
    RopeAttrs,
    RowPick,
    ViewAttrs,
    WeightSpec,
)

ACTIVATIONS = frozenset({Op.SILU, Op.GELU_TANH})
"""What a product can apply to its sums."""
_NORMS = (Op.RMS_NORM, Op.LAYER_NORM)

Roots = tuple[NodeId, ...]
Fusion = Callable[[Graph, Roots], Roots]


def fuse_gated_mlp(graph: Graph, roots: Roots) -> Roots:
    """act(gate(x)) * up(x), or gpt-oss's form of it, becomes one product whose lanes hold a gate and its up row."""
    users = graph.consumers(roots)
    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        if node.op not in (Op.MUL, Op.CLAMPED_SWIGLU):
            continue
        gate, up = node.inputs
        activation: Op = node.op
        alone = [gate, up]
        if node.op is Op.MUL:
            activation = graph.node(gate).op
            if activation not in ACTIVATIONS:
                continue
            gate = graph.node(gate).inputs[0]
            alone.append(gate)
        if not all(len(users[one]) == 1 for one in alone):
            continue
        inputs = _stacked(graph, [gate, up], replace_spec={"order": "gated"})
        if inputs is not None:
            used = graph.attrs(gate, LinearAttrs).experts_used
            bias = len(inputs) == 3 + (used > 0)
            attrs = LinearAttrs(bias=bias, epilogue="gated", activation=activation, experts_used=used)
            graph.rewrite(node_id, Op.LINEAR, inputs, attrs)
    return roots


def fuse_qkv(graph: Graph, roots: Roots) -> Roots:
    """The q, k and v products become one, of which they are views."""
    for node_id in graph.reachable(roots):
        if graph.node(node_id).op is not Op.ATTENTION:
            continue
        products = [_product_behind(graph, one) for one in _qkv(graph, node_id)]
        inputs = _stacked(graph, products, replace_spec={}) if len(set(products)) == 3 else None
        if inputs is None:
            continue
        widths = [graph.node(one).shape[1] for one in products]
        shape = (graph.node(products[0]).shape[0], sum(widths))
        fused = graph.add_node(Op.LINEAR, inputs, shape, LinearAttrs(bias=len(inputs) == 3))
        for at, product in enumerate(products):
            graph.rewrite(product, Op.VIEW, [fused], ViewAttrs(sum(widths[:at])))
    return roots


def fuse_residual(graph: Graph, roots: Roots) -> Roots:
    """x + linear(y) becomes one product that starts from x; a sum of experts starts from it too."""
    users = graph.consumers(roots)
    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        if node.op is not Op.ADD:
            continue
        for product, residual in (node.inputs[::-1], node.inputs):
            attrs = graph.node(product).attrs
            if len(users[product]) != 1 or product == residual:
                continue
            if isinstance(attrs, LinearAttrs):
                free = attrs.epilogue == "plain" and not attrs.experts_used
            elif not (free := isinstance(attrs, ExpertSumAttrs)):
                continue
            if free and not attrs.residual:
                inputs = [*graph.node(product).inputs, residual]
                graph.rewrite(node_id, graph.node(product).op, inputs, replace(attrs, residual=True))
                break
    return roots


def fuse_activation(graph: Graph, roots: Roots) -> Roots:
    """act(linear(x)) is applied to the finished sums."""
    users = graph.consumers(roots)
    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        if node.op not in ACTIVATIONS or graph.node(node.inputs[0]).op is not Op.LINEAR:
            continue
        product = node.inputs[0]
        attrs = graph.attrs(product, LinearAttrs)
        free = attrs.epilogue == "plain" and attrs.activation is None and not attrs.residual
        if len(users[product]) == 1 and free:
            graph.rewrite(node_id, Op.LINEAR, graph.node(product).inputs, replace(attrs, activation=node.op))
    return roots


def fuse_norm(graph: Graph, roots: Roots) -> Roots:
    """linear(norm(x)) normalizes while it reads x; each product that uses the norm does so for itself."""
    users = graph.consumers(roots)
    for node_id in graph.reachable(roots):
        if not _is_plain_norm(graph, node_id):
            continue
        x, *norm_weights = graph.node(node_id).inputs
        norm = "rms" if graph.node(node_id).op is Op.RMS_NORM else "layer"
        products = users[node_id]
        if not all(_takes_norm(graph, one, node_id) for one in products):
            continue
        for product in products:
            attrs = graph.attrs(product, LinearAttrs)
            head = 3 if attrs.bias else 2
            _, *rest = graph.node(product).inputs
            inputs = [x, *rest[: head - 1], *norm_weights, *rest[head - 1 :]]
            epsilon = graph.attrs(node_id, NormAttrs).epsilon
            fused = replace(attrs, norm_epsilon=epsilon, norm=norm, norm_bias=len(norm_weights) == 2)
            graph.rewrite(product, Op.LINEAR, inputs, fused)
    return roots


def fuse_norm_residual(graph: Graph, roots: Roots) -> Roots:
    """x + norm(y) adds x to what it normalized."""
    users = graph.consumers(roots)
    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        if node.op is not Op.ADD:
            continue
        for norm, residual in (node.inputs[::-1], node.inputs):
            if _is_plain_norm(graph, norm) and len(users[norm]) == 1 and norm != residual:
                attrs = replace(graph.attrs(norm, NormAttrs), residual=True)
                graph.rewrite(node_id, graph.node(norm).op, [*graph.node(norm).inputs, residual], attrs)
                break
    return roots


def fuse_norm_rope(graph: Graph, roots: Roots) -> Roots:
    """rope(norm(x)) turns the heads as it normalizes them."""
    users = graph.consumers(roots)
    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        if node.op is not Op.ROPE or graph.node(node.inputs[0]).op not in _NORMS or len(users[node.inputs[0]]) != 1:
            continue
        norm, *angles = node.inputs
        attrs = graph.attrs(norm, NormAttrs)
        if attrs.rope is None and not attrs.residual:
            fused = replace(attrs, rope=graph.attrs(node_id, RopeAttrs))
            graph.rewrite(node_id, graph.node(norm).op, [*graph.node(norm).inputs, *angles], fused)
    return roots


def fuse_qk_norm(graph: Graph, roots: Roots) -> Roots:
    """Norms of the heads of q and of k, which lie side by side in one product, become one; q and k are views of it."""
    for node_id in graph.reachable(roots):
        if graph.node(node_id).op is not Op.ATTENTION:
            continue
        q, k = (graph.node(one) for one in _qkv(graph, node_id)[:2])
        if q == k or not _side_by_side(graph, q, k):
            continue
        first, second = (graph.attrs(one.id, NormAttrs) for one in (q, k))
        specs = [graph.attrs(one.inputs[1], WeightSpec) for one in (q, k)]
        weight = replace(
            specs[0],
            names=specs[0].names + specs[1].names,
            part_rows=specs[0].part_rows + specs[1].part_rows,
            picks=_picks(specs),
        )
        shape = (q.shape[0], q.shape[1] + k.shape[1])
        both = graph.add_node(Op.VIEW, graph.node(q.inputs[0]).inputs, shape, graph.node(q.inputs[0]).attrs)
        attrs = replace(first, groups=first.groups + second.groups)
        fused = graph.add_node(q.op, [both, graph.weight(weight), *q.inputs[2:]], shape, attrs)
        graph.rewrite(q.id, Op.VIEW, [fused], ViewAttrs(0))
        graph.rewrite(k.id, Op.VIEW, [fused], ViewAttrs(q.shape[1]))
    return roots


def fuse_rope_write(graph: Graph, roots: Roots) -> Roots:
    """A product of q, k and v turns q and k itself, and puts k and v into the cache; its value is q.

    Runs behind `split_weights`: a product that was split is joined again before anything turns.
    """
    users = graph.consumers(roots)
    for node_id in graph.reachable(roots):
        if graph.node(node_id).op is not Op.ATTENTION:
            continue
        write = graph.node(graph.node(node_id).inputs[3])
        if write.op is not Op.KV_WRITE:
            continue
        q, k, v = parts = _qkv(graph, node_id)
        attrs = graph.attrs(write.id, KvWriteAttrs)
        angles: Sequence[NodeId] = ()
        rotary_dim = 0
        if graph.node(q).op is Op.ROPE and graph.node(k).op is Op.ROPE:
            rotary_dim = graph.attrs(q, RopeAttrs).rotary_dim
            angles = graph.node(q).inputs[1:]
            if graph.node(k).inputs[1:] != angles or graph.attrs(k, RopeAttrs).rotary_dim != rotary_dim:
                continue
            views = [graph.node(q).inputs[0], graph.node(k).inputs[0], v]
        else:
            views = list(parts)
        if rotary_dim % 4 or any(graph.node(one).op is not Op.VIEW for one in views):
            continue
        if any(len(users[one]) != 1 for one in {*parts, *views, write.id}):
            continue
        product = graph.node(graph.node(views[0]).inputs[0])
        widths = [graph.node(one).shape[1] for one in views]
        starts = [(product.id, sum(widths[:at])) for at in range(3)]
        found = [(graph.node(one).inputs[0], graph.attrs(one, ViewAttrs).offset) for one in views]
        if found != starts or product.op is not Op.LINEAR or product.shape[1] != sum(widths):
            continue
        held = graph.attrs(product.id, LinearAttrs)
        if held != replace(LinearAttrs(bias=held.bias), **_norm_of(held)) or len(users[product.id]) != 3:
            continue
        inputs = list(product.inputs)
        for at in (1, 2) if held.bias else (1,):
            spec = graph.attrs(inputs[at], WeightSpec)
            inputs[at] = graph.weight(replace(spec, order="rope", head_dim=attrs.head_dim, rotary_dim=rotary_dim))
        fused = graph.add_node(
            Op.LINEAR,
            [*inputs, *angles, *write.inputs[2:]],
            (product.shape[0], widths[0]),
            replace(held, epilogue="rope", rotary_dim=rotary_dim, write=attrs),
        )
        _, k_cache, v_cache, _, *rest = graph.node(node_id).inputs
        graph.rewrite(node_id, Op.ATTENTION, [fused, k_cache, v_cache, fused, *rest], graph.node(node_id).attrs)
    return roots


FUSIONS: tuple[Fusion, ...] = (
    fuse_gated_mlp,
    fuse_qkv,
    fuse_residual,
    fuse_activation,
    fuse_norm,
    fuse_norm_residual,
    fuse_norm_rope,
    fuse_qk_norm,
    fuse_rope_write,
)


def _qkv(graph: Graph, attention: NodeId) -> tuple[NodeId, NodeId, NodeId]:
    """What an attention takes as q, and what is written before it as this step's k and v."""
    q, _, _, written, *_ = graph.node(attention).inputs
    k, v, *_ = graph.node(written).inputs
    return q, k, v


def _norm_of(attrs: LinearAttrs) -> dict[str, Any]:
    """The norm that a product begins with."""
    return {"norm_epsilon": attrs.norm_epsilon, "norm": attrs.norm, "norm_bias": attrs.norm_bias}


def _product_behind(graph: Graph, node_id: NodeId) -> NodeId:
    """What a value was before it was turned and normalized, by operations that can read views."""
    while graph.node(node_id).op in (Op.ROPE, Op.RMS_NORM, Op.LAYER_NORM):
        node_id = graph.node(node_id).inputs[0]
    return node_id


def _is_plain_norm(graph: Graph, node_id: NodeId) -> bool:
    """Whether a node is a norm of whole rows that does nothing else."""
    if graph.node(node_id).op not in _NORMS:
        return False
    attrs = graph.attrs(node_id, NormAttrs)
    return attrs.groups == 1 and attrs.rope is None and not attrs.residual


def _side_by_side(graph: Graph, q: Node, k: Node) -> bool:
    """Whether two nodes are norms without bias, alike in all but their weights, of groups next to each other."""
    if q.op is not k.op or q.op not in _NORMS or any(graph.node(one.inputs[0]).op is not Op.VIEW for one in (q, k)):
        return False
    first, second = (graph.attrs(one.id, NormAttrs) for one in (q, k))
    if first.bias or second.bias or first.residual or second.residual or q.inputs[2:] != k.inputs[2:]:
        return False
    views = [graph.node(one.inputs[0]) for one in (q, k)]
    start, end = (graph.attrs(view.id, ViewAttrs).offset for view in views)
    plus_one = [graph.attrs(one.inputs[1], WeightSpec).plus_one for one in (q, k)]
    return (
        first.epsilon == second.epsilon
        and _turned(first) == _turned(second)
        and (first.first_groups, second.first_groups) in ((0, 0), (first.groups, second.groups))
        and q.shape[1] // first.groups == k.shape[1] // second.groups
        and views[0].inputs == views[1].inputs
        and start + q.shape[1] == end
        and plus_one[0] == plus_one[1]
    )


def _turned(attrs: NormAttrs) -> tuple[int, int] | None:
    return (attrs.rope.head_dim, attrs.rope.rotary_dim) if attrs.rope else None


def _takes_norm(graph: Graph, product: NodeId, norm: NodeId) -> bool:
    node = graph.node(product)
    if node.op is not Op.LINEAR or node.inputs[0] != norm or norm in node.inputs[1:]:
        return False
    if graph.node(norm).shape[1] != graph.node(node.inputs[1]).shape[1]:
        return False
    return graph.attrs(product, LinearAttrs).norm_epsilon is None


def _stacked(graph: Graph, products: Sequence[NodeId], replace_spec: dict[str, object]) -> list[NodeId] | None:
    """Inputs of one product that does the plain products of one x together: x, weight, bias and route if there are."""
    nodes = [graph.node(one) for one in products]
    if any(node.op is not Op.LINEAR for node in nodes):
        return None
    attrs = [graph.attrs(node.id, LinearAttrs) for node in nodes]
    used = attrs[0].experts_used
    if any(one != LinearAttrs(bias=one.bias, experts_used=used) for one in attrs):
        return None
    routes = [node.inputs[-1:] if used else () for node in nodes]
    if len({node.inputs[0] for node in nodes}) != 1 or len(set(routes)) != 1:
        return None
    specs = [graph.attrs(node.inputs[1], WeightSpec) for node in nodes]
    if len({(spec.dtype, spec.transposed, spec.experts) for spec in specs}) != 1 or any(
        spec.order != "plain" for spec in specs
    ):
        return None
    parts = tuple(rows for spec in specs for rows in spec.part_rows)
    names = tuple(name for spec in specs for name in spec.names)
    fused = replace(specs[0], names=names, part_rows=parts, picks=_picks(specs), **replace_spec)  # type: ignore[arg-type]  # values fit the fields
    inputs = [nodes[0].inputs[0], graph.weight(fused)]
    biases = [
        graph.attrs(node.inputs[2], WeightSpec) if one.bias else None for node, one in zip(nodes, attrs, strict=True)
    ]
    held = next((bias for bias in biases if bias is not None), None)
    if held is not None:
        parts_of = zip(biases, specs, strict=True)
        bias_names = tuple(
            name for bias, spec in parts_of for name in (bias.names if bias else (None,) * len(spec.names))
        )
        picks = _picks([bias or spec for bias, spec in zip(biases, specs, strict=True)])
        vector = replace(fused, names=bias_names, columns=1, dtype=held.dtype, vector=True)
        inputs.append(graph.weight(replace(vector, picks=picks, transposed=False)))
    return [*inputs, *routes[0]]


def _picks(specs: Sequence[WeightSpec]) -> tuple[RowPick, ...]:
    """The picks of all parts of these constants; empty where none picks rows."""
    picks = [pick for spec in specs for pick in spec.picks or (RowPick(),) * len(spec.names)]
    return tuple(picks) if any(pick != RowPick() for pick in picks) else ()
