"""Fusions around attention: q, k and v in one product, norms of heads, and what attention binds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fusing import spec_of, unchanged_by
from small_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, ROWS, SmallGraph
from tiny_llama import PATHS

from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Lanes
from vkdecode.graph import (
    AttentionAttrs,
    LinearAttrs,
    NodeId,
    NormAttrs,
    Op,
    RopeAttrs,
    RowPick,
    ViewAttrs,
    WeightSpec,
)
from vkdecode.graph.fusion import fuse_norm_residual, fuse_norm_rope, fuse_qk_norm, fuse_qkv
from vkdecode.runtime.kernels import choose_kernel
from vkdecode.weights import DType

Q_SIZE, KV_SIZE = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


@pytest.mark.parametrize("between", ["nothing", "norms", "rotations", "norms and rotations"])
def test_projections_become_one_product(between: str) -> None:
    graph = SmallGraph()
    x = graph.hidden()
    q, k, v = (graph.product(x, name, rows) for name, rows in (("q", Q_SIZE), ("k", KV_SIZE), ("v", KV_SIZE)))
    seen_q, seen_k = q, k
    if "norms" in between:
        norm = graph.vector("norm", HEAD_DIM)
        seen_q, seen_k = graph.rms_norm(q, norm, 1e-5, HEADS), graph.rms_norm(k, norm, 1e-5, KV_HEADS)
    if "rotations" in between:
        seen_q, seen_k = graph.turned(seen_q, HEADS), graph.turned(seen_k, KV_HEADS)
    root = graph.attend(seen_q, seen_k, v)
    write = graph.write_of(root)
    assert fuse_qkv(graph, (root,)) == (root,)
    assert [graph.node(one).op for one in (q, k, v)] == [Op.VIEW] * 3
    assert [graph.node(one).attrs for one in (q, k, v)] == [ViewAttrs(at) for at in (0, Q_SIZE, Q_SIZE + KV_SIZE)]
    (fused,) = {one for view in (q, k, v) for one in graph.node(view).inputs}
    assert graph.node(fused).attrs == LinearAttrs()
    assert graph.node(fused).inputs[0] == x
    assert spec_of(graph, graph.node(fused).inputs[1]) == WeightSpec(
        ("q", "k", "v"), (Q_SIZE, KV_SIZE, KV_SIZE), HIDDEN, DType.F16
    )
    assert graph.node(root).inputs[0] == seen_q
    assert graph.node(write).inputs[:2] == (seen_k, v)
    assert unchanged_by(fuse_qkv, graph, root)


def test_projections_of_different_values_stay_apart() -> None:
    graph = SmallGraph()
    x, y = graph.hidden("x"), graph.hidden("y")
    q, k, v = graph.product(x, "q", Q_SIZE), graph.product(y, "k", KV_SIZE), graph.product(x, "v", KV_SIZE)
    assert unchanged_by(fuse_qkv, graph, graph.attend(q, k, v))
    shared = graph.product(x, "shared", KV_SIZE)
    assert unchanged_by(fuse_qkv, graph, graph.attend(graph.product(x, "q2", Q_SIZE), shared, shared))


def test_rows_of_one_tensor_stay_those_rows_side_by_side() -> None:
    """And a bias's, where only some parts have one."""
    graph = SmallGraph()
    x = graph.hidden()
    picks = [RowPick(0, 8, 24), RowPick(8, 8, 24), RowPick()]
    sizes = (Q_SIZE, KV_SIZE, KV_SIZE)
    q, k, v = (
        graph.linear(
            x,
            graph.weight(WeightSpec(("w",), (size,), HIDDEN, DType.F16, picks=() if pick == RowPick() else (pick,))),
            graph.weight(WeightSpec(("b",), (size,), 1, DType.F32, vector=True, picks=(pick,))) if at == 1 else None,
        )
        for at, (size, pick) in enumerate(zip(sizes, picks, strict=True))
    )
    fuse_qkv(graph, (graph.attend(q, k, v),))
    (fused,) = graph.node(q).inputs
    weight, bias = (spec_of(graph, one) for one in graph.node(fused).inputs[1:])
    assert weight.picks == bias.picks == tuple(picks)
    assert (weight.names, bias.names) == (("w", "w", "w"), (None, "b", None))


def test_a_norm_takes_the_sum_that_follows_it() -> None:
    graph = SmallGraph()
    x, y = graph.hidden("x"), graph.hidden("y")
    norm = graph.norm(y)
    root = graph.add(x, norm)
    assert fuse_norm_residual(graph, (root,)) == (root,)
    assert (graph.node(root).op, graph.node(root).inputs) == (Op.RMS_NORM, (*graph.node(norm).inputs, x))
    assert graph.attrs(root, NormAttrs) == NormAttrs(1e-5, residual=True)
    other = SmallGraph()
    norm = other.norm(other.hidden("y"))
    assert unchanged_by(fuse_norm_residual, other, other.add(norm, norm))
    assert unchanged_by(fuse_norm_residual, other, other.add(other.hidden("x"), norm), other.silu(norm))


def normed_heads(graph: SmallGraph, bias: bool = False, epsilon: float = 1e-5) -> tuple[NodeId, dict[str, NodeId]]:
    """Attention over one product's q and k, whose heads are normalized and turned, and its v."""
    x = graph.hidden()
    made = {name: graph.product(x, name, rows) for name, rows in (("q", Q_SIZE), ("k", KV_SIZE), ("v", KV_SIZE))}
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        weight = graph.vector(f"{name} norm", HEAD_DIM)
        if bias:
            norm = graph.layer_norm(made[name], weight, graph.vector(f"{name} shift", HEAD_DIM), 1e-5, heads)
        else:
            norm = graph.rms_norm(made[name], weight, epsilon if name == "k" else 1e-5, heads)
        made[f"normed {name}"] = norm
        made[f"turned {name}"] = graph.turned(norm, heads)
    root = graph.attend(made["turned q"], made["turned k"], made["v"])
    fuse_qkv(graph, (root,))
    return root, made


def test_heads_are_turned_by_their_norm() -> None:
    graph = SmallGraph()
    root, made = normed_heads(graph)
    assert fuse_norm_rope(graph, (root,)) == (root,)
    node = graph.node(made["turned k"])
    assert (node.op, node.inputs[:1], node.inputs[2:]) == (Op.RMS_NORM, (made["k"],), graph.angles())
    rope = RopeAttrs(KV_HEADS, HEAD_DIM, HEAD_DIM)
    assert node.attrs == NormAttrs(1e-5, KV_HEADS, KV_HEADS, rope=rope)
    other = SmallGraph()
    root, made = normed_heads(other)
    also = other.silu(made["normed q"])
    fuse_norm_rope(other, (root, also))
    assert other.node(made["turned q"]).op is Op.ROPE


def test_heads_of_q_and_k_side_by_side_take_one_norm() -> None:
    graph = SmallGraph()
    root, made = normed_heads(graph)
    fuse_norm_rope(graph, (root,))
    assert fuse_qk_norm(graph, (root,)) == (root,)
    views = [graph.node(made[name]) for name in ("turned q", "turned k")]
    assert [node.attrs for node in views] == [ViewAttrs(0), ViewAttrs(Q_SIZE)]
    (fused,) = {one for node in views for one in node.inputs}
    node = graph.node(fused)
    assert node.shape == (1, Q_SIZE + KV_SIZE)
    assert graph.attrs(fused, NormAttrs).groups == HEADS + KV_HEADS
    assert graph.attrs(fused, NormAttrs).first_groups == HEADS
    assert graph.node(node.inputs[0]).attrs == ViewAttrs(0)
    assert graph.node(node.inputs[0]).inputs == graph.node(made["q"]).inputs
    weight = WeightSpec(("q norm", "k norm"), (HEAD_DIM, HEAD_DIM), 1, DType.F32, vector=True)
    assert spec_of(graph, node.inputs[1]) == weight
    assert unchanged_by(fuse_qk_norm, graph, root)


@pytest.mark.parametrize("unlike", ["epsilon", "bias", "apart"])
def test_heads_of_q_and_k_keep_norms_that_differ(unlike: str) -> None:
    graph = SmallGraph()
    root, made = normed_heads(graph, bias=unlike == "bias", epsilon=1e-6 if unlike == "epsilon" else 1e-5)
    if unlike == "apart":
        graph.rewrite(made["k"], Op.VIEW, graph.node(made["k"]).inputs, ViewAttrs(Q_SIZE + KV_SIZE))
    fuse_norm_rope(graph, (root,))
    assert unchanged_by(fuse_qk_norm, graph, root)


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_attention_binds_sinks_mask_and_offset_under_their_names(kv_offset: str, arm: str) -> None:
    graph = SmallGraph()
    x = graph.hidden()
    q, k, v = (graph.product(x, name, rows) for name, rows in (("q", Q_SIZE), ("k", KV_SIZE), ("v", KV_SIZE)))
    for sinks in (None, graph.vector("sinks", HEADS)):
        attention = graph.attend(q, k, v, kv_offset, arm, sinks)
        choice = choose_kernel(graph, attention, Lanes("subgroup", 8, 8, 8, 4, 16, 8))
        bound = {one.name: node for one, node in zip(choice.kernel.bindings, choice.bindings, strict=True)}
        caches = graph.caches()
        assert [bound[name] for name in ("q", "cache_k", "cache_v", "y")] == [q, *caches, attention]
        assert bound["token_count"] == graph.token_count()
        for name, there, node in (
            ("HAS_SINKS", sinks is not None, sinks),
            ("MASKED", arm == "masked", graph.find_data("mask") if arm == "masked" else None),
            ("OFFSET_ON_DEVICE", kv_offset == "device", graph.offset(kv_offset)),
        ):
            assert choice.spec[name] == there
            # What is not there is bound to something that is.
            binding = {"HAS_SINKS": "sinks", "MASKED": "mask", "OFFSET_ON_DEVICE": "offset"}[name]
            assert bound[binding] == (node if there else q)


def test_attention_takes_sinks_and_a_mask_where_its_attributes_say_so() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    plain = graph.attend(x, x, x)
    attrs, written = graph.attrs(plain, AttentionAttrs), graph.write_of(plain)
    extra = {"sinks": graph.vector("sinks", HEADS), "mask": graph.data("mask", (ROWS,))}
    for name, node in extra.items():
        with pytest.raises(InvalidInputError, match="sinks and a mask exactly where"):
            graph.attention(x, graph.caches(), written, graph.token_count(), attrs, **{name: node})
    with pytest.raises(InvalidInputError, match="sinks and a mask exactly where"):
        graph.attention(x, graph.caches(), written, graph.token_count(), replace(attrs, masked=True))
