"""Splitting a weight by rows, on graphs without a device: parts cover the rows once, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkdecode.errors import DeviceError
from vkdecode.graph import Graph, LinearAttrs, NodeId, Op, WeightSpec, optimize_graph
from vkdecode.weights import DType


def split(graph: Graph, root: NodeId, most: int) -> list[WeightSpec]:
    """The weight parts that the root's products use after splitting, in order of their rows."""
    roots = optimize_graph(graph, (root,), "here", fusions=(), max_units=lambda _: most).roots
    nodes = [graph.node(one) for one in graph.reachable(roots) if graph.node(one).op is Op.WEIGHT]
    specs = [graph.attrs(node.id, WeightSpec) for node in nodes]
    return sorted((one for one in specs if not one.vector), key=lambda one: one.first_unit)


@given(rows=st.integers(1, 200), most=st.integers(1, 100))
def test_parts_cover_every_row_once(rows: int, most: int) -> None:
    graph = Graph()
    x = graph.data("x", (1, 8))
    root = graph.linear(x, graph.weight(WeightSpec(("w",), (rows,), 8, DType.F16)))
    parts = split(graph, root, most)
    covered = [row for one in parts for row in range(one.first_unit, one.first_unit + one.units)]
    assert covered == list(range(rows))
    assert all(one.units <= most for one in parts)
    assert (graph.node(root).op is Op.LINEAR) == (rows <= most)
    assert graph.node(root).shape == (1, rows)


@given(pairs=st.integers(1, 150), most=st.integers(1, 100))
def test_parts_of_a_gate_keep_each_with_its_product(pairs: int, most: int) -> None:
    graph = Graph()
    x = graph.data("x", (1, 8))
    spec = WeightSpec(("gate", "up"), (pairs, pairs), 8, DType.F16, order="gated")
    attrs = LinearAttrs(epilogue="gated", activation=Op.SILU)
    root = graph.add_node(Op.LINEAR, [x, graph.weight(spec)], (1, pairs), attrs)
    parts = split(graph, root, most)
    assert [unit for one in parts for unit in range(one.first_unit, one.first_unit + one.units)] == list(range(pairs))
    products = [graph.node(one) for one in graph.reachable([root]) if graph.node(one).op is Op.LINEAR]
    assert [node.shape[1] for node in products] == [one.units for one in parts]
    assert {node.attrs for node in products} == {attrs}
    assert graph.node(root).shape == (1, pairs)


def test_a_stack_of_experts_is_not_split() -> None:
    """A token's experts may lie anywhere in it."""
    graph = Graph()
    x = graph.data("x", (1, 8))
    route = graph.route(graph.data("logits", (1, 3)), graph.data("token_count", (1,), DType.U32), 2, True)
    names = ("a", "b", "c")
    weight = graph.weight(WeightSpec(names, (30, 30, 30), 8, DType.F16, experts=3))
    root = graph.expert_linear(x, weight, route)
    before = graph.generation
    split(graph, root, 10)
    assert graph.generation == before


def test_not_even_one_row_is_refused() -> None:
    graph = Graph()
    root = graph.linear(graph.data("x", (1, 8)), graph.weight(WeightSpec(("w",), (30,), 8, DType.F32)))
    with pytest.raises(DeviceError, match="not even one block of rows of w fits"):
        split(graph, root, 0)


def test_a_residual_is_added_once_after_joining() -> None:
    graph = Graph()
    x, residual = graph.data("x", (1, 8)), graph.data("r", (1, 30))
    weight = graph.weight(WeightSpec(("w",), (30,), 8, DType.F32))
    bias = graph.weight(WeightSpec(("b",), (30,), 1, DType.F32, vector=True))
    root = graph.add_node(Op.LINEAR, [x, weight, bias, residual], (1, 30), LinearAttrs(bias=True, residual=True))
    split(graph, root, 10)
    assert graph.node(root).op is Op.ADD
    products = [one for one in graph.reachable([root]) if graph.node(one).op is Op.LINEAR]
    assert all(graph.attrs(one, LinearAttrs) == LinearAttrs(bias=True) for one in products)
    biases = [graph.attrs(graph.node(one).inputs[2], WeightSpec) for one in products]
    assert sorted((one.first_unit, one.unit_count) for one in biases) == [(0, 10), (10, 10), (20, 10)]


def test_an_embedding_passes_on_the_rows_of_other_parts() -> None:
    graph = Graph()
    ids = graph.data("token_ids", (3,), DType.U32)
    root = graph.embed(ids, graph.weight(WeightSpec(("e",), (25,), 8, DType.F16)))
    assert len(split(graph, root, 10)) == 3
    chain = [one for one in graph.reachable([root]) if graph.node(one).op is Op.EMBED]
    assert [len(graph.node(one).inputs) for one in chain] == [2, 3, 3]
    assert chain[-1] == root
    assert all(graph.node(after).inputs[2] == before for before, after in pairwise(chain))


def test_what_fits_is_left_alone() -> None:
    graph = Graph()
    x = graph.data("x", (1, 8))
    root = graph.linear(x, graph.weight(WeightSpec(("w",), (30,), 8, DType.F32)))
    before = graph.generation
    split(graph, root, 30)
    assert graph.generation == before
