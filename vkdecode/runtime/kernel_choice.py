"""Which kernel realizes a node, with which constants and how many workgroups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from vkdecode.errors import UnsupportedModelError
from vkdecode.gpu import Kernel, Lanes, registry
from vkdecode.graph import (
    AttentionAttrs,
    ExpertSumAttrs,
    FactorAttrs,
    Graph,
    GroupMaxAttrs,
    KvWriteAttrs,
    LinearAttrs,
    Node,
    NodeId,
    NormAttrs,
    Op,
    RopeAttrs,
    RouteAttrs,
    SymId,
    TopKAttrs,
    ViewAttrs,
    WeightSpec,
)
from vkdecode.runtime.block_layout import PACK
from vkdecode.runtime.passes import MOST_PRODUCT_PASSES, attention_workgroup, linear_passes

_WORKGROUP = 64
_MOST_EXPERTS = 1024
# The numbers that linear.comp and activations.glsl give them.
NORMS = {None: 0, "rms": 1, "layer": 2}
ACTIVATIONS = {None: 0, Op.SILU: 1, Op.GELU_TANH: 2, Op.CLAMPED_SWIGLU: 3}
# The most that Vulkan promises on an axis; some devices allow no more.
_MOST_WORKGROUPS = 65535
# Pairs of a token and a head that there is an attention kernel for.
_QUERIES = (1, 2, 3, 4)
_PROMPT_QUERIES = (*_QUERIES, 8, 12)
_MOST_KEPT_CHUNKS = 64  # of x in a lane's own array; compilers take longer for larger ones


@dataclass(frozen=True)
class Choice:
    """A kernel and everything its dispatch needs.

    `bindings` are the nodes whose values it binds; `work` is about how many multiply-adds it takes at most.
    """

    kernel: Kernel
    bindings: tuple[NodeId, ...]
    spec: Mapping[str, int]
    workgroups: tuple[int, int, int]
    push: Mapping[str, int | SymId]
    work: int = 0


def choose_kernel(graph: Graph, node_id: NodeId, lanes: Lanes) -> Choice:
    """Pick the kernel for a node that computes something.

    Raises:
        UnsupportedModelError: no kernel has the node's geometry.

    """
    node = graph.node(node_id)
    return _CHOICES[node.op](graph, node, lanes)


def float_bits(value: float) -> int:
    """The bits of a float32, as specialization constants carry it."""
    return int(np.float32(value).view(np.uint32))


def view_of(graph: Graph, node_id: NodeId) -> tuple[int, int]:
    """Column offset and row stride of a node's value in its buffer, in elements."""
    offset = 0
    node = graph.node(node_id)
    while node.op in (Op.VIEW, Op.COPY):
        if node.op is Op.VIEW:
            offset += graph.attrs(node.id, ViewAttrs).offset
        node = graph.node(node.inputs[0])
    return offset, node.shape[-1]


def _linear(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    attrs = graph.attrs(node.id, LinearAttrs)
    x, weight, *rest = node.inputs
    spec = graph.attrs(weight, WeightSpec)
    bias = rest.pop(0) if attrs.bias else x
    tokens = node.shape[0]
    # Experts are taken token by token, as that many more tokens.
    experts, used = max(spec.experts, 1), max(attrs.experts_used, 1)
    token_tile = 1 if tokens == 1 or attrs.experts_used else lanes.token_tile
    norm: list[NodeId] = []
    if attrs.norm_epsilon is not None:
        norm, rest = rest[: 1 + attrs.norm_bias], rest[1 + attrs.norm_bias :]
    route = rest.pop() if attrs.experts_used else x
    if attrs.epilogue == "plain" and not attrs.residual:
        rest = [x]
    # What a kernel does not read is bound to x.
    bindings = [weight, x, bias, node.id, *norm, *[x] * (2 - len(norm)), *rest]
    if token_tile > 1:
        if tokens % token_tile:
            raise UnsupportedModelError(f"a step of {tokens} tokens is not a multiple of {token_tile}")
        bindings.append(graph.find_data("token_count"))
    else:
        bindings.append(route)
    if spec.columns % 4:
        raise UnsupportedModelError(f"a product over {spec.columns} features: they must be a multiple of 4")
    kernel = registry().get(
        "linear", LANES=lanes.form, DTYPE=spec.dtype.value, TOKENS=token_tile, EPILOGUE=attrs.epilogue
    )
    paired = attrs.epilogue in ("rope", "gated")
    rows = spec.units // experts
    tiles = -(-rows // lanes.tile) * (2 if paired else 1)
    blocks = -(-tiles // lanes.row_tiles)
    token_tiles = tokens // token_tile * used
    wanted = lanes.wanted_workgroups and max(lanes.wanted_workgroups // token_tiles, 1)
    chunks = -(-spec.columns // PACK)
    most = lanes.workgroup if token_tile == 1 else lanes.prompt_workgroup
    split = min(most // lanes.tile, 1 << (chunks.bit_length() - 1))
    staged = PACK * split * (max(256 // (PACK * split), 1) if token_tile == 1 else 1)
    staged = min(staged, chunks * PACK)
    once, each = linear_passes(chunks, lanes.tile * split, staged, lanes, token_tile)
    groups = -(-blocks // min(wanted or _MOST_WORKGROUPS, _MOST_WORKGROUPS))
    groups = max(min(groups, (MOST_PRODUCT_PASSES - once) // each), -(-blocks // _MOST_WORKGROUPS))
    keep_x = lanes.form == "subgroup" and token_tile > 1 and groups > 1 and chunks <= _MOST_KEPT_CHUNKS
    rope = attrs.rope or RopeAttrs(1, 0, 2, 2)
    constants = {
        "WORKGROUP": lanes.tile * split,
        "TILE": lanes.tile,
        "COLUMNS": spec.columns,
        "ROWS": rows,
        "GROUPS": groups,
        "OUTPUTS": node.shape[1] // used,
        "HAS_BIAS": int(attrs.bias),
        "EPSILON_BITS": float_bits(attrs.norm_epsilon or 0.0),
        "HEAD_DIM": rope.head_dim,
        "ROTARY_DIM": rope.rotary_dim,
        "ROTARY_HEADS": rope.rotated_heads,
        "X_CHUNK": staged,
        "NORM": NORMS[None if attrs.norm_epsilon is None else attrs.norm],
        "HAS_NORM_BIAS": int(attrs.norm_bias),
        "ACTIVATION": ACTIVATIONS[attrs.activation],
        "EXPERTS_USED": attrs.experts_used,
        "EXPERT_BLOCKS": blocks,
        "EXPERT_X": int(graph.node(x).shape[1] != spec.columns),
        "KEEP_X": int(keep_x),
    }
    if attrs.epilogue == "plain":
        constants["HAS_RESIDUAL"] = int(attrs.residual)
    work = tokens * used * rows * (2 if paired else 1) * spec.columns
    workgroups = (-(-blocks // groups), token_tiles, 1)
    return Choice(kernel, tuple(bindings), constants, workgroups, {}, work)


def _embed(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    token_ids, weight, *others = node.inputs
    spec = graph.attrs(weight, WeightSpec)
    chunks = -(-spec.columns // PACK)
    constants = {"WORKGROUP": _WORKGROUP, "TILE": lanes.tile, "COLUMNS": spec.columns}
    if spec.unit_count:
        constants |= {"FIRST_ROW": spec.first_unit, "ROW_COUNT": spec.unit_count, "HAS_OTHERS": len(others)}
        others = others or [weight]  # a binding that the kernel does not read
    kernel = registry().get("embed", DTYPE=spec.dtype.value, PART=int(bool(spec.unit_count)))
    return Choice(
        kernel, (weight, token_ids, node.id, *others), constants, (-(-chunks // _WORKGROUP), node.shape[0], 1), {}
    )


def _norm(graph: Graph, node: Node, lanes: Lanes) -> Choice:
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
    return Choice(kernel, tuple(bindings), constants, (node.shape[0], attrs.groups, 1), {})


def _rope(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    attrs = graph.attrs(node.id, RopeAttrs)
    offset, stride = view_of(graph, node.inputs[0])
    constants = {
        "WORKGROUP": _WORKGROUP,
        "HEADS": attrs.heads,
        "HEAD_DIM": attrs.head_dim,
        "ROTARY_DIM": attrs.rotary_dim,
        "X_OFFSET": offset,
        "X_STRIDE": stride,
    }
    return Choice(registry().get("rope"), (*node.inputs, node.id), constants, _over_columns(node), {})


def _contiguize(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    offset, stride = view_of(graph, node.inputs[0])
    constants = {"WORKGROUP": _WORKGROUP, "COLUMNS": node.shape[1], "X_OFFSET": offset, "X_STRIDE": stride}
    return Choice(registry().get("contiguize"), (*node.inputs, node.id), constants, _over_columns(node), {})


def _concat(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    a, b = (graph.node(one).shape[1] for one in node.inputs)
    constants = {"WORKGROUP": _WORKGROUP, "A_COLUMNS": a, "B_COLUMNS": b}
    return Choice(registry().get("concat"), (*node.inputs, node.id), constants, _over_columns(node), {})


def _over_columns(node: Node) -> tuple[int, int, int]:
    return -(-node.shape[1] // _WORKGROUP), node.shape[0], 1


def _elementwise(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    count = math.prod(node.shape)
    groups = -(-count // _WORKGROUP)
    width = min(groups, _MOST_WORKGROUPS)
    kernel = registry().get("elementwise", OP=node.op.value)
    bindings = (node.inputs[0], node.id, *node.inputs[1:])
    constants = {"WORKGROUP": _WORKGROUP, "COUNT": count}
    if isinstance(node.attrs, FactorAttrs):
        constants["FACTOR_BITS"] = float_bits(node.attrs.factor)
    return Choice(kernel, bindings, constants, (width, -(-groups // width), 1), {})


def _route(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    attrs, experts = graph.attrs(node.id, RouteAttrs), graph.node(node.inputs[0]).shape[1]
    if experts > _MOST_EXPERTS:
        raise UnsupportedModelError(f"{experts} experts are not supported; {_MOST_EXPERTS} are the most")
    constants = {
        "WORKGROUP": _WORKGROUP,
        "EXPERTS": experts,
        "USED": attrs.used,
        "NORMALIZED": int(attrs.normalized),
    }
    return Choice(registry().get("route"), (*node.inputs, node.id), constants, (node.shape[0], 1, 1), {})


def _expert_sum(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    attrs = graph.attrs(node.id, ExpertSumAttrs)
    x, route, *rest = node.inputs
    # What the kernel does not read is bound to x.
    shared, gate = (rest.pop(0), rest.pop(0)) if attrs.shared else (x, x)
    residual = rest.pop(0) if attrs.residual else x
    constants = {
        "WORKGROUP": _WORKGROUP,
        "COLUMNS": node.shape[1],
        "USED": attrs.used,
        "HAS_SHARED": int(attrs.shared),
        "HAS_RESIDUAL": int(attrs.residual),
    }
    bindings = (x, route, shared, gate, residual, node.id)
    return Choice(registry().get("expert_sum"), bindings, constants, _over_columns(node), {})


def _last_row(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    constants = {"WORKGROUP": _WORKGROUP, "COLUMNS": node.shape[1]}
    return Choice(registry().get("last_row"), (*node.inputs, node.id), constants, _over_columns(node), {})


def _attention(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    attrs = graph.attrs(node.id, AttentionAttrs)
    if attrs.head_dim % 4:
        raise UnsupportedModelError(f"head_dim {attrs.head_dim} is not a multiple of 4")
    tokens = node.shape[0]
    cache = graph.node(node.inputs[3])
    group = attrs.heads // attrs.kv_heads
    query_heads, query_tokens = _queries(group, tokens, lanes)
    push: dict[str, int | SymId] = {}
    if attrs.arm == "bounded" and attrs.attended_len is not None:
        push["attended_len"] = attrs.attended_len
    kernel = registry().get(
        "attention",
        LANES=lanes.form,
        KV=cache.dtype.value,
        QUERIES=query_heads * query_tokens,
        ARM=attrs.arm,
        OFFSET="buffer" if attrs.offset_on_device and (attrs.arm == "bounded" or attrs.writes) else "push",
        WRITE=int(attrs.writes),
    )
    constants = {
        "WORKGROUP": attention_workgroup(lanes),
        "KV_HEADS": attrs.kv_heads,
        "GROUP": group,
        "HEAD_DIM": attrs.head_dim,
        "MAX_SEQ": cache.shape[1],
        "STEP_TOKENS": tokens,
        "QUERY_HEADS": query_heads,
        "SCALE_BITS": float_bits(attrs.scale),
        "WINDOW": attrs.window,
        "CAP_BITS": float_bits(attrs.softcap),
        "HAS_SINKS": int(attrs.sinks),
    }
    for name, part in zip("QKV", node.inputs[:3], strict=True):
        constants[f"{name}_OFFSET"], constants[f"{name}_STRIDE"] = (value // 4 for value in view_of(graph, part))
    q, k, v, cache_k, cache_v, token_count, *extra = node.inputs
    sinks = extra.pop(0) if attrs.sinks else q  # a binding that the kernel does not read
    bindings = (q, k, v, cache_k, cache_v, node.id, token_count, sinks, *extra)
    seen = min(cache.shape[1], attrs.window or cache.shape[1]) + tokens
    work = 2 * tokens * attrs.heads * attrs.head_dim * seen
    return Choice(kernel, bindings, constants, (attrs.heads // query_heads, tokens // query_tokens, 1), push, work)


def _queries(group: int, tokens: int, lanes: Lanes) -> tuple[int, int]:
    """Heads and tokens that a workgroup of attention.comp takes: as many pairs as it can, for they share loads."""
    sizes = _PROMPT_QUERIES if tokens > 1 and lanes.form == "subgroup" else _QUERIES
    heads = [count for count in range(1, group + 1) if group % count == 0]
    each = [count for count in range(1, tokens + 1) if tokens % count == 0]
    found = [(one, other) for one in heads for other in each if one * other in sizes]
    return max(found, key=lambda pair: (pair[0] * pair[1], pair[0]))


def _kv_write(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    attrs = graph.attrs(node.id, KvWriteAttrs)
    x, cache, _, *offset = node.inputs
    start, stride = view_of(graph, x)
    constants = {
        "WORKGROUP": _WORKGROUP,
        "KV_HEADS": attrs.kv_heads,
        "HEAD_DIM": attrs.head_dim,
        "MAX_SEQ": node.shape[1],
        "X_OFFSET": start // 4,
        "X_STRIDE": stride // 4,
    }
    on_device = attrs.cached_len is None
    kernel = registry().get("kv_write", KV=node.dtype.value, OFFSET="buffer" if on_device else "push")
    push: dict[str, int | SymId] = {}
    if attrs.cached_len is not None:
        push = {"cached_len": attrs.cached_len, "token_count": attrs.token_count}
    words = attrs.kv_heads * attrs.head_dim // 4
    workgroups = (-(-words // _WORKGROUP), graph.node(x).shape[0], 1)
    return Choice(kernel, (x, cache, *offset), constants, workgroups, push)


def _group_max(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    attrs, columns = graph.attrs(node.id, GroupMaxAttrs), graph.node(node.inputs[0]).shape[1]
    constants = {"WORKGROUP": attrs.width, "COLUMNS": columns, "LENGTH": attrs.length}
    blocks = node.shape[1] // (2 * attrs.width)
    return Choice(registry().get("group_max"), (*node.inputs, node.id), constants, (blocks, 1, 1), {})


def _top_k(graph: Graph, node: Node, lanes: Lanes) -> Choice:
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
    return Choice(registry().get("top_k", LANES=lanes.form), (x, groups, node.id), constants, (1, 1, 1), {})


_CHOICES: dict[Op, Callable[[Graph, Node, Lanes], Choice]] = {
    Op.LINEAR: _linear,
    Op.EMBED: _embed,
    Op.RMS_NORM: _norm,
    Op.LAYER_NORM: _norm,
    Op.ROPE: _rope,
    Op.CONCAT: _concat,
    Op.CONTIGUIZE: _contiguize,
    Op.ADD: _elementwise,
    Op.MUL: _elementwise,
    Op.SILU: _elementwise,
    Op.GELU: _elementwise,
    Op.GELU_TANH: _elementwise,
    Op.SCALE: _elementwise,
    Op.SOFTCAP: _elementwise,
    Op.CLAMPED_SWIGLU: _elementwise,
    Op.ROUTE: _route,
    Op.EXPERT_SUM: _expert_sum,
    Op.LAST_ROW: _last_row,
    Op.GROUP_MAX: _group_max,
    Op.TOP_K: _top_k,
    Op.ATTENTION: _attention,
    Op.KV_WRITE: _kv_write,
}
