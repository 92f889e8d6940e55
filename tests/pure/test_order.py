"""The planner's order against hazards derived independently: by hand, and over random programs of dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_check import (
    Access,
    Bytes,
    Dependence,
    barriers,
    dependences,
    faults,
    runs_of,
    segments_of,
    without_each_barrier,
)

from vkdecode.runtime import OrderStep, Plan, Span, plan_order, steps_for

Order = tuple[tuple[OrderStep, ...], ...]
Words = tuple[str, str]
"""What a dispatch reads and writes, e.g. `("a b0-8", "c")`: places by letter, all of them or some bytes."""

WHOLE = 64


def accesses_from(words: Sequence[Words]) -> list[Access]:
    return [Access(_regions(reads), _regions(writes)) for reads, writes in words]


def _regions(text: str) -> tuple[Bytes, ...]:
    made = []
    for word in text.split():
        start, _, end = word[1:].partition("-")
        made.append(Bytes(ord(word[0]), int(start or 0), int(end or WHOLE)))
    return tuple(made)


def planned(accesses: Sequence[Access], segments: Sequence[int] = ()) -> Order:
    """What the planner makes of accesses, all in one submission by default."""
    spans = [tuple([Span(*one) for one in part] for part in use) for use in accesses]
    return plan_order([(reads, writes) for reads, writes in spans], segments or (len(accesses),))


def told(*words: Words) -> str:
    """One submission's steps in short."""
    (steps,) = planned(accesses_from(words))
    return " ".join(
        f"|{''.join(map(chr, step.places))}|" if step.kind == "barrier" else str(step.dispatch) for step in steps
    )


# By hand


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        pytest.param([("", "a"), ("a", "b")], "0 |a| 1", id="a reader waits for the writer"),
        pytest.param([("x", "a"), ("a", "x")], "0 |a| 1", id="one barrier for both"),
        pytest.param([("x", "a"), ("y", "x")], "0 |a| 1", id="an overwrite waits for the reader"),
        pytest.param([("x", ""), ("", "x")], "0 |x| 1", id="and for one that wrote nothing"),
        pytest.param([("", "a"), ("", "a")], "0 |a| 1", id="an overwrite waits for the writer"),
        pytest.param([("x", "a"), ("x", "b"), ("a b", "c")], "0 1 |ab| 2", id="what is independent does not wait"),
        pytest.param([("", "a"), ("a", "b"), ("a", "c"), ("a b c", "d")], "0 |a| 1 2 |bc| 3", id="one serves all"),
        pytest.param([("", "a b"), ("a", "c"), ("b c", "d")], "0 |ab| 1 |c| 2", id="all that was written is named"),
        pytest.param([("x", "x"), ("y", "y")], "0 1", id="no dispatch waits for itself"),
        pytest.param([("", "a0-16"), ("a16-32", "b"), ("", "a16-32")], "0 1 |ab| 2", id="bytes beside are free"),
        pytest.param([("", "a0-17"), ("a16-32", "b")], "0 |a| 1", id="one byte is enough"),
        pytest.param([("", "a"), ("", "b"), ("b", "c"), ("a", "d")], "0 1 |ab| 2 3", id="the old is ordered"),
        pytest.param([], "", id="nothing"),
    ],
)  # fmt: skip
def test_barriers_stand_where_something_must_wait(words: list[Words], steps: str) -> None:
    assert told(*words) == steps


def test_submissions_are_ordered_by_the_wait_between_them() -> None:
    accesses = accesses_from([("x", "a"), ("a", "b"), ("a b", "x"), ("x", "a")])
    order = planned(accesses, (1, 2, 1))
    assert [[step.kind for step in steps] for steps in order] == [["run"], ["run", "barrier", "run"], ["run"]]
    assert faults(order, accesses, [[0], [1, 2], [3]]) == []


# The judge itself


@pytest.mark.parametrize(
    ("words", "steps", "text"),
    [
        ([("", "a"), ("a", "b")], "0 1", "RAW: dispatches 0 and 1 on 97"),
        ([("", "a"), ("a", "b")], "|a| 0 1 |a|", "RAW"),
        ([("", "a"), ("a", "b")], "0 |b| 1", "RAW"),
        ([("", "a"), ("", "a")], "0 1", "WAW: dispatches 0 and 1 on 97"),
        ([("", "a"), ("", "a")], "0 |b| 1", "WAW"),
        ([("a", ""), ("", "a")], "0 1", "WAR: dispatches 0 and 1 on 97"),
        ([("", "a"), ("b", ""), ("a", "")], "0 |b| 1 2", "RAW: dispatches 0 and 2"),
        ([("", "a0-17"), ("a16-32", "")], "0 1", "RAW"),
        ([("", "a"), ("a", "b")], "1 |a| 0", "runs"),
        ([("", "a"), ("a", "b")], "0 |a|", "runs"),
        ([("", "a"), ("a", "b")], "0 0 |a| 1", "runs"),
    ],
)
def test_the_judge_finds_what_is_wrong(words: list[Words], steps: str, text: str) -> None:
    accesses = accesses_from(words)
    (found,) = faults((_steps(steps),), accesses, [range(len(words))])
    assert text in found


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([("", "a"), ("a", "b")], "0 |a| 1"),
        ([("", "a"), ("x", "b"), ("a", "")], "0 1 |ab| 2"),
        ([("a", ""), ("", "a")], "0 |b| 1"),
        ([("", "a0-16"), ("a16-32", "")], "0 1"),
        ([("a", "b"), ("a", "c")], "0 1"),
        ([("", "a"), ("x", ""), ("a", "")], "0 |a| 1 |x| 2"),
    ],
)
def test_the_judge_lets_pass_what_is_right(words: list[Words], steps: str) -> None:
    assert faults((_steps(steps),), accesses_from(words), [range(len(words))]) == []


def _steps(text: str) -> tuple[OrderStep, ...]:
    return tuple(
        OrderStep("barrier", tuple(map(ord, word.strip("|")))) if "|" in word else OrderStep("run", dispatch=int(word))
        for word in text.split()
    )


def test_dependences_are_of_all_kinds_and_within_a_submission() -> None:
    accesses = accesses_from([("x", "a"), ("a", "x"), ("", "a"), ("a x", "")])
    a, x = map(ord, "ax")
    assert dependences(accesses, [range(3), [3]]) == {
        Dependence("RAW", a, 0, 1),
        Dependence("WAR", x, 0, 1),
        Dependence("WAR", a, 1, 2),
        Dependence("WAW", a, 0, 2),
    }


# Random programs


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Access], tuple[int, ...]]:
    """Dispatches that read and write some bytes of a few memories at will, cut into submissions."""
    regions = st.builds(
        lambda place, start, size: Bytes(place, 16 * start, 16 * (start + size)),
        st.integers(-2, 3),
        st.integers(0, 3),
        st.integers(1, 3),
    )
    parts = st.lists(regions, max_size=3).map(tuple)
    segments = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    return [Access(draw(parts), draw(parts)) for _ in range(sum(segments))], segments


def expected(segments: Sequence[int]) -> list[range]:
    starts = [sum(segments[:number]) for number in range(len(segments))]
    return [range(start, start + count) for start, count in zip(starts, segments, strict=True)]


@given(programs())
def test_every_program_is_ordered(made: tuple[list[Access], tuple[int, ...]]) -> None:
    accesses, segments = made
    order = planned(accesses, segments)
    assert faults(order, accesses, expected(segments)) == []
    assert all(steps[0].kind == steps[-1].kind == "run" for steps in order)


@given(programs())
def test_no_barrier_is_there_for_nothing(made: tuple[list[Access], tuple[int, ...]]) -> None:
    accesses, segments = made
    order = planned(accesses, segments)
    for reduced in without_each_barrier(order):
        assert faults(reduced, accesses, expected(segments)) != []


@given(programs())
def test_barriers_are_as_few_as_can_be(made: tuple[list[Access], tuple[int, ...]]) -> None:
    accesses, segments = made
    order = planned(accesses, segments)
    depends = dependences(accesses, expected(segments))
    assert bool(barriers(order)) == bool(depends)
    # As few as can be: dispatches between two barriers depend on none of their own, and the next one on one of them.
    for steps in order:
        since: list[int] = []
        for at, step in enumerate(steps):
            if step.kind == "barrier":
                after = steps[at + 1].dispatch
                assert any((one.first, one.second) == (first, after) for one in depends for first in since)
                since = []
            else:
                since.append(step.dispatch)


@given(programs(), st.data())
@settings(max_examples=200)
def test_a_recording_that_leaves_dispatches_out_is_ordered(
    made: tuple[list[Access], tuple[int, ...]], data: st.DataObject
) -> None:
    accesses, segments = made
    kept = data.draw(st.sets(st.integers(0, len(accesses) - 1)))
    order = planned(accesses, segments)
    dispatches = tuple(cast(Any, index) for index in range(len(accesses)))
    plan = Plan(dispatches, order, {}, (), {}, (), ())
    steps = steps_for(plan, lambda one: cast(Any, one) in kept)
    assert faults(steps, accesses, segments_of(order, kept)) == []
    assert steps_for(plan, lambda _: True) == order
    assert barriers(steps) <= barriers(order)
    for one in steps:
        kinds = [step.kind for step in one]
        assert kinds[:1] + kinds[-1:] in ([], ["run", "run"])
        assert all(pair != ("barrier", "barrier") for pair in pairwise(kinds))


def test_leaving_dispatches_out_merges_their_barriers() -> None:
    accesses = accesses_from([("", "a"), ("a", "b"), ("b", "c"), ("a", "d")])
    order = planned(accesses)
    plan = Plan(tuple(cast(Any, index) for index in range(4)), order, {}, (), {}, (), ())
    (steps,) = steps_for(plan, lambda one: cast(Any, one) in (0, 3))
    assert runs_of(steps) == [0, 3]
    assert steps[1] == OrderStep("barrier", tuple(map(ord, "ab")))
    # Without what the barriers of the others named, the last one would be wrong.
    (wrong,) = [tuple(replace(step, places=(ord("b"),)) if step.places else step for step in steps)]
    assert faults((wrong,), accesses, [[0, 3]]) == ["RAW: dispatches 0 and 3 on 97"]
