"""The graph: stable ids, a generation that counts structural changes, interned constants, valid orders."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkdecode.errors import InvalidInputError
from vkdecode.graph import Graph, LinearAttrs, NodeId, NormAttrs, Op, WeightSpec, optimize_graph
from vkdecode.weights import DType


@st.composite
def dags(draw: st.DrawFn) -> tuple[Graph, tuple[NodeId, ...]]:
    """A graph of up to 30 nodes, rewired so that inputs can have higher ids than their users, and some roots."""
    graph = Graph()
    count = draw(st.integers(1, 30))
    rank = draw(st.permutations(range(count)))
    for _ in range(count):
        graph.add_node(Op.SILU, [], (1, 1))
    by_rank = sorted(range(count), key=lambda one: rank[one])
    for place, one in enumerate(by_rank):
        inputs = draw(st.lists(st.sampled_from(by_rank[:place]), max_size=4)) if place else []
        graph.rewrite(NodeId(one), Op.ADD, [NodeId(value) for value in inputs], None)
    roots = draw(st.lists(st.integers(0, count - 1), max_size=4))
    return graph, tuple(NodeId(one) for one in roots)


def reached(graph: Graph, roots: tuple[NodeId, ...]) -> set[NodeId]:
    """What the roots need, by a plain closure."""
    found = set(roots)
    while more := {one for node in found for one in graph.node(node).inputs} - found:
        found |= more
    return found


@given(dags())
def test_every_node_comes_after_its_inputs_and_none_is_missing_or_twice(
    made: tuple[Graph, tuple[NodeId, ...]],
) -> None:
    graph, roots = made
    order = graph.reachable(roots)
    place = {one: at for at, one in enumerate(order)}
    assert len(place) == len(order)
    assert set(order) == reached(graph, roots)
    assert all(place[one] < place[node] for node in order for one in graph.node(node).inputs)


@given(dags())
def test_consumers_are_the_users_that_the_roots_need(made: tuple[Graph, tuple[NodeId, ...]]) -> None:
    graph, roots = made
    users = graph.consumers(roots)
    live = reached(graph, roots)
    for one in live:
        expected = {node for node in live if one in graph.node(node).inputs}
        if one in roots:
            expected.add(one)
        assert set(users.get(one, [])) == expected
        assert len(users.get(one, [])) == len(expected)


@given(dags())
def test_listing_a_graph_does_not_change_it(made: tuple[Graph, tuple[NodeId, ...]]) -> None:
    graph, roots = made
    generation, order = graph.generation, graph.reachable(roots)
    graph.consumers(roots)
    assert (graph.generation, graph.reachable(roots)) == (generation, order)


def test_free_nodes_come_in_the_order_of_their_making() -> None:
    graph = Graph()
    first, second = (graph.data(name, (1, 4)) for name in ("a", "b"))
    total = graph.add(first, second)
    assert graph.reachable([total]) == [first, second, total]


def test_each_structural_change_raises_the_generation() -> None:
    graph = Graph()
    seen = [graph.generation]

    def changed() -> None:
        seen.append(graph.generation)

    x = graph.data("x", (1, 4))
    changed()
    weight = graph.weight(WeightSpec(("w",), (4,), 4, DType.F32))
    changed()
    product = graph.linear(x, weight)
    changed()
    graph.rewrite(product, Op.SILU, [x], None)
    changed()
    graph.rewrite(product, Op.SILU, [x], None)
    changed()
    assert all(before < after for before, after in pairwise(seen))


def test_symbols_and_lookups_are_no_structural_changes() -> None:
    graph = Graph()
    x = graph.data("x", (1, 4))
    generation = graph.generation
    graph.symbol("cached_len")
    assert graph.find_data("x") == x
    assert graph.attrs(x, object) is graph.node(x).attrs
    assert graph.generation == generation


def test_ids_stay_when_a_node_is_rewritten() -> None:
    graph = Graph()
    x = graph.data("x", (3, 4))
    one, two = graph.silu(x), graph.silu(x)
    graph.rewrite(one, Op.ADD, [x, two], None)
    assert [graph.node(NodeId(at)).id for at in range(len(graph))] == [x, one, two]
    assert graph.node(one).shape == (3, 4)
    assert graph.node(one).inputs == (x, two)


def test_constants_are_interned() -> None:
    graph = Graph()
    spec = WeightSpec(("w",), (4,), 8, DType.F16)
    made = [
        graph.weight(spec),
        graph.data("mask", (40,)),
        graph.kv(1, 0, (2, 40, 16), DType.F32),
    ]
    count, generation = len(graph), graph.generation
    again = [
        graph.weight(WeightSpec(("w",), (4,), 8, DType.F16)),
        graph.data("mask", (40,)),
        graph.kv(1, 0, (2, 40, 16), DType.F32),
    ]
    assert again == made
    assert (len(graph), graph.generation) == (count, generation)


def test_constants_that_differ_in_anything_are_apart() -> None:
    graph = Graph()
    specs = [
        WeightSpec(("w",), (4,), 8, DType.F16),
        WeightSpec(("w",), (4,), 8, DType.F32),
        WeightSpec(("v",), (4,), 8, DType.F16),
        WeightSpec(("w",), (4,), 1, DType.F32, vector=True),
        WeightSpec(("w", "w"), (4, 4), 8, DType.F16, order="gated"),
        WeightSpec(("w",), (4,), 8, DType.F16, order="rope", head_dim=4, rotary_dim=4),
    ]
    nodes = [graph.weight(spec) for spec in specs]
    nodes += [graph.data(name, (4,)) for name in ("cos", "sin")]
    nodes += [graph.kv(layer, which, (1, 4, 4), DType.F32) for layer in range(2) for which in range(2)]
    assert len(set(nodes)) == len(nodes)


def test_a_vector_is_one_dimensional_and_a_matrix_two() -> None:
    graph = Graph()
    matrix = graph.weight(WeightSpec(("a", "b"), (4, 6), 8, DType.F16))
    vector = graph.weight(WeightSpec(("c",), (4,), 1, DType.F32, vector=True))
    assert graph.node(matrix).shape == (10, 8)
    assert graph.node(vector).shape == (4,)


def test_an_input_must_exist() -> None:
    graph = Graph()
    x = graph.data("x", (1, 4))
    for wrong in (1, 7, -1):
        with pytest.raises(InvalidInputError, match="input that does not exist"):
            graph.add_node(Op.ADD, [x, NodeId(wrong)], (1, 4))
    assert len(graph) == 1


def test_features_must_fit_the_weight() -> None:
    graph = Graph()
    x = graph.data("x", (1, 4))
    with pytest.raises(InvalidInputError, match=r"4 features .* 8 columns"):
        graph.linear(x, graph.weight(WeightSpec(("w",), (4,), 8, DType.F32)))


def test_attributes_are_of_the_kind_that_is_asked_for() -> None:
    graph = Graph()
    x = graph.data("x", (1, 4))
    weight = graph.weight(WeightSpec(("n",), (4,), 1, DType.F32, vector=True))
    norm = graph.rms_norm(x, weight, 1e-5)
    assert graph.attrs(norm, NormAttrs) == NormAttrs(1e-5)
    with pytest.raises(InvalidInputError, match=r"rms_norm.* has no LinearAttrs"):
        graph.attrs(norm, LinearAttrs)


def test_a_data_constant_that_was_never_made_is_named() -> None:
    with pytest.raises(InvalidInputError, match="no data constant 'offset'"):
        Graph().find_data("offset")


def test_optimizing_gives_the_roots_and_the_generation_of_now() -> None:
    graph = Graph()
    root = graph.silu(graph.data("x", (1, 4)))
    optimized = optimize_graph(graph, (root,), "gpu")
    assert optimized.roots == (root,)
    assert optimized.generation == graph.generation
    graph.silu(root)
    assert optimized.generation < graph.generation
