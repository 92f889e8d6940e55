"""Attention over a KV cache, and what puts rows into one."""

from __future__ import annotations

from vkdecode.errors import UnsupportedModelError
from vkdecode.gpu import Lanes, registry
from vkdecode.graph import AttentionAttrs, Graph, KvMoveAttrs, KvWriteAttrs, Node, SymId
from vkdecode.runtime.kernels.choice import WORKGROUP, Choice, float_bits, view_of
from vkdecode.runtime.passes import attention_workgroup

# Pairs of a token and a head that there is an attention kernel for.
_QUERIES = (1, 2, 3, 4)
_PROMPT_QUERIES = (*_QUERIES, 8, 12)


def attention(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """Attention over the rows of a cache."""
    attrs = graph.attrs(node.id, AttentionAttrs)
    if attrs.head_dim % 4:
        raise UnsupportedModelError(f"head_dim {attrs.head_dim} is not a multiple of 4")
    q, cache_k, cache_v, _, token_count, *extra = node.inputs
    tokens, cache = node.shape[0], graph.node(cache_k)
    group = attrs.heads // attrs.kv_heads
    query_heads, query_tokens = _queries(group, tokens, lanes)
    kernel = registry().get("attention", LANES=lanes.form, KV=cache.dtype.value, QUERIES=query_heads * query_tokens)
    on_device = attrs.attended_len is None
    offset, stride = view_of(graph, q)
    constants = {
        "WORKGROUP": attention_workgroup(lanes),
        "KV_HEADS": attrs.kv_heads,
        "GROUP": group,
        "HEAD_DIM": attrs.head_dim,
        "QUERY_HEADS": query_heads,
        "SCALE_BITS": float_bits(attrs.scale),
        "Q_OFFSET": offset // 4,
        "Q_STRIDE": stride // 4,
        "CAP_BITS": float_bits(attrs.softcap),
        "HAS_SINKS": int(attrs.sinks),
        "MASKED": int(attrs.masked),
        "OFFSET_ON_DEVICE": int(on_device),
    }
    # What the kernel does not read is bound to q.
    sinks = extra.pop(0) if attrs.sinks else q
    mask = extra.pop(0) if attrs.masked else q
    offset_data = extra.pop(0) if on_device else q
    bindings = (q, cache_k, cache_v, node.id, token_count, sinks, mask, offset_data)
    workgroups = (attrs.heads // query_heads, tokens // query_tokens, 1)
    seen = min(attrs.max_seq_len, attrs.window or attrs.max_seq_len) + tokens
    work = 2 * tokens * attrs.heads * attrs.head_dim * seen
    push: dict[str, int | SymId] = {
        "cache_rows": cache.shape[1],
        "max_seq": attrs.max_seq_len,
        "step_tokens": tokens,
        "window": attrs.window,
        "attended_len": attrs.attended_len or 0,
    }
    return Choice(kernel, bindings, constants, workgroups, push, work)


def _queries(group: int, tokens: int, lanes: Lanes) -> tuple[int, int]:
    """Heads and tokens that a workgroup of attention.comp takes: as many pairs as it can, for they share loads."""
    sizes = _PROMPT_QUERIES if tokens > 1 and lanes.form == "subgroup" else _QUERIES
    heads = [count for count in range(1, group + 1) if group % count == 0]
    each = [count for count in range(1, tokens + 1) if tokens % count == 0]
    found = [(one, other) for one in heads for other in each if one * other in sizes]
    return max(found, key=lambda pair: (pair[0] * pair[1], pair[0]))


def kv_write(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """A layer's K and V rows of this step into its cache."""
    attrs = graph.attrs(node.id, KvWriteAttrs)
    k, v, cache_k, cache_v, token_count, *offset = node.inputs
    constants = {
        "WORKGROUP": WORKGROUP,
        "KV_HEADS": attrs.kv_heads,
        "HEAD_DIM": attrs.head_dim,
        "OFFSET_ON_DEVICE": len(offset),
    }
    for name, part in (("K", k), ("V", v)):
        constants[f"{name}_OFFSET"], constants[f"{name}_STRIDE"] = (value // 4 for value in view_of(graph, part))
    kernel = registry().get("kv_write", KV=graph.node(cache_k).dtype.value)
    bindings = (k, v, cache_k, cache_v, token_count, *(offset or [token_count]))
    workgroups = _over_rows(attrs.kv_heads * attrs.head_dim, graph.node(k).shape[0])
    push = {"cache_rows": graph.node(cache_k).shape[1], "cached_len": attrs.cached_len or 0}
    return Choice(kernel, bindings, constants, workgroups, push)


def kv_move(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """The same rows from the landing rows to their place."""
    attrs = graph.attrs(node.id, KvMoveAttrs)
    cache_k, cache_v, _ = node.inputs
    constants = {
        "WORKGROUP": WORKGROUP,
        "KV_HEADS": attrs.kv_heads,
        "HEAD_DIM": attrs.head_dim,
    }
    kernel = registry().get("kv_move", KV=graph.node(cache_k).dtype.value)
    push: dict[str, int | SymId] = {
        "cache_rows": graph.node(cache_k).shape[1],
        "max_seq": attrs.max_seq_len,
        "cached_len": attrs.cached_len,
        "token_count": attrs.token_count,
    }
    workgroups = _over_rows(attrs.kv_heads * attrs.head_dim, attrs.max_tokens)
    return Choice(kernel, (cache_k, cache_v), constants, workgroups, push)


def _over_rows(columns: int, rows: int) -> tuple[int, int, int]:
    return -(-columns // 4 // WORKGROUP), rows, 1
