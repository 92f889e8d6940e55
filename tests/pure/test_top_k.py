"""Candidates instead of a row: the same token from the same seed, and recordings that hold only what is asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import VOCAB_SIZE, FakeContext, FakeKvCache, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from order_check import accesses_of, faults, missing, segments_of
from tiny_llama import LANES, LOCATION, PATHS, step_graph

from vkdecode.decode import MAX_TOP_K, StepGraph, StepOptions
from vkdecode.decode.top_k import left_out, top_k_node, with_top_k
from vkdecode.errors import InvalidInputError, VkDecodeError
from vkdecode.graph import FUSIONS, Graph, Op, TopKAttrs, optimize_graph, splice_host_copy
from vkdecode.runtime import WORK_PER_SUBMISSION, Dispatch, OrderStep, Plan, lower, steps_for
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


@functools.cache
def plan_with_top_k(
    kv_offset: str, arm: str, lanes: str, fused: bool, seq: int = 1, work: int = WORK_PER_SUBMISSION
) -> tuple[Graph, StepGraph, Plan]:
    options = StepOptions(seq, "last", kv_offset, arm)
    step = with_top_k(step_graph("llama", options), options)
    graph = step.graph
    roots = (splice_host_copy(graph, step.logits), *step.effects, *(splice_host_copy(graph, one) for one in step.top_k))
    optimized = optimize_graph(graph, roots, LOCATION, fusions=FUSIONS if fused else ())
    return graph, step, lower(graph, optimized, LANES[lanes], 1 << 30, work)


@pytest.mark.parametrize("logits", ["all", "none"])
def test_steps_without_a_row_have_no_lists(logits: str) -> None:
    options = StepOptions(16, logits, "device", "bounded")
    step = step_graph("llama", options)
    nodes = len(step.graph)
    assert with_top_k(step, options).top_k == ()
    assert len(step.graph) == nodes


def test_the_shortest_list_that_suffices_is_chosen() -> None:
    graph, step, plan = plan_with_top_k("device", "bounded", "subgroup", True)
    ks = {}
    for k in (1, 2, MAX_TOP_K):
        node = top_k_node(step, k)
        assert node is not None
        ks[k] = graph.attrs(node, TopKAttrs).k
    assert ks == {1: 1, 2: 64, 64: 64}
    assert top_k_node(step, MAX_TOP_K + 1) is None
    assert plan.results == {step.logits: 640, step.top_k[0]: 8, step.top_k[1]: 512}


@pytest.mark.parametrize(("seq", "work"), [(1, WORK_PER_SUBMISSION), (16, WORK_PER_SUBMISSION), (16, 400_000)])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_each_recording_is_ordered_and_holds_what_it_needs(
    kv_offset: str, arm: str, lanes: str, fused: bool, seq: int, work: int
) -> None:
    graph, step, plan = plan_with_top_k(kv_offset, arm, lanes, fused, seq, work)
    accesses = accesses_of(graph, plan)
    kernels = {}
    for wanted in (step.logits, *step.top_k):
        out = left_out(step, wanted)
        for held in (False, True):  # a held recording also leaves out what takes symbols: the moves of rows
            kept = [at for at, one in enumerate(plan.dispatches) if one.node not in out]
            kept = [at for at in kept if not (held and moves(graph, plan.dispatches[at]))]
            order = recorded(plan, kept)
            assert faults(order, accesses, segments_of(plan.order, kept)) == []
            assert missing(graph, plan, kept, [wanted]) == []
        kernels[wanted] = [plan.dispatches[at].kernel.key.split()[0] for at in kept]
        others = {*plan.results} - {step.logits, wanted}
        assert len(missing(graph, plan, kept, others)) == len(others)
    row, one, many = kernels.values()
    assert not {"group_max", "top_k", "kv_move"} & set(row)
    assert sorted([*row, "group_max", "top_k"]) == sorted(one) == sorted(many)


def recorded(plan: Plan, kept: Sequence[int]) -> tuple[tuple[OrderStep, ...], ...]:
    nodes = {plan.dispatches[at].node for at in kept}
    return steps_for(plan, lambda one: one.node in nodes)


def moves(graph: Graph, dispatch: Dispatch) -> bool:
    return graph.node(dispatch.node).op is Op.KV_MOVE


@pytest.mark.parametrize("fused", [True, False])
def test_what_leaves_out_too_much_is_found(fused: bool) -> None:
    """Each dispatch but those of the other lists is needed by the list that is wanted."""
    graph, step, plan = plan_with_top_k("symenv", "masked", "subgroup", fused)
    wanted = step.top_k[0]
    out = left_out(step, wanted)
    kept = [at for at, one in enumerate(plan.dispatches) if one.node not in out and not moves(graph, one)]
    writes_of_rows = 0
    for one in kept:
        found = missing(graph, plan, [at for at in kept if at != one], [wanted])
        only_rows = graph.node(plan.dispatches[one].node).op is Op.KV_WRITE
        writes_of_rows += only_rows
        assert bool(found) != only_rows  # what a cache holds is not looked at
    assert writes_of_rows == (0 if fused else 2)


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
    assert (first < columns).sum() >= min(columns, MAX_TOP_K)
    assert groups.size * attrs.length >= columns
