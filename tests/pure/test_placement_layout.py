"""Placement stamps and copies, and whole rows for the kernels that need them."""

from __future__ import annotations

import pytest
from small_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, SmallGraph

from vkdecode.graph import HOST, CopyAttrs, NodeId, Op, ViewAttrs, optimize_graph, splice_host_copy
from vkdecode.graph.layout import contiguize
from vkdecode.graph.placement import place
from vkdecode.weights import DType

GPU = "gpu"


def copies(graph: SmallGraph) -> list[NodeId]:
    return [NodeId(at) for at in range(len(graph)) if graph.node(NodeId(at)).op is Op.COPY]


# Placement


def test_every_node_that_is_needed_gets_the_targets_stamp() -> None:
    graph = SmallGraph()
    root = graph.add(graph.norm(graph.hidden()), graph.hidden("y"))
    unused = graph.silu(root)
    generation = graph.generation
    assert place(graph, (root,), GPU, {}) == (root,)
    assert set(graph.placement) == set(graph.reachable([root]))
    assert set(graph.placement.values()) == {GPU}
    assert unused not in graph.placement
    assert graph.generation == generation


def test_the_copy_behind_the_root_lives_on_the_host() -> None:
    graph = SmallGraph()
    root = graph.norm(graph.hidden())
    generation = graph.generation
    target = splice_host_copy(graph, root)
    assert graph.generation > generation
    assert graph.node(target).inputs == (root,)
    assert graph.node(target).attrs == CopyAttrs("host")
    assert (graph.node(target).shape, graph.node(target).dtype) == (graph.node(root).shape, graph.node(root).dtype)
    assert place(graph, (target,), GPU, {}) == (target,)
    assert (graph.placement[target], graph.placement[root]) == (HOST, GPU)
    assert copies(graph) == [target]


def test_a_constant_that_lives_elsewhere_is_copied_once_for_all_its_users() -> None:
    graph = SmallGraph()
    x = graph.data("x", (1, HIDDEN))
    roots = (graph.silu(x), graph.add(x, x), graph.silu(graph.data("y", (1, HIDDEN))))
    untouched = graph.node(roots[2])
    generation = graph.generation
    place(graph, roots, GPU, {x: HOST})
    (copy,) = copies(graph)
    assert graph.node(copy).inputs == (x,)
    assert graph.node(copy).attrs == CopyAttrs("device")
    assert (graph.placement[x], graph.placement[copy]) == (HOST, GPU)
    assert graph.node(roots[0]).inputs == (copy,)
    assert graph.node(roots[1]).inputs == (copy, copy)
    assert graph.node(roots[2]) == untouched
    assert graph.generation > generation


def test_each_constant_that_lives_elsewhere_has_its_own_copy() -> None:
    graph = SmallGraph()
    x, y = graph.data("x", (1, HIDDEN)), graph.data("ids", (1,), DType.U32)
    roots = (graph.silu(x), graph.embed(y, graph.matrix("table", 20)))
    place(graph, roots, GPU, {x: HOST, y: "other gpu"})
    made = {graph.node(one).inputs[0]: one for one in copies(graph)}
    assert set(made) == {x, y}
    assert graph.node(made[y]).dtype is DType.U32
    assert graph.placement[y] == "other gpu"
    assert {graph.placement[one] for one in made.values()} == {GPU}


def test_a_copy_is_not_copied_and_placing_again_changes_nothing() -> None:
    graph = SmallGraph()
    x = graph.data("x", (1, HIDDEN))
    root = splice_host_copy(graph, graph.silu(x))
    place(graph, (root,), GPU, {x: HOST})
    count, generation = len(graph), graph.generation
    place(graph, (root,), GPU, {x: HOST})
    assert (len(graph), graph.generation) == (count, generation)


# Layout


def view(graph: SmallGraph, of: NodeId, features: int, offset: int = 0) -> NodeId:
    return graph.add_node(Op.VIEW, [of], (1, features), ViewAttrs(offset))


@pytest.mark.parametrize("reader", ["linear", "silu", "add", "last_row", "cos"])
def test_a_kernel_that_reads_whole_rows_gets_a_contiguous_copy(reader: str) -> None:
    graph = SmallGraph()
    wide = graph.hidden(features=3 * HIDDEN)
    part = view(graph, wide, HIDDEN, 8)
    make = {
        "linear": lambda: graph.product(part, "w"),
        "silu": lambda: graph.silu(part),
        "add": lambda: graph.add(wide, part),
        "last_row": lambda: graph.last_row(part, graph.token_count()),
        "cos": lambda: graph.rope(wide, part, part, HEADS, HEAD_DIM, HEAD_DIM),
    }
    root = make[reader]()
    before = graph.node(root)
    assert contiguize(graph, (root,)) == (root,)
    (made,) = {one for one in graph.node(root).inputs if graph.node(one).op is Op.CONTIGUIZE}
    assert graph.node(made).inputs == (part,)
    assert graph.node(made).shape == (1, HIDDEN)
    assert graph.node(root).op is before.op and graph.node(root).attrs == before.attrs
    assert graph.node(root).inputs == tuple(made if one == part else one for one in before.inputs)


def test_a_view_is_copied_once_for_all_its_readers() -> None:
    graph = SmallGraph()
    part = view(graph, graph.hidden(features=3 * HIDDEN), HIDDEN)
    roots = (graph.silu(part), graph.product(part, "w"))
    contiguize(graph, roots)
    assert graph.node(roots[0]).inputs[0] == graph.node(roots[1]).inputs[0]
    assert sum(graph.node(NodeId(at)).op is Op.CONTIGUIZE for at in range(len(graph))) == 1


def test_kernels_with_offsets_and_strides_read_the_view_itself() -> None:
    graph = SmallGraph()
    sizes = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    wide = graph.hidden(features=sum(sizes))
    q, k, v = (view(graph, wide, size) for size in sizes)
    attention = graph.attend(graph.norm(q), graph.turned(k, KV_HEADS), v)
    count, generation = len(graph), graph.generation
    assert contiguize(graph, (attention,)) == (attention,)
    assert (len(graph), graph.generation) == (count, generation)


def test_a_view_that_is_wanted_itself_is_made_whole() -> None:
    graph = SmallGraph()
    part = view(graph, graph.hidden(features=3 * HIDDEN), HIDDEN)
    (root,) = contiguize(graph, (part,))
    assert (graph.node(root).op, graph.node(root).inputs) == (Op.CONTIGUIZE, (part,))
    other = SmallGraph()
    part = view(other, other.hidden(features=3 * HIDDEN), HIDDEN)
    target = splice_host_copy(other, part)
    contiguize(other, (target,))
    (made,) = other.node(target).inputs
    assert other.node(made).op is Op.CONTIGUIZE


def test_the_optimizer_runs_layout_and_placement_without_any_fusion() -> None:
    graph = SmallGraph()
    x = graph.data("x", (1, 3 * HIDDEN))
    root = splice_host_copy(graph, graph.silu(view(graph, x, HIDDEN)))
    optimized = optimize_graph(graph, (root,), GPU, {x: HOST}, fusions=())
    assert optimized.generation == graph.generation
    ops = [graph.node(one).op for one in graph.reachable(optimized.roots)]
    assert ops == [Op.DATA, Op.COPY, Op.VIEW, Op.CONTIGUIZE, Op.SILU, Op.COPY]
    assert all(one in graph.placement for one in graph.reachable(optimized.roots))
