"""Each fusion alone: it fuses its pattern under the same ids, and keeps its hands off what only looks like it."""

from __future__ import annotations

import pytest
from fusing import spec_of, unchanged_by
from small_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, SmallGraph
from tiny_llama import PATHS

from vkdecode.graph import FUSIONS, LinearAttrs, NodeId, Op, WeightSpec
from vkdecode.graph.fusion import fuse_gated_mlp, fuse_norm, fuse_residual
from vkdecode.weights import DType

Q_SIZE, KV_SIZE = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


# Gated MLP


def gated(graph: SmallGraph, gate: NodeId, up: NodeId) -> NodeId:
    return graph.mul(graph.silu(gate), up)


def test_gate_and_up_become_one_product() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    root = gated(graph, graph.product(x, "gate", 24), graph.product(x, "up", 24))
    assert fuse_gated_mlp(graph, (root,)) == (root,)
    node = graph.node(root)
    assert (node.op, node.shape) == (Op.LINEAR, (1, 24))
    assert node.attrs == LinearAttrs(epilogue="gated", activation=Op.SILU)
    assert node.inputs[0] == x
    assert spec_of(graph, node.inputs[1]) == WeightSpec(("gate", "up"), (24, 24), HIDDEN, DType.F16, order="gated")


def test_biases_of_gate_and_up_are_stacked_in_the_same_order() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    root = gated(graph, graph.product(x, "gate", 24, bias=True), graph.product(x, "up", 24, bias=True))
    fuse_gated_mlp(graph, (root,))
    node = graph.node(root)
    assert node.attrs == LinearAttrs(bias=True, epilogue="gated", activation=Op.SILU)
    assert spec_of(graph, node.inputs[2]) == WeightSpec(
        ("gate.bias", "up.bias"), (24, 24), 1, DType.F32, order="gated", vector=True
    )


@pytest.mark.parametrize(("gate_bias", "missing"), [(True, 1), (False, 0)])
def test_a_bias_on_one_side_only_stands_beside_zeros(gate_bias: bool, missing: int) -> None:
    graph = SmallGraph()
    x = graph.hidden()
    gate = graph.product(x, "gate", 24, bias=gate_bias)
    root = gated(graph, gate, graph.product(x, "up", 24, bias=not gate_bias))
    fuse_gated_mlp(graph, (root,))
    assert graph.node(root).attrs == LinearAttrs(bias=True, epilogue="gated", activation=Op.SILU)
    names = spec_of(graph, graph.node(root).inputs[2]).names
    assert names[missing] is None
    assert names[1 - missing] == ("gate.bias", "up.bias")[1 - missing]


@pytest.mark.parametrize("inner", ["gate", "up", "silu"])
def test_a_gated_mlp_stays_where_an_inner_value_has_another_user(inner: str) -> None:
    graph = SmallGraph()
    x = graph.hidden()
    parts = {"gate": graph.product(x, "gate", 24), "up": graph.product(x, "up", 24)}
    parts["silu"] = graph.silu(parts["gate"])
    root = graph.mul(parts["silu"], parts["up"])
    assert unchanged_by(fuse_gated_mlp, graph, root, graph.silu(parts[inner]))
    assert unchanged_by(fuse_gated_mlp, graph, root, parts[inner])


def test_a_gated_mlp_stays_where_the_parts_do_not_belong_together() -> None:
    graph = SmallGraph()
    x, y = graph.hidden("x"), graph.hidden("y")
    roots = (
        gated(graph, graph.product(x, "a", 24), graph.product(y, "b", 24)),
        gated(graph, graph.product(x, "c", 24), graph.product(x, "d", 24, DType.F32)),
        gated(graph, graph.hidden("z", 24), graph.product(x, "e", 24)),
        graph.mul(graph.product(x, "f", 24), graph.product(x, "g", 24)),
    )
    assert unchanged_by(fuse_gated_mlp, graph, *roots)


def test_a_weight_that_is_already_stacked_is_not_stacked_again() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    stacked = graph.weight(WeightSpec(("a", "b"), (12, 12), HIDDEN, DType.F16, order="gated"))
    assert unchanged_by(fuse_gated_mlp, graph, gated(graph, graph.linear(x, stacked), graph.product(x, "up", 24)))


def test_a_fused_product_is_not_fused_again() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    root = gated(graph, graph.product(x, "gate", 24), graph.product(x, "up", 24))
    fuse_gated_mlp(graph, (root,))
    assert unchanged_by(fuse_gated_mlp, graph, root)


# Residual


@pytest.mark.parametrize("product_first", [True, False])
def test_a_sum_becomes_the_start_of_its_product(product_first: bool) -> None:
    graph = SmallGraph()
    x, y = graph.hidden("x"), graph.hidden("y")
    product = graph.product(y, "o", bias=True)
    root = graph.add(product, x) if product_first else graph.add(x, product)
    assert fuse_residual(graph, (root,)) == (root,)
    node = graph.node(root)
    assert node.inputs == (*graph.node(product).inputs, x)
    assert node.attrs == LinearAttrs(bias=True, residual=True)


def test_of_two_products_the_second_takes_the_first_as_its_start() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    first, second = graph.product(x, "first"), graph.product(x, "second")
    root = graph.add(first, second)
    fuse_residual(graph, (root,))
    assert graph.node(root).inputs == (*graph.node(second).inputs, first)
    assert graph.node(first).attrs == LinearAttrs()


def test_sums_in_a_row_fuse_each_with_its_own_product() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    first = graph.add(x, graph.product(x, "o"))
    root = graph.add(graph.product(first, "down"), first)
    fuse_residual(graph, (root,))
    assert graph.node(first).attrs == graph.node(root).attrs == LinearAttrs(residual=True)
    assert graph.node(root).inputs[0] == graph.node(root).inputs[-1] == first


def test_a_sum_stays_where_its_product_has_another_user_or_an_epilogue() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    used = graph.product(x, "used")
    doubled = graph.product(x, "doubled")
    ended = graph.product(x, "ended")
    graph.rewrite(ended, Op.LINEAR, graph.node(ended).inputs, LinearAttrs(epilogue="gated", activation=Op.SILU))
    roots = (
        graph.add(x, used),
        graph.silu(used),
        graph.add(doubled, doubled),
        graph.add(x, ended),
        graph.add(x, graph.silu(x)),
    )
    assert unchanged_by(fuse_residual, graph, *roots)


# Norm


def test_a_norm_goes_into_each_product_that_reads_it() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    normed = graph.norm(x)
    plain, biased = graph.product(normed, "a"), graph.product(normed, "b", bias=True)
    residual = graph.add(x, graph.product(normed, "c"))
    (residual,) = fuse_residual(graph, (residual,))
    inputs = {one: graph.node(one).inputs for one in (plain, biased, residual)}
    roots = (plain, biased, residual)
    assert fuse_norm(graph, roots) == roots
    norm_weight = graph.vector("norm", HIDDEN)
    assert graph.node(plain).inputs == (x, inputs[plain][1], norm_weight)
    assert graph.node(biased).inputs == (x, *inputs[biased][1:], norm_weight)
    assert graph.node(residual).inputs == (x, inputs[residual][1], norm_weight, x)
    assert all(graph.attrs(one, LinearAttrs).norm_epsilon == 1e-5 for one in roots)
    assert graph.attrs(biased, LinearAttrs).bias
    assert graph.attrs(residual, LinearAttrs).residual
    assert normed not in graph.reachable(roots)


def test_a_norm_stays_where_anything_but_the_left_side_of_a_product_reads_it() -> None:
    graph = SmallGraph()
    first, second, third = (graph.norm(graph.hidden(name), name) for name in ("x", "y", "z"))
    both = graph.add(third, graph.product(third, "c"))
    fuse_residual(graph, (both,))
    assert graph.node(both).inputs[0] == graph.node(both).inputs[-1] == third
    roots = (graph.product(first, "a"), first, graph.product(second, "b"), graph.silu(second), both)
    assert unchanged_by(fuse_norm, graph, *roots)


def test_a_norm_of_heads_is_not_a_products_norm() -> None:
    graph = SmallGraph()
    heads = graph.rms_norm(graph.hidden(), graph.vector("norm", HIDDEN // 2), 1e-5, 2)
    assert unchanged_by(fuse_norm, graph, graph.product(heads, "w"))


def test_a_product_takes_one_norm_only() -> None:
    graph = SmallGraph()
    inner = graph.norm(graph.hidden(), "inner")
    root = graph.product(graph.norm(inner, "outer"), "a")
    fuse_norm(graph, (root,))
    assert graph.node(root).inputs[0] == inner
    assert unchanged_by(fuse_norm, graph, root)


# All together


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_the_passes_run_in_an_order_that_fuses_a_whole_layer(kv_offset: str, arm: str) -> None:
    graph = SmallGraph()
    x = graph.hidden()
    h = graph.norm(x, "norm1")
    q, k, v = (graph.product(h, name, rows) for name, rows in (("q", Q_SIZE), ("k", KV_SIZE), ("v", KV_SIZE)))
    attention = graph.attend(graph.turned(q, HEADS), graph.turned(k, KV_HEADS), v, kv_offset, arm)
    x = graph.add(x, graph.product(attention, "o"))
    h = graph.norm(x, "norm2")
    mlp = gated(graph, graph.product(h, "gate", 24), graph.product(h, "up", 24))
    roots: tuple[NodeId, ...] = (graph.add(x, graph.product(mlp, "down")),)
    for fuse in FUSIONS:
        roots = fuse(graph, roots)
    counted = [graph.node(one) for one in graph.reachable(roots)]
    assert sorted(node.op.value for node in counted if node.inputs) == sorted(["silu", "attention", *["linear"] * 4])
    epilogues = [graph.attrs(node.id, LinearAttrs) for node in counted if node.op is Op.LINEAR]
    assert sorted((one.epilogue, one.norm_epsilon is not None, one.residual) for one in epilogues) == [
        ("gated", True, False),
        ("plain", False, True),
        ("plain", False, True),
        ("rope", True, False),
    ]
