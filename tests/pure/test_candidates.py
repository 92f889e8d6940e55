"""Candidates instead of a row: the same token from the same seed, and recordings that hold only what is asked for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import VOCAB_SIZE, FakeContext, FakeKvCache, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from order_check import faults, places
from tiny_llama import LANES, LOCATION, PATHS, step_graph

from vkdecode.decode import MOST_CANDIDATES, StepOptions
from vkdecode.decode.candidates import candidates_node, host_copies, left_out, with_candidates
from vkdecode.errors import InvalidInputError, VkDecodeError
from vkdecode.graph import FUSIONS, Graph, NodeId, Op, TopKAttrs, optimize_graph, splice_host_copy
from vkdecode.runtime import OrderStep, Plan, lower, steps_for
from vkdecode.sampling import Sampler, SamplingParams
from vkdecode.token_model import KvFeed

# A coarse grid makes ties common.
VALUES = st.one_of(
    st.integers(-8, 8).map(lambda n: n / 2), st.just(-math.inf), st.just(-0.0), st.floats(-40, 40, width=32)
)


def best_of(row: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What a device hands over."""
    order = np.lexsort((np.arange(row.size), -row))[:count]
    return order, row[order]


@given(
    row=st.lists(VALUES, min_size=2, max_size=90).filter(lambda row: any(map(math.isfinite, row))),
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 5)),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=500, deadline=None)
def test_candidates_give_the_same_tokens_as_the_row(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.array(row, np.float32)
    params = SamplingParams(temperature, top_k, top_p, min_p, seed)
    count = Sampler(params).candidates_needed(logits.size)
    assert count == (1 if temperature == 0 else top_k if top_k < logits.size else 0)
    if count:
        one, other = Sampler(params), Sampler(params)
        for _ in range(5):
            assert one.sample_candidates(*best_of(logits, count)) == other.sample(logits)


def test_a_candidate_too_few_gives_other_tokens() -> None:
    logits = np.linspace(0, 1, 50, dtype=np.float32)
    params = SamplingParams(temperature=1.0, top_k=20, seed=3)
    one, other = Sampler(params), Sampler(params)
    tokens = [(one.sample_candidates(*best_of(logits, 19)), other.sample(logits)) for _ in range(50)]
    assert any(a != b for a, b in tokens)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1.0, math.nan, math.nan], "2 of 3 logits are NaN"),
        ([math.inf, 1.0, math.inf], "2 of 3 logits are infinite"),
        ([-math.inf] * 3, "all 3 logits are -inf"),
    ],
)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=2, seed=1)])
def test_a_row_that_cannot_be_sampled_gives_the_same_error(
    row: list[float], message: str, params: SamplingParams
) -> None:
    logits = np.array(row, np.float32)
    with pytest.raises(VkDecodeError, match=message):
        Sampler(params).sample(logits)
    with pytest.raises(VkDecodeError, match=message):
        Sampler(params).sample_candidates(np.arange(3), logits)


def test_ids_and_logits_that_do_not_match_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="2 token ids cannot go with 3 logits"):
        Sampler().sample_candidates(np.arange(2), np.zeros(3, np.float32))


# Feeds


class CandidateFake(FakeModel):
    """A fake model that also hands over candidates; `asked` holds the count of each pass."""

    def __init__(self, script: str, most: int = 64) -> None:
        super().__init__(script)
        self.max_candidates = most
        self.asked: list[int] = []
        self.prepared: list[int] = []

    def prepare(self, kv: FakeKvCache, context: FakeContext, tokens: int, candidates: int = 0) -> None:
        self.prepared.append(candidates)

    def top_candidates(self, token_ids: Any, kv: FakeKvCache, context: FakeContext, count: int) -> Any:
        self.asked.append(count)
        row = self.forward_with_kv_context_persistent(token_ids, kv, context)
        ids, logits = best_of(row, count)
        return SimpleNamespace(token_ids=ids, logits=logits)


def tokens_of(model: FakeModel, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    feed, sampler = KvFeed(model, 50, context=FakeContext()), Sampler(params)
    feed.open()
    feed.prepare(1, sampler)
    tokens = [feed.next_token([65 + i], sampler) for i in range(4)]
    assert feed.token_ids == [65, 66, 67, 68]
    feed.close()
    return tokens


@pytest.mark.parametrize(
    ("params", "most", "asked"),
    [
        (SamplingParams(), 64, 1),
        (SamplingParams(temperature=0.1, top_k=40, seed=2), 64, 40),
        (SamplingParams(temperature=0.1, top_k=64, seed=2), 64, 64),
        (SamplingParams(temperature=0.1, top_k=65, seed=2), 64, 0),
        (SamplingParams(temperature=0.1, top_k=VOCAB_SIZE, seed=2), VOCAB_SIZE, 0),
        (SamplingParams(temperature=0.1, top_p=0.9, seed=2), 64, 0),
    ],
)
def test_a_feed_asks_for_candidates_where_they_decide(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, most: int, asked: int
) -> None:
    model = CandidateFake("text", most)
    assert tokens_of(model, params, monkeypatch) == tokens_of(FakeModel("text"), params, monkeypatch)
    assert model.asked == [asked] * (4 if asked else 0)
    assert model.prepared == [asked]


def test_a_failing_pass_leaves_the_feed_as_it_was() -> None:
    model = CandidateFake("text")
    model.failures = {1: RuntimeError("lost")}
    feed = KvFeed(model, 50, context=FakeContext())
    feed.open()
    feed.next_token([65], Sampler())
    with pytest.raises(RuntimeError, match="lost"):
        feed.next_token([66, 67], Sampler())
    assert (feed.token_ids, feed.cached_len) == ([65], 1)


# Plans


def plan_with_candidates(
    kv_offset: str, arm: str, lanes: str, fused: bool, seq: int = 1, cut_after: tuple[Op, ...] = ()
) -> tuple[Graph, Any, Plan]:
    options = StepOptions(seq, "last", kv_offset, arm)
    step = with_candidates(step_graph("llama", options), options)
    roots = (splice_host_copy(step.graph, step.logits), *step.effects, *host_copies(step))
    optimized = optimize_graph(step.graph, roots, LOCATION, fusions=FUSIONS if fused else ())
    return step.graph, step, lower(step.graph, optimized, LANES[lanes], cut_after)


@pytest.mark.parametrize("logits", ["all", "none"])
def test_steps_without_a_row_have_no_candidates(logits: str) -> None:
    options = StepOptions(16, logits, "device", "bounded")
    step = step_graph("llama", options)
    nodes = len(step.graph)
    assert with_candidates(step, options).candidates == ()
    assert len(step.graph) == nodes


def test_the_shortest_list_that_suffices_is_chosen() -> None:
    graph, step, _ = plan_with_candidates("device", "bounded", "subgroup", True)
    counts = {}
    for count in (1, 2, MOST_CANDIDATES):
        node = candidates_node(step, count)
        assert node is not None
        counts[count] = graph.attrs(node, TopKAttrs).k
    assert counts == {1: 1, 2: 64, 64: 64}
    assert candidates_node(step, MOST_CANDIDATES + 1) is None


@pytest.mark.parametrize(("seq", "cut_after"), [(1, ()), (16, ()), (16, (Op.ATTENTION,)), (16, (Op.LINEAR,))])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_each_recording_is_ordered_and_holds_what_it_needs(
    kv_offset: str, arm: str, lanes: str, fused: bool, seq: int, cut_after: tuple[Op, ...]
) -> None:
    graph, step, plan = plan_with_candidates(kv_offset, arm, lanes, fused, seq, cut_after)
    kernels = {}
    for wanted in (step.logits, *step.candidates):
        out = left_out(step, wanted)
        kept = [at for at, one in enumerate(plan.dispatches) if one.node not in out]
        order = _steps_without(plan, out)
        numbered = [
            [step if step.kind != "run" else type(step)("run", dispatch=kept.index(step.dispatch)) for step in steps]
            for steps in order
        ]
        accesses = [(plan.dispatches[at].reads, plan.dispatches[at].writes) for at in kept]
        ends = np.cumsum([0, *plan.segments])
        segments = [sum(a <= at < b for at in kept) for a, b in itertools.pairwise(ends)]
        uploads = {one for one in plan.constants if graph.node(one).op is Op.DATA}
        assert faults(numbered, accesses, segments, uploads, {step.logits, wanted}) == []
        in_memory = [[replace(step, buffers=places(plan, step.buffers)) for step in steps] for steps in numbered]
        held = [(places(plan, reads), places(plan, writes)) for reads, writes in accesses]
        assert faults(in_memory, held, segments, targets=places(plan, (step.logits, wanted))) == []
        kernels[wanted] = [plan.dispatches[at].kernel.key.split()[0] for at in kept]
        unsynced = {one for at, run in enumerate(plan.dispatches) if at not in kept for one in run.writes}
        assert not unsynced & {one for steps in order for each in steps if each.kind == "sync" for one in each.buffers}
    row, one, many = kernels.values()
    assert not {"group_max", "top_k"} & set(row)
    assert sorted([*row, "group_max", "top_k"]) == sorted(one) == sorted(many)


def _steps_without(plan: Plan, out: frozenset[NodeId]) -> tuple[tuple[OrderStep, ...], ...]:
    return steps_for(plan, lambda one: one.node not in out)


@pytest.mark.parametrize("k", [0, 65, 161])
def test_more_values_than_there_are_cannot_be_taken(k: int) -> None:
    step = step_graph("llama")
    groups = step.graph.group_max(step.logits)
    with pytest.raises(InvalidInputError, match=f"the {k} highest of 160 values"):
        step.graph.top_k(step.logits, groups, k)


def test_the_highest_of_several_rows_are_refused() -> None:
    step = step_graph("llama", StepOptions(16, "all", "device", "bounded"))
    with pytest.raises(InvalidInputError, match="16 rows"):
        step.graph.group_max(step.logits)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 49_152, 262_144])
def test_enough_groups_hold_a_value(columns: int) -> None:
    """`top_k` takes its values from as many groups."""
    graph = Graph()
    node = graph.node(graph.group_max(graph.data("x", (1, columns))))
    attrs: Any = node.attrs
    groups = np.arange(node.shape[1] // 2)
    first = groups // attrs.width * attrs.width * attrs.length + groups % attrs.width
    assert (first < columns).sum() >= min(columns, MOST_CANDIDATES)
    assert groups.size * attrs.length >= columns
