"""Fusions of routed experts: gates with their products, sums with what is added to them, and norms before them."""

from __future__ import annotations

import pytest
from fusing import spec_of, unchanged_by
from small_graphs import HIDDEN, SmallGraph

from vkdecode.errors import InvalidInputError
from vkdecode.graph import ExpertSumAttrs, LinearAttrs, NodeId, Op, RowPick, WeightSpec
from vkdecode.graph.fusion import fuse_gated_mlp, fuse_norm, fuse_residual
from vkdecode.weights import DType

EXPERTS, USED, ROWS = 3, 2, 24


class Routed(SmallGraph):
    def route_of(self, x: NodeId, name: str = "router") -> NodeId:
        return self.route(self.product(x, name, EXPERTS), self.token_count(), USED, True)

    def stack(self, name: str, rows: int = ROWS, columns: int = HIDDEN, dtype: DType = DType.F16) -> NodeId:
        names = tuple(f"{name}{expert}" for expert in range(EXPERTS))
        return self.weight(WeightSpec(names, (rows,) * EXPERTS, columns, dtype, experts=EXPERTS))

    def biases(self, name: str, pick: RowPick) -> NodeId:
        size = EXPERTS * ROWS
        return self.weight(WeightSpec((name,), (size,), 1, DType.F32, vector=True, picks=(pick,), experts=EXPERTS))


def test_gates_and_products_of_experts_become_one_stack() -> None:
    graph = Routed()
    x = graph.hidden()
    route = graph.route_of(x)
    gate, up = (graph.expert_linear(x, graph.stack(name), route) for name in ("gate", "up"))
    root = graph.mul(graph.silu(gate), up)
    assert fuse_gated_mlp(graph, (root,)) == (root,)
    node = graph.node(root)
    assert (node.op, node.shape, node.inputs[0], node.inputs[-1]) == (Op.LINEAR, (1, USED * ROWS), x, route)
    assert node.attrs == LinearAttrs(epilogue="gated", activation=Op.SILU, experts_used=USED)
    names = ("gate0", "gate1", "gate2", "up0", "up1", "up2")
    parts = (ROWS,) * (2 * EXPERTS)
    assert spec_of(graph, node.inputs[1]) == WeightSpec(names, parts, HIDDEN, DType.F16, "gated", experts=EXPERTS)


def test_the_clamped_gate_takes_biases_along() -> None:
    graph = Routed()
    x = graph.hidden()
    route = graph.route_of(x)
    picks = [RowPick(start, 1, 2) for start in (0, 1)]
    parts = []
    for pick in picks:
        weight = WeightSpec(
            ("both",), (EXPERTS * ROWS,), HIDDEN, DType.F32, picks=(pick,), transposed=True, experts=EXPERTS
        )
        parts.append(graph.expert_linear(x, graph.weight(weight), route, graph.biases("bias", pick)))
    root = graph.clamped_swiglu(parts[0], parts[1])
    fuse_gated_mlp(graph, (root,))
    node = graph.node(root)
    assert node.attrs == LinearAttrs(True, epilogue="gated", activation=Op.CLAMPED_SWIGLU, experts_used=USED)
    weight, bias = (spec_of(graph, one) for one in node.inputs[1:3])
    assert (weight.names, weight.picks, weight.transposed, weight.experts) == (
        ("both",) * 2,
        tuple(picks),
        True,
        EXPERTS,
    )
    assert (bias.names, bias.picks, bias.transposed, bias.experts) == (("bias",) * 2, tuple(picks), False, EXPERTS)
    assert (bias.order, bias.vector, node.inputs[3]) == ("gated", True, route)


def test_products_of_experts_stay_where_they_do_not_belong_together() -> None:
    graph = Routed()
    x = graph.hidden()
    route = graph.route_of(x)
    gate = graph.expert_linear(x, graph.stack("gate"), route)
    others = [
        graph.expert_linear(x, graph.stack("up"), graph.route_of(x, "another")),
        graph.expert_linear(x, graph.stack("up", dtype=DType.Q8_0), route),
        graph.product(x, "up", USED * ROWS),
    ]
    for up in others:
        assert unchanged_by(fuse_gated_mlp, graph, graph.mul(graph.silu(gate), up))


def test_a_sum_of_experts_starts_from_what_is_added_to_it() -> None:
    graph = Routed()
    x = graph.hidden()
    route = graph.route_of(x)
    out = graph.expert_linear(x, graph.stack("down", HIDDEN), route)
    gated = graph.product(x, "shared", HIDDEN), graph.product(x, "gate", 1)
    root = graph.add(x, graph.expert_sum(out, route, *gated))
    fuse_residual(graph, (root,))
    assert graph.node(root).inputs == (out, route, *gated, x)
    assert graph.node(root).attrs == ExpertSumAttrs(USED, shared=True, residual=True)
    again = graph.add(graph.hidden("other"), root)
    assert unchanged_by(fuse_residual, graph, again)  # it has what it starts from


def test_a_product_of_experts_does_not_start_from_a_residual() -> None:
    graph = Routed()
    x = graph.hidden()
    out = graph.expert_linear(x, graph.stack("down", HIDDEN), graph.route_of(x))
    assert unchanged_by(fuse_residual, graph, graph.add(graph.hidden("other", USED * HIDDEN), out))


def test_a_norm_goes_into_products_of_experts_but_not_where_each_has_its_own() -> None:
    graph = Routed()
    x = graph.hidden()
    h = graph.norm(x)
    route = graph.route_of(h)
    root = graph.expert_linear(h, graph.stack("up"), route)
    fuse_norm(graph, (root,))
    norm = graph.vector("norm", HIDDEN)
    assert graph.node(root).inputs == (x, graph.stack("up"), norm, route)
    assert graph.attrs(root, LinearAttrs).experts_used == USED
    wide = graph.norm(graph.hidden("wide", USED * HIDDEN), "wide.norm")
    assert unchanged_by(fuse_norm, graph, graph.expert_linear(wide, graph.stack("down"), graph.route_of(x, "another")))


def test_what_does_not_fit_together_is_refused() -> None:
    graph = Routed()
    x = graph.hidden()
    route = graph.route_of(x)
    with pytest.raises(InvalidInputError, match="4 of 3 experts"):
        graph.route(graph.product(x, "router", EXPERTS), graph.token_count(), EXPERTS + 1, True)
    with pytest.raises(InvalidInputError, match="16 features of 2 experts meet 20 columns"):
        graph.expert_linear(x, graph.stack("up", columns=20), route)
    with pytest.raises(InvalidInputError, match="needs its gate"):
        graph.expert_sum(graph.expert_linear(x, graph.stack("down", HIDDEN), route), route, shared=x)
