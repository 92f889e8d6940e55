"""Splitting a weight by rows, on graphs without a device: parts cover the rows once, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkdecode.errors import DeviceError
from vkdecode.graph import Graph, LinearAttrs, NodeId, Op, RopeAttrs, WeightSpec, optimize_graph
from vkdecode.weights import DType


def split(graph: Graph, root: NodeId, most: int) -> list[WeightSpec]:
    """The weight parts that the root's products use after splitting, in order of their rows."""
    roots = optimize_graph(graph, (root,), "here", fusions=(), most_units=lambda _: most).roots
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


@given(q=st.integers(1, 6), kv=st.integers(1, 3), half=st.sampled_from([2, 5, 32]), most=st.integers(1, 150))
def test_rotary_parts_keep_heads_whole_and_turn_the_same_ones(q: int, kv: int, half: int, most: int) -> None:
    heads = q + 2 * kv
    part_rows = tuple(count * 2 * half for count in (q, kv, kv))
    spec = WeightSpec(("q", "k", "v"), part_rows, 8, DType.F32, "rope", 2 * half, half)
    graph = Graph()
    x, cos, sin = graph.data("x", (1, 8)), graph.data("cos", (1, half)), graph.data("sin", (1, half))
    attrs = LinearAttrs(epilogue="rope", rope=RopeAttrs(heads, q + kv, 2 * half, half))
    root = graph.add_node(Op.LINEAR, [x, graph.weight(spec), cos, sin], (1, heads * 2 * half), attrs)
    if most < half:
        with pytest.raises(DeviceError, match=r"q \+ k \+ v"):
            split(graph, root, most)
        return
    parts = split(graph, root, most)
    assert all(one.first_unit % half == 0 and one.units % half == 0 for one in parts)
    ropes = [graph.attrs(one, LinearAttrs).rope for one in graph.reachable([root]) if graph.node(one).op is Op.LINEAR]
    turned = [rope for rope in ropes if rope is not None]
    assert sum(rope.heads for rope in turned) == heads
    assert sum(rope.rotated_heads for rope in turned) == q + kv


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
