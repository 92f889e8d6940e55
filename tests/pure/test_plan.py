"""Plans of the tiny Llama: dispatches counted, every one ordered, every activation where its readers look for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_llama
from order_check import dependences, faults, places, without_each_sync
from tiny_llama import LANES, PATHS, planned

from vkdecode.decode import StepOptions
from vkdecode.errors import TopologyChanged, UnsupportedModelError
from vkdecode.graph import FUSIONS, Graph, KvWriteAttrs, NodeId, Op, optimize_graph, splice_host_copy
from vkdecode.runtime import Plan, buffer_of, check_topology, lower

LAYERS = 2
STEPS = {"decode": (1, "last"), "prompt": (16, "last"), "all": (16, "all"), "chunk": (64, "none")}
CASES = [
    (kind, *path, lanes, fused, cut_after)
    for kind in STEPS
    for path in PATHS
    for lanes in LANES
    for fused in (True, False)
    for cut_after in (((),) if kind == "decode" else ((), (Op.ATTENTION,), (Op.LINEAR,)))
]
Cuts = tuple[Op, ...]
_plans: dict[tuple[object, ...], tuple[Graph, Plan]] = {}


def plan_of(
    kind: str, kv_offset: str, arm: str, lanes: str = "subgroup", fused: bool = True, cut_after: Cuts = ()
) -> tuple[Graph, Plan]:
    key = (kind, kv_offset, arm, lanes, fused, cut_after)
    if key not in _plans:
        seq, logits = STEPS[kind]
        graph, _, plan = planned("llama", StepOptions(seq, logits, kv_offset, arm), lanes, fused, cut_after)
        _plans[key] = graph, plan
    return _plans[key]


def kernels(plan: Plan) -> list[str]:
    return [dispatch.kernel.key.split()[0] for dispatch in plan.dispatches]


def uploads(graph: Graph, plan: Plan) -> set[NodeId]:
    return {one for one in plan.constants if graph.node(one).op is Op.DATA}


def physical_faults(plan: Plan) -> list[str]:
    """What is unordered when each activation is named by the memory that holds it."""
    accesses = [(places(plan, run.reads), places(plan, run.writes)) for run in plan.dispatches]
    order = [[replace(step, buffers=places(plan, step.buffers)) for step in steps] for steps in plan.order]
    return faults(order, accesses, plan.segments, targets=places(plan, plan.targets))


# Counts


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("arm", ["bounded", "masked"])
def test_a_decode_step_takes_five_dispatches_a_layer_with_embedding_and_head(arm: str, lanes: str) -> None:
    _, plan = plan_of("decode", "device", arm, lanes)
    assert kernels(plan) == ["embed", *["linear", "attention", "linear", "linear", "linear"] * LAYERS, "linear"]


@pytest.mark.parametrize("arm", ["bounded", "masked"])
def test_on_the_symenv_path_each_layer_also_writes_k_and_v(arm: str) -> None:
    _, plan = plan_of("decode", "symenv", arm)
    assert sorted(kernels(plan)) == sorted(
        ["embed", *["attention", *["linear"] * 4, "kv_write", "kv_write"] * LAYERS, "linear"]
    )


@pytest.mark.parametrize("name", tiny_llama.NAMES)
def test_every_checkpoint_fuses_whole(name: str) -> None:
    _, _, plan = planned(name)
    _, layers = kernels(plan).count("embed"), kernels(plan).count("attention")
    assert len(plan.dispatches) == 5 * layers + 2


def test_without_fusions_every_operation_is_a_dispatch_of_its_own() -> None:
    for kv_offset, arm in PATHS:
        _, plan = plan_of("decode", kv_offset, arm, fused=False)
        found = kernels(plan)
        layer = {"norm": 2, "linear": 7, "rope": 2, "attention": 1, "elementwise": 4, "kv_write": 2}
        assert {name: found.count(name) for name in layer} == {
            name: count * LAYERS + (name in ("norm", "linear")) for name, count in layer.items()
        }
        assert len(found) == sum(layer.values()) * LAYERS + 3


def test_a_prompts_plan_computes_the_logits_that_are_wanted() -> None:
    for kv_offset, arm in PATHS:
        found = {kind: kernels(plan_of(kind, kv_offset, arm)[1]) for kind in STEPS}
        head = ["last_row", "linear"]
        assert len(found["prompt"]) == len(found["chunk"]) + len(head)
        assert len(found["all"]) == len(found["chunk"]) + 1
        assert "last_row" in found["prompt"]
        assert "last_row" not in found["all"] + found["chunk"] + found["decode"]


# Order


@pytest.mark.parametrize(("kind", "kv_offset", "arm", "lanes", "fused", "cut_after"), CASES)
def test_every_dependence_of_a_real_plan_is_ordered(
    kind: str, kv_offset: str, arm: str, lanes: str, fused: bool, cut_after: Cuts
) -> None:
    graph, plan = plan_of(kind, kv_offset, arm, lanes, fused, cut_after)
    accesses = [(run.reads, run.writes) for run in plan.dispatches]
    assert sum(plan.segments) == len(plan.dispatches)
    assert faults(plan.order, accesses, plan.segments, uploads(graph, plan), plan.targets) == []
    assert physical_faults(plan) == []
    reported = {(one.kind, int(places(plan, (one.buffer,))[0]), one.first, one.second) for one in plan.hazards}
    found = dependences([(places(plan, reads), places(plan, writes)) for reads, writes in accesses], plan.segments)
    assert reported == found
    if not cut_after:
        kinds = {one[0] for one in found}
        assert kinds == ({"RAW"} if kv_offset == "device" and fused else {"RAW", "WAR"})


@pytest.mark.parametrize("cut_after", [(), (Op.ATTENTION,)])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_no_sync_of_a_real_plan_can_be_left_out(kind: str, kv_offset: str, arm: str, cut_after: Cuts) -> None:
    for fused in (True, False):
        graph, plan = plan_of(kind, kv_offset, arm, fused=fused, cut_after=cut_after)
        accesses = [(run.reads, run.writes) for run in plan.dispatches]
        tried = 0
        for reduced in without_each_sync(plan.order):
            assert faults(reduced, accesses, plan.segments, uploads(graph, plan), plan.targets) != []
            tried += 1
        assert tried >= 3


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_accesses_are_those_of_the_graph(kv_offset: str, arm: str) -> None:
    for kind in STEPS:
        for fused in (True, False):
            graph, plan = plan_of(kind, kv_offset, arm, fused=fused)
            for run in plan.dispatches:
                node = graph.node(run.node)
                inputs = list(node.inputs)
                if node.op is Op.KV_WRITE:
                    inputs.pop(2)  # the attention that must have read first: an order, not a value
                    inputs.pop(1)  # the cache, of which some rows are written and none is read
                assert {buffer_of(graph, one) for one in inputs} <= set(run.reads)
                assert buffer_of(graph, run.node) in run.writes
                if node.op is Op.ATTENTION and fused and kv_offset == "device":
                    assert set(node.inputs[3:5]) < set(run.writes)
                else:
                    assert len(run.writes) == 1


# Where values are held


@pytest.mark.parametrize(("kind", "kv_offset", "arm", "lanes", "fused", "cut_after"), CASES)
def test_each_reader_finds_its_own_activation(
    kind: str, kv_offset: str, arm: str, lanes: str, fused: bool, cut_after: Cuts
) -> None:
    graph, plan = plan_of(kind, kv_offset, arm, lanes, fused, cut_after)
    held: dict[int, NodeId] = {}
    first = 0
    for count in plan.segments:
        written: set[int] = set()
        for run in plan.dispatches[first : first + count]:
            assert all(held[plan.slots[one]] == one for one in run.reads if one in plan.slots)
            for one in run.writes:
                if one in plan.slots:
                    held[plan.slots[one]] = one
                    assert plan.slots[one] not in written
                    written.add(plan.slots[one])
        first += count
    assert all(held[plan.slots[one]] == one for one in plan.targets)
    for one, slot in plan.slots.items():
        tokens, features = graph.node(one).shape
        assert plan.slot_bytes[slot] == 4 * tokens * features


def test_memory_is_reused_between_submissions() -> None:
    _, whole = plan_of("prompt", "device", "bounded")
    _, cut = plan_of("prompt", "device", "bounded", cut_after=(Op.ATTENTION,))
    assert len(whole.slot_bytes) == len(whole.slots)
    assert len(cut.slot_bytes) < len(cut.slots)
    assert cut.segments == (3, 5, 5)


# In llama-tied-mqa q, k and v together are as wide as the MLP, and the first layer's take what is the MLP's later.
@pytest.mark.parametrize("name", [one for one in tiny_llama.NAMES if one != "llama-tied-mqa"])
def test_the_layers_of_a_prompt_bind_the_same_activations(name: str) -> None:
    """So their dispatches can share algorithms."""
    _, _, plan = planned(name, StepOptions(64, "none", "device", "bounded"), "subgroup", True, (Op.ATTENTION,))
    bound: dict[tuple[object, ...], set[tuple[NodeId, ...]]] = {}
    for run in plan.dispatches[1:]:
        at = tuple(one for one in places(plan, run.bindings) if one < 0)
        bound.setdefault((run.kernel.key, tuple(run.spec.items())), set()).add(at)
    assert len(plan.dispatches) > 2 * len(bound)
    assert {len(one) for one in bound.values()} == {1}


def test_the_memory_of_a_target_is_kept_to_the_end() -> None:
    graph = Graph()
    x = graph.data("x", (1, 8))
    wanted = graph.silu(x)
    last = x
    for _ in range(4):
        last = graph.silu(last)
    optimized = optimize_graph(graph, (splice_host_copy(graph, wanted), last), "gpu")
    plan = lower(graph, optimized, LANES["subgroup"], cut_after=(Op.SILU,))
    assert plan.targets == (wanted,)
    assert len(plan.segments) == 5
    assert list(plan.slots.values()).count(plan.slots[wanted]) == 1
    assert len(plan.slot_bytes) < 5


def test_constants_are_all_that_is_bound_and_not_computed() -> None:
    graph, plan = plan_of("decode", "device", "bounded")
    ops = {graph.node(one).op for one in plan.constants}
    assert ops == {Op.WEIGHT, Op.DATA, Op.KV}
    bound = {one for run in plan.dispatches for one in run.bindings}
    assert bound == set(plan.constants) | set(plan.slots)
    assert not set(plan.constants) & set(plan.slots)


# Symbols and topology


def test_symbols_ride_push_constants_on_the_symenv_path_only() -> None:
    for kv_offset, arm in PATHS:
        graph, plan = plan_of("decode", kv_offset, arm)
        symbols = {(graph.node(run.node).op, str(one)) for run in plan.dispatches for one in run.symbols}
        if kv_offset == "device":
            assert symbols == set()
        else:
            writes = {(Op.KV_WRITE, "cached_len"), (Op.KV_WRITE, "token_count")}
            assert symbols == (writes | {(Op.ATTENTION, "attended_len")} if arm == "bounded" else writes)


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
            lower(graph, optimized, LANES["subgroup"])


def test_a_buffer_is_shared_by_views_copies_and_writes() -> None:
    step = tiny_llama.step_graph(options=StepOptions(1, "last", "symenv", "masked"))
    optimized = optimize_graph(step.graph, (step.logits, *step.effects), tiny_llama.LOCATION, fusions=FUSIONS)
    for effect, cache in zip(step.effects, [one for pair in step.kv for one in pair], strict=True):
        assert step.graph.attrs(effect, KvWriteAttrs).cached_len == step.cached_len_sym
        assert buffer_of(step.graph, effect) == cache
        source = step.graph.node(effect).inputs[0]
        assert step.graph.node(source).op is Op.VIEW
        assert step.graph.node(buffer_of(step.graph, source)).op is Op.LINEAR
    assert optimized.roots[0] == step.logits == buffer_of(step.graph, step.logits)


def test_a_step_that_no_kernel_can_tile_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="12 tokens is not a multiple of 16"):
        planned(options=StepOptions(12, "last", "device", "bounded"))
