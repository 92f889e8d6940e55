"""Each fusion alone: it fuses its pattern under the same ids, and keeps its hands off what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fusing import spec_of, unchanged_by
from small_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, SmallGraph

from vkdecode.graph import (
    AttentionAttrs,
    LinearAttrs,
    NodeId,
    Op,
    RopeAttrs,
    ViewAttrs,
    WeightSpec,
)
from vkdecode.graph.fusion import (
    FUSIONS,
    fuse_gated_mlp,
    fuse_kv_write,
    fuse_norm,
    fuse_qkv_rope,
    fuse_residual,
)
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


# Query, key, value


def attention_of(graph: SmallGraph, x: NodeId, bias: str = "") -> dict[str, NodeId]:
    """Projections, rotations and attention; `bias` names the projections that have one."""
    sizes = {"q": Q_SIZE, "k": KV_SIZE, "v": KV_SIZE}
    made = {name: graph.product(x, name, rows, bias=name in bias) for name, rows in sizes.items()}
    made["turned_q"] = graph.turned(made["q"], HEADS)
    made["turned_k"] = graph.turned(made["k"], KV_HEADS)
    made["attention"] = graph.attend(made["turned_q"], made["turned_k"], made["v"])
    return made


def test_projections_and_rotations_become_one_product_with_three_views() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    made = attention_of(graph, x)
    shapes = {name: graph.node(node).shape for name, node in made.items()}
    assert fuse_qkv_rope(graph, (made["attention"],)) == (made["attention"],)
    views = [graph.node(made[name]) for name in ("turned_q", "turned_k", "v")]
    assert [node.op for node in views] == [Op.VIEW] * 3
    assert [node.attrs for node in views] == [ViewAttrs(at) for at in (0, Q_SIZE, Q_SIZE + KV_SIZE)]
    assert [node.shape for node in views] == [shapes["turned_q"], shapes["turned_k"], shapes["v"]]
    (fused,) = {one for node in views for one in node.inputs}
    node = graph.node(fused)
    assert node.shape == (1, Q_SIZE + 2 * KV_SIZE)
    assert node.attrs == LinearAttrs(
        epilogue="rope", rope=RopeAttrs(HEADS + 2 * KV_HEADS, HEADS + KV_HEADS, HEAD_DIM, HEAD_DIM)
    )
    assert node.inputs[0] == x
    assert node.inputs[2:] == graph.angles()
    assert spec_of(graph, node.inputs[1]) == WeightSpec(
        ("q", "k", "v"), (Q_SIZE, KV_SIZE, KV_SIZE), HIDDEN, DType.F16, order="rope", head_dim=8, rotary_dim=8
    )
    assert graph.node(made["attention"]).inputs[:3] == (made["turned_q"], made["turned_k"], made["v"])


@pytest.mark.parametrize("bias", ["q", "v", "qk", "qkv"])
def test_biases_of_projections_are_stacked_with_zeros_for_missing_ones(bias: str) -> None:
    graph = SmallGraph()
    made = attention_of(graph, graph.hidden(), bias)
    fuse_qkv_rope(graph, (made["attention"],))
    (fused,) = graph.node(made["v"]).inputs
    assert graph.attrs(fused, LinearAttrs).bias
    stacked = spec_of(graph, graph.node(fused).inputs[2])
    assert stacked.names == tuple(f"{name}.bias" if name in bias else None for name in "qkv")
    assert (stacked.order, stacked.vector, stacked.dtype) == ("rope", True, DType.F32)
    assert graph.node(fused).inputs[3:] == graph.angles()


def test_a_partial_rotation_is_kept_partial() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    q, k = (graph.product(x, name, rows) for name, rows in (("q", Q_SIZE), ("k", KV_SIZE)))
    v = graph.product(x, "v", KV_SIZE)
    root = graph.attend(graph.turned(q, HEADS, 4), graph.turned(k, KV_HEADS, 4), v)
    fuse_qkv_rope(graph, (root,))
    (fused,) = graph.node(v).inputs
    rope = graph.attrs(fused, LinearAttrs).rope
    assert rope is not None and rope.rotary_dim == 4
    assert spec_of(graph, graph.node(fused).inputs[1]).rotary_dim == 4


def test_values_that_others_use_too_stay_usable_as_views() -> None:
    graph = SmallGraph()
    made = attention_of(graph, graph.hidden())
    also = graph.silu(made["v"])
    fuse_qkv_rope(graph, (made["attention"], also))
    assert graph.node(also).inputs == (made["v"],)
    assert graph.node(made["v"]).op is Op.VIEW


@pytest.mark.parametrize("inner", ["q", "k"])
def test_projections_stay_where_the_unturned_value_has_another_user(inner: str) -> None:
    graph = SmallGraph()
    made = attention_of(graph, graph.hidden())
    assert unchanged_by(fuse_qkv_rope, graph, made["attention"], graph.silu(made[inner]))


def test_projections_stay_where_they_do_not_belong_together() -> None:
    graph = SmallGraph()
    x, y = graph.hidden("x"), graph.hidden("y")

    def build(
        number: int, of_k: NodeId = x, dtype: DType = DType.F16, turn_k: Callable[[NodeId], NodeId] | None = None
    ) -> NodeId:
        q = graph.turned(graph.product(x, f"q{number}", Q_SIZE), HEADS)
        k = graph.product(of_k, f"k{number}", KV_SIZE, dtype)
        turned = turn_k(k) if turn_k else graph.turned(k, KV_HEADS)
        return graph.attend(q, turned, graph.product(x, f"v{number}", KV_SIZE))

    other_cos = graph.data("other_cos", (1, HEAD_DIM // 2))
    roots = (
        build(0, of_k=y),
        build(1, dtype=DType.F32),
        build(2, turn_k=lambda k: k),
        build(3, turn_k=lambda k: graph.turned(k, KV_HEADS, 4)),
        build(4, turn_k=lambda k: graph.rope(k, other_cos, graph.angles()[1], KV_HEADS, HEAD_DIM, HEAD_DIM)),
    )
    assert unchanged_by(fuse_qkv_rope, graph, *roots)


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


# KV write


def written(kv_offset: str, arm: str) -> tuple[SmallGraph, NodeId, tuple[NodeId, NodeId]]:
    graph = SmallGraph()
    x = graph.hidden()
    q, k, v = (graph.product(x, name, rows) for name, rows in (("q", Q_SIZE), ("k", KV_SIZE), ("v", KV_SIZE)))
    attention = graph.attend(q, k, v, kv_offset, arm)
    return graph, attention, (graph.write(k, 0, attention, kv_offset), graph.write(v, 1, attention, kv_offset))


@pytest.mark.parametrize("arm", ["bounded", "masked"])
def test_on_the_device_offset_path_attention_writes_the_rows_itself(arm: str) -> None:
    graph, attention, writes = written("device", arm)
    root = graph.product(attention, "o")
    inputs = graph.node(attention).inputs
    assert fuse_kv_write(graph, (root, *writes)) == (root, attention)
    assert graph.attrs(attention, AttentionAttrs).writes
    offset = graph.find_data("offset")
    assert graph.node(attention).inputs == ((*inputs, offset) if arm == "masked" else inputs)
    assert graph.node(attention).inputs[-1] == offset
    assert not any(graph.node(one).op is Op.KV_WRITE for one in graph.reachable((root, attention)))


@pytest.mark.parametrize("arm", ["bounded", "masked"])
def test_on_the_symenv_path_the_writes_stay_apart(arm: str) -> None:
    graph, attention, writes = written("symenv", arm)
    assert unchanged_by(fuse_kv_write, graph, graph.product(attention, "o"), *writes)


def test_writes_stay_where_they_are_not_just_this_attentions_rows() -> None:
    graph, attention, writes = written("device", "bounded")
    root = graph.product(attention, "o")
    key, value = (graph.node(one).inputs[0] for one in writes)
    assert unchanged_by(fuse_kv_write, graph, root)
    assert unchanged_by(fuse_kv_write, graph, root, writes[0])
    assert unchanged_by(fuse_kv_write, graph, root, writes[0], graph.write(key, 1, attention))
    assert unchanged_by(fuse_kv_write, graph, root, *writes, graph.write(value, 0, attention))
    swapped = graph.write(value, 0, attention), graph.write(key, 1, attention)
    assert unchanged_by(fuse_kv_write, graph, root, *swapped)


def test_a_write_that_something_reads_stays() -> None:
    graph, attention, writes = written("device", "bounded")
    reader = graph.add_node(Op.SILU, [writes[0]], graph.node(writes[0]).shape)
    assert unchanged_by(fuse_kv_write, graph, graph.product(attention, "o"), *writes, reader)


# All together


def test_the_passes_run_in_an_order_that_fuses_a_whole_layer() -> None:
    graph = SmallGraph()
    x = graph.hidden()
    made = attention_of(graph, graph.norm(x, "norm1"))
    writes = graph.write(made["turned_k"], 0, made["attention"]), graph.write(made["v"], 1, made["attention"])
    x = graph.add(x, graph.product(made["attention"], "o"))
    h = graph.norm(x, "norm2")
    mlp = gated(graph, graph.product(h, "gate", 24), graph.product(h, "up", 24))
    roots: tuple[NodeId, ...] = (graph.add(x, graph.product(mlp, "down")), *writes)
    for fuse in FUSIONS:
        roots = fuse(graph, roots)
    counted = [graph.node(one) for one in graph.reachable(roots)]
    assert sorted(node.op.value for node in counted if node.inputs and node.op is not Op.VIEW) == sorted(
        ["silu", "attention", *["linear"] * 4]
    )
    epilogues = [graph.attrs(node.id, LinearAttrs) for node in counted if node.op is Op.LINEAR]
    assert sorted((one.epilogue, one.norm_epsilon is not None, one.residual) for one in epilogues) == [
        ("gated", True, False),
        ("plain", False, True),
        ("plain", False, True),
        ("rope", True, False),
    ]
