"""Plans of the tiny Llama: dispatches counted, every one ordered, every activation where its readers look for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import tiny_llama
from made_up import GPU, SUBGROUPS, MadeUpSource, mixtral_8x7b, phi_2, planned_model, smollm2
from order_check import (
    accesses_of,
    barriers,
    dependences,
    faults,
    missing,
    runs_of,
    segments_of,
    without_each_barrier,
)
from tiny_llama import LANES, PATHS, planned

from vkdecode.decode import StepOptions, plan_step
from vkdecode.errors import TopologyChanged, UnsupportedModelError
from vkdecode.graph import FUSIONS, Graph, Op, optimize_graph, splice_host_copy
from vkdecode.runtime import WORK_PER_SUBMISSION, Plan, Span, buffer_of, check_topology, lower, plan_order

LAYERS = 2
STEPS = {"decode": (1, "last"), "prompt": (16, "last"), "all": (16, "all"), "chunk": (64, "none")}
SOME = {"decode": 15_000, "prompt": 400_000, "all": 400_000, "chunk": 1_500_000}
CASES = [
    (kind, *path, lanes, fused, work)
    for kind in STEPS
    for path in PATHS
    for lanes in LANES
    for fused in (True, False)
    for work in (WORK_PER_SUBMISSION, SOME[kind])
]


@functools.cache
def plan_of(
    kind: str, kv_offset: str, arm: str, lanes: str = "subgroup", fused: bool = True, work: int = WORK_PER_SUBMISSION
) -> tuple[Graph, Plan]:
    seq, logits = STEPS[kind]
    graph, _, plan = planned("llama", StepOptions(seq, logits, kv_offset, arm), lanes, fused, work)
    return graph, plan


def kernels(plan: Plan) -> list[str]:
    return [dispatch.kernel.key.split()[0] for dispatch in plan.dispatches]


def pipelines(plan: Plan) -> set[tuple[object, ...]]:
    return {(run.kernel.key, tuple(run.spec.items()), run.workgroups) for run in plan.dispatches}


def moves(kv_offset: str, arm: str) -> bool:
    """Whether rows land behind the last one first, so that a recording need not know the offset."""
    return (kv_offset, arm) == ("symenv", "masked")


# Counts


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_a_decode_step_takes_five_dispatches_a_layer_with_embedding_and_head(
    kv_offset: str, arm: str, lanes: str
) -> None:
    """And one that moves rows from where they landed, where they do."""
    _, plan = plan_of("decode", kv_offset, arm, lanes)
    found = kernels(plan)
    assert found.count("kv_move") == LAYERS * moves(kv_offset, arm)
    layer = ["linear", "attention", "linear", "linear", "linear"]
    assert [one for one in found if one != "kv_move"] == ["embed", *layer * LAYERS, "linear"]


@pytest.mark.parametrize("name", tiny_llama.NAMES)
def test_every_checkpoint_fuses_whole(name: str) -> None:
    _, _, plan = planned(name)
    assert len(plan.dispatches) == 5 * kernels(plan).count("attention") + 2


def test_without_fusions_every_operation_is_a_dispatch_of_its_own() -> None:
    for kv_offset, arm in PATHS:
        _, plan = plan_of("decode", kv_offset, arm, fused=False)
        found = kernels(plan)
        layer = {"norm": 2, "linear": 7, "rope": 2, "attention": 1, "elementwise": 4, "kv_write": 1}
        layer["kv_move"] = int(moves(kv_offset, arm))
        assert {name: found.count(name) for name in layer} == {
            name: count * LAYERS + (name in ("norm", "linear")) for name, count in layer.items()
        }
        assert len(found) == sum(layer.values()) * LAYERS + 3


def test_a_prompts_plan_computes_the_logits_that_are_wanted() -> None:
    """One whose logits nobody reads ends in a row all the same: it tells that the plan ran."""
    for kv_offset, arm in PATHS:
        layers = plan_of("decode", kv_offset, arm)[1]
        found = {kind: kernels(plan_of(kind, kv_offset, arm)[1]) for kind in STEPS}
        counted = {kind: (len(one) - len(layers.dispatches), one.count("last_row")) for kind, one in found.items()}
        assert counted == {"decode": (0, 0), "prompt": (1, 1), "all": (0, 0), "chunk": (0, 1)}


# Pipelines


SOURCES: dict[str, Callable[..., MadeUpSource]] = {"phi": phi_2, "mixtral": mixtral_8x7b}


def shape_of(monkeypatch: pytest.MonkeyPatch, source: MadeUpSource, lanes: str, options: StepOptions) -> Plan:
    model = planned_model(monkeypatch, GPU, source, SUBGROUPS if lanes == "subgroup" else None)
    return plan_step(model, options, model.kv_geometry(2048, "f16"))[1]


@pytest.mark.parametrize("seq", [1, 16, 64, 256])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_a_plan_takes_few_pipelines_whatever_the_number_of_layers(
    monkeypatch: pytest.MonkeyPatch, lanes: str, kv_offset: str, arm: str, seq: int
) -> None:
    options = StepOptions(seq, "last", kv_offset, arm)
    plan = shape_of(monkeypatch, smollm2(), lanes, options)
    assert kernels(plan).count("attention") == 30
    assert len(pipelines(plan)) <= 12
    other = shape_of(monkeypatch, smollm2(layers=3), lanes, options)
    assert pipelines(other) == pipelines(plan)
    assert other.arena_bytes == plan.arena_bytes


@pytest.mark.parametrize("seq", [1, 64])
@pytest.mark.parametrize("name", ["phi", "mixtral"])
def test_so_do_those_of_other_families(monkeypatch: pytest.MonkeyPatch, name: str, seq: int) -> None:
    options = StepOptions(seq, "last", "device", "bounded")
    plans = [shape_of(monkeypatch, SOURCES[name](layers=layers), "shared", options) for layers in (3, 6)]
    assert pipelines(plans[0]) == pipelines(plans[1])
    assert len(pipelines(plans[0])) <= 16


# Order


@pytest.mark.parametrize(("kind", "kv_offset", "arm", "lanes", "fused", "work"), CASES)
def test_every_dependence_of_a_real_plan_is_ordered(
    kind: str, kv_offset: str, arm: str, lanes: str, fused: bool, work: int
) -> None:
    graph, plan = plan_of(kind, kv_offset, arm, lanes, fused, work)
    every = list(range(len(plan.dispatches)))
    groups = segments_of(plan.order)
    assert [one for group in groups for one in group] == every
    accesses = accesses_of(graph, plan)
    assert faults(plan.order, accesses, groups) == []
    assert missing(graph, plan, every, plan.results) == []
    caches = {int(node) for node in plan.constants if graph.node(node).op is Op.KV}
    kinds = {(one.kind, one.place in caches) for one in dependences(accesses, [every])}
    assert {("RAW", False), ("WAR", False), ("WAW", False), ("RAW", True)} <= kinds
    # Rows that move are read where they landed, and written where others were read.
    assert kinds >= {("WAR", True), ("WAW", True)} or not moves(kv_offset, arm)
    assert (len(groups) > 1) == (work != WORK_PER_SUBMISSION)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_no_barrier_of_a_real_plan_can_be_left_out(kind: str, kv_offset: str, arm: str) -> None:
    for fused in (True, False):
        for work in (WORK_PER_SUBMISSION, SOME[kind]):
            graph, plan = plan_of(kind, kv_offset, arm, fused=fused, work=work)
            accesses, groups = accesses_of(graph, plan), segments_of(plan.order)
            tried = 0
            for reduced in without_each_barrier(plan.order):
                assert faults(reduced, accesses, groups) != []
                tried += 1
            assert tried == barriers(plan.order) >= 4


def test_no_place_of_a_barrier_can_be_left_out_that_a_reader_waits_for() -> None:
    """Above all the KV caches, which attention reads behind the product that writes them."""
    graph, plan = plan_of("decode", "device", "bounded")
    accesses = accesses_of(graph, plan)
    (steps,) = plan.order
    caught = set()
    for at, step in enumerate(steps):
        for place in step.places:
            left = tuple(one for one in step.places if one != place)
            reduced = (*steps[:at], type(step)(step.kind, left, step.dispatch), *steps[at + 1 :])
            if faults((reduced,), accesses, segments_of(plan.order)):
                caught.add(place)
    assert caught == {-1, *(int(node) for node in plan.constants if graph.node(node).op is Op.KV)}


def test_a_decode_step_is_a_chain() -> None:
    _, plan = plan_of("decode", "device", "bounded")
    (steps,) = plan.order
    kinds = [step.kind for step in steps]
    assert kinds == (["run", "barrier"] * len(plan.dispatches))[:-1]


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_sharing_memory_takes_no_barrier(kind: str, kv_offset: str, arm: str) -> None:
    for fused in (True, False):
        _, plan = plan_of(kind, kv_offset, arm, fused=fused)
        alone = [[[Span(node, 0, 1) for node in part] for part in (run.reads, run.writes)] for run in plan.dispatches]
        private = plan_order([(reads, writes) for reads, writes in alone], [len(alone)])
        assert barriers(private) == barriers(plan.order)


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_accesses_are_those_of_the_graph(kv_offset: str, arm: str) -> None:
    for kind in STEPS:
        for fused in (True, False):
            graph, plan = plan_of(kind, kv_offset, arm, fused=fused)
            for run in plan.dispatches:
                node = graph.node(run.node)
                inputs = {buffer_of(graph, one) for one in node.inputs}
                caches = {one for one in inputs if graph.node(one).op is Op.KV}
                effects = {one for one in inputs if graph.node(one).op is Op.KV_WRITE}  # an order, not a value
                if node.op is Op.KV_MOVE:
                    assert set(run.reads) == set(run.writes) == caches
                elif node.op is Op.ATTENTION:
                    assert set(run.reads) == inputs - effects
                    assert set(run.writes) == {run.node}
                else:
                    # Products of prompts also read how many tokens there are.
                    count = {graph.find_data("token_count")}
                    assert set(run.reads) - count == inputs - caches - count
                    assert set(run.writes) == caches | ({run.node} if node.op is not Op.KV_WRITE else set())


# Where values are held


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("most", [1 << 9, 1 << 13, 1 << 15])
def test_arenas_are_no_larger_than_a_buffer_may_be(kind: str, lanes: str, most: int) -> None:
    seq, logits = STEPS[kind]
    widest = 4 * 128 * seq  # q, k and v of a layer, where each is an activation
    for fused in (True, False):
        graph, _, plan = planned("llama", StepOptions(seq, logits, "device", "bounded"), lanes, fused, 1 << 40, most)
        assert faults(plan.order, accesses_of(graph, plan), segments_of(plan.order)) == []
        assert missing(graph, plan, range(len(plan.dispatches)), plan.results) == []
        assert all(nbytes <= max(most, widest) for nbytes in plan.arena_bytes)
        assert {-1 - span.place for span in plan.spans.values()} == set(range(len(plan.arena_bytes)))
        assert (len(plan.arena_bytes) > 1) == (sum(plan.arena_bytes) > most)
        for node, span in plan.spans.items():
            tokens, features = graph.node(node).shape
            assert span.end - span.start == 4 * tokens * features
            assert span.start % 256 == 0


def test_memory_is_shared() -> None:
    for kind in STEPS:
        for fused, at_most in ((True, 0.35), (False, 0.25)):
            _, plan = plan_of(kind, "device", "bounded", fused=fused)
            assert sum(plan.arena_bytes) < at_most * sum(span.end - span.start for span in plan.spans.values())


def test_an_activation_put_on_top_of_another_is_found() -> None:
    graph, plan = plan_of("decode", "device", "bounded")
    every = range(len(plan.dispatches))
    found = 0
    for one, span in plan.spans.items():
        for other, taken in plan.spans.items():
            if one != other and span != taken:
                moved = replace(
                    plan, spans={**plan.spans, one: taken._replace(end=taken.start + span.end - span.start)}
                )
                wrong = missing(graph, moved, every, plan.results)
                found += wrong + faults(plan.order, accesses_of(graph, moved), segments_of(plan.order)) != []
    assert found > len(plan.spans)


def test_results_have_memory_of_their_own() -> None:
    graph = Graph()
    x = graph.data("x", (1, 8))
    wanted = graph.silu(x)
    last = x
    for _ in range(4):
        last = graph.silu(last)
    optimized = optimize_graph(graph, (splice_host_copy(graph, wanted), last), "gpu")
    plan = lower(graph, optimized, LANES["subgroup"], 1 << 20)
    assert plan.results == {wanted: 32}
    assert wanted not in plan.spans
    assert len(plan.spans) == 4
    assert plan.arena_bytes == (256 + 32,)
    alone = lower(graph, optimize_graph(graph, (last,), "gpu"), LANES["subgroup"], 1 << 20)
    assert alone.results == {last: 32}


def test_constants_are_all_that_is_bound_and_not_computed() -> None:
    graph, plan = plan_of("decode", "device", "bounded")
    assert {graph.node(one).op for one in plan.constants} == {Op.WEIGHT, Op.DATA, Op.KV}
    bound = {one for run in plan.dispatches for one in run.bindings}
    parts = [set(plan.constants), set(plan.spans), set(plan.results)]
    assert bound == set.union(*parts)
    assert sum(map(len, parts)) == len(bound)
    assert set(plan.data) == {one for one in plan.constants if graph.node(one).op is Op.DATA}


@pytest.mark.parametrize("most", [1, 15_000, WORK_PER_SUBMISSION])
def test_submissions_keep_to_the_work_that_one_may_take(most: int) -> None:
    _, plan = plan_of("decode", "device", "bounded", work=most)
    works = [[plan.dispatches[one].work for one in runs_of(steps)] for steps in plan.order]
    assert all(sum(group) <= most or len(group) == 1 for group in works)
    # A cut is there only where the next dispatch would be too much.
    assert all(sum(group) + after[0] > most for group, after in pairwise(works))


# Symbols and topology


def test_symbols_ride_push_constants_on_the_symenv_path_only() -> None:
    wanted = {
        "device": set(),
        "bounded": {(Op.LINEAR, "cached_len"), (Op.ATTENTION, "attended_len")},
        "masked": {(Op.KV_MOVE, "cached_len"), (Op.KV_MOVE, "token_count")},
    }
    for kv_offset, arm in PATHS:
        graph, plan = plan_of("decode", kv_offset, arm)
        symbols = {(graph.node(run.node).op, str(one)) for run in plan.dispatches for one in run.symbols}
        assert symbols == wanted["device" if kv_offset == "device" else arm]


def test_a_changed_graph_is_not_planned() -> None:
    for change in ("add", "rewrite"):
        graph, optimized, _ = planned()
        check_topology(graph, optimized)
        root = optimized.roots[0]
        if change == "add":
            graph.silu(root)
        else:
            node = graph.node(root)
            graph.rewrite(root, node.op, node.inputs, node.attrs)
        text = f"generation {graph.generation}.* {optimized.generation}"
        with pytest.raises(TopologyChanged, match=text):
            check_topology(graph, optimized)
        with pytest.raises(TopologyChanged, match=text):
            lower(graph, optimized, LANES["subgroup"], 1 << 30)


def test_a_buffer_is_shared_by_views_and_copies() -> None:
    step = tiny_llama.step_graph()
    graph = step.graph
    target = splice_host_copy(graph, step.logits)
    optimize_graph(graph, (target,), tiny_llama.LOCATION, fusions=FUSIONS[:-1])
    assert buffer_of(graph, target) == step.logits == buffer_of(graph, step.logits)
    writes = [one for one in graph.reachable([target]) if graph.node(one).op is Op.KV_WRITE]
    assert len(writes) == LAYERS
    for one in writes:
        _, v, *_ = graph.node(one).inputs
        assert graph.node(v).op is Op.VIEW
        assert graph.node(buffer_of(graph, v)).op is Op.LINEAR


def test_a_step_that_no_kernel_can_tile_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="12 tokens is not a multiple of 16"):
        planned(options=StepOptions(12, "last", "device", "bounded"))
