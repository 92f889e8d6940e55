"""The planner's order against hazards derived independently, by hand and over random access lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from order_check import Access, dependences, faults, without_each_sync

from vkdecode.errors import InvalidInputError
from vkdecode.graph import NodeId
from vkdecode.runtime import Hazard, OrderStep, plan_order

KV = 100  # buffers from here on cannot be synced, like KV caches

Order = tuple[tuple[OrderStep, ...], ...]


def planned(
    accesses: Sequence[Access],
    segments: Sequence[int] = (),
    uploads: Sequence[int] = (),
    targets: Sequence[int] = (),
    places: Mapping[int, int] | None = None,
) -> tuple[Order, tuple[Hazard, ...]]:
    """Plan with every buffer below `KV` syncable, and all in one segment by default."""
    named = [([NodeId(one) for one in reads], [NodeId(one) for one in writes]) for reads, writes in accesses]
    syncable = {one for pair in named for part in pair for one in part if one < KV}
    return plan_order(
        named,
        segments or (len(accesses),),
        syncable,
        [NodeId(one) for one in uploads],
        [NodeId(one) for one in targets],
        {NodeId(one): NodeId(place) for one, place in (places or {}).items()},
    )


def told(order: Order) -> list[str]:
    """One segment's steps in short."""
    (steps,) = order
    return [f"{step.kind} {step.dispatch if step.kind == 'run' else list(step.buffers)}" for step in steps]


def test_a_reader_waits_for_the_writer() -> None:
    order, hazards = planned([((), (0,)), ((0,), (1,))], targets=(1,))
    assert told(order) == ["run 0", "sync [0]", "run 1", "sync [1]"]
    assert hazards == (Hazard("RAW", NodeId(0), 0, 1, 1),)


def test_independent_dispatches_do_not_wait() -> None:
    order, hazards = planned([((9,), (0,)), ((9,), (1,)), ((0, 1), (2,))])
    assert told(order) == ["run 0", "run 1", "sync [0, 1]", "run 2"]
    assert {(one.kind, one.first, one.second) for one in hazards} == {("RAW", 0, 2), ("RAW", 1, 2)}


def test_one_sync_serves_all_later_readers() -> None:
    order, _ = planned([((), (0,)), ((0,), (1,)), ((0,), (2,)), ((0, 1, 2), (3,))])
    assert told(order) == ["run 0", "sync [0]", "run 1", "run 2", "sync [1, 2]", "run 3"]


def test_only_what_was_written_here_is_waited_for() -> None:
    order, hazards = planned([((7, 8, KV), (0,)), ((7, 8), (1,))], uploads=(7, 8))
    assert told(order) == ["upload [7, 8]", "run 0", "run 1"]
    assert hazards == ()


def test_an_overwrite_waits_for_the_readers_through_any_sync() -> None:
    order, hazards = planned([((KV,), (0,)), ((9,), (KV,))])
    assert told(order) == ["run 0", "sync [0]", "run 1"]
    assert hazards == (Hazard("WAR", NodeId(KV), 0, 1, 1),)


def test_an_overwrite_needs_no_sync_of_its_own_behind_another_one() -> None:
    order, hazards = planned([((KV,), (0,)), ((0,), (1,)), ((9,), (KV,))])
    assert told(order) == ["run 0", "sync [0]", "run 1", "run 2"]
    assert Hazard("WAR", NodeId(KV), 0, 2, 1) in hazards


def test_a_dispatch_that_reads_and_overwrites_one_buffer_does_not_wait_for_itself() -> None:
    order, hazards = planned([((KV,), (0, KV))], targets=(0,))
    assert told(order) == ["run 0", "sync [0]"]
    assert hazards == ()


def test_what_takes_the_place_of_another_waits_for_its_readers() -> None:
    accesses = [((0,), (1,)), ((1,), (2,)), ((2,), (3,))]
    order, hazards = planned(accesses, uploads=(0,), targets=(3,), places={0: 9, 3: 9})
    assert told(order) == ["upload [0]", "run 0", "sync [1]", "run 1", "sync [2]", "run 2", "sync [3]"]
    assert Hazard("WAR", NodeId(3), 0, 2, 4) in hazards


@pytest.mark.parametrize(
    ("accesses", "text"),
    [
        ([((0,), (1,)), ((0,), (3,))], None),
        ([((0,), ()), ((), (3,))], "dispatch 1 overwrites .* nothing can order them"),
        (
            [((), (3,)), ((3,), (1,)), ((0,), (2,))],
            "dispatch 2 reads buffer 0, which another one has taken the place of",
        ),
        ([((), (0,)), ((0,), (1,)), ((1,), (3,))], "buffer 9 is written by dispatches 0 and 2"),
    ],
)
def test_a_place_that_cannot_be_taken_in_order_is_refused(accesses: list[Access], text: str | None) -> None:
    if text is None:
        order, _ = planned(accesses, places={0: 9, 3: 9})
        assert told(order) == ["run 0", "sync [1]", "run 1"]
        return
    with pytest.raises(InvalidInputError, match=text):
        planned(accesses, places={0: 9, 3: 9})


def test_submissions_are_ordered_by_the_wait_between_them() -> None:
    order, hazards = planned(
        [((5,), (0,)), ((0,), (1,)), ((1, 0), (KV, 2))], segments=(1, 1, 1), uploads=(5,), targets=(2,)
    )
    assert [[step.kind for step in steps] for steps in order] == [["upload", "run"], ["run"], ["run", "sync"]]
    assert hazards == ()


def test_a_target_from_an_earlier_submission_is_copied_at_the_end() -> None:
    order, _ = planned([((), (0,)), ((9,), (1,))], segments=(1, 1), targets=(0,))
    assert order[1][-1] == OrderStep("sync", (NodeId(0),))
    assert faults(order, [((), (0,)), ((9,), (1,))], (1, 1), targets=(0,)) == []


@pytest.mark.parametrize(
    ("accesses", "text"),
    [
        ([((), (0,)), ((), (0,))], "buffer 0 is written by dispatches 0 and 1"),
        ([((), (KV,)), ((KV,), (0,))], "dispatch 1 reads buffer 100, whose write cannot be synced"),
        ([((KV,), ()), ((), (KV,))], "dispatch 1 overwrites .* nothing can order them"),
    ],
)
def test_what_cannot_be_ordered_is_refused(accesses: list[Access], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        planned(accesses)


def test_the_same_in_several_submissions_is_no_trouble() -> None:
    for accesses in ([((), (0,)), ((), (0,))], [((), (KV,)), ((KV,), (0,))], [((KV,), ()), ((), (KV,))]):
        order, _ = planned(accesses, segments=(1, 1))
        assert faults(order, accesses, (1, 1)) == []


# The judge itself


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("run 0, run 1, sync 1", "may read 0 before step 0 wrote it"),
        ("sync 0, run 0, run 1, sync 1", "may read 0 before"),
        ("run 0, sync 1, run 1", "may read 0 before"),
        ("run 0, sync 0, run 1", "target 1 never reaches the host"),
        ("run 0, sync 0, sync 0, run 1, sync 1", "both copy 0"),
        ("run 0, sync 0, run 1, upload 5, sync 1", "uploads after work has begun"),
        ("run 1, sync 0, run 0, sync 1", "runs"),
        ("run 0, sync 0, sync 1", "runs"),
    ],
)
def test_the_judge_finds_what_is_wrong(steps: str, text: str) -> None:
    made = []
    for one in steps.split(", "):
        kind, number = one.split()
        made.append(OrderStep(kind, dispatch=int(number)) if kind == "run" else OrderStep(kind, (NodeId(int(number)),)))
    accesses = [((), (0,)), ((0,), (1,))]
    assert any(text in fault for fault in faults((tuple(made),), accesses, (2,), targets=(1,)))


def test_the_judge_sees_overwriting() -> None:
    war, waw = [((KV,), (0,)), ((), (KV,))], [((), (0,)), ((), (0,))]
    runs = (OrderStep("run", dispatch=0), OrderStep("run", dispatch=1))
    assert any("may overwrite 100" in fault for fault in faults((runs,), war, (2,)))
    assert any("both write 0" in fault for fault in faults((runs,), waw, (2,)))
    assert faults((runs,), war, (2,), uploads=(7,)) != []


# Random access lists


@st.composite
def access_lists(draw: st.DrawFn, refusable: bool = False) -> tuple[list[Access], tuple[int, ...]]:
    """Dispatches in single assignment, cut into segments.

    Each writes a fresh buffer, perhaps also a cache that nothing of its segment reads after it. With `refusable` caches
    are read and written at will, and fresh buffers may be missing.
    """
    segments = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    accesses: list[Access] = []
    fresh: list[int] = []
    for count in segments:
        closed: set[int] = set()
        for _ in range(count):
            caches = [one for one in range(KV, KV + 3) if refusable or one not in closed]
            reads = set(draw(st.lists(st.sampled_from([*fresh, *range(50, 53)]), max_size=4)))
            reads |= set(draw(st.lists(st.sampled_from(caches), max_size=2))) if caches else set()
            writes = set(draw(st.lists(st.sampled_from(caches), max_size=1))) if caches else set()
            closed |= writes
            if not refusable or draw(st.booleans()):
                fresh.append(len(accesses))
                writes.add(len(accesses))
            accesses.append((tuple(sorted(reads)), tuple(sorted(writes))))
    return accesses, segments


UPLOADS = (50, 51, 52)


def last_writes(accesses: Sequence[Access]) -> tuple[int, ...]:
    return tuple(one for one in list(accesses[-1][1]) if one < KV)


@given(access_lists())
def test_every_single_assignment_list_is_ordered(made: tuple[list[Access], tuple[int, ...]]) -> None:
    accesses, segments = made
    order, hazards = planned(accesses, segments, UPLOADS, last_writes(accesses))
    assert faults(order, accesses, segments, UPLOADS, last_writes(accesses)) == []
    reported = {(one.kind, int(one.buffer), one.first, one.second) for one in hazards}
    assert reported == dependences(accesses, segments)


@given(access_lists(refusable=True))
def test_a_list_is_ordered_or_refused(made: tuple[list[Access], tuple[int, ...]]) -> None:
    accesses, segments = made
    try:
        order, _ = planned(accesses, segments, UPLOADS, last_writes(accesses))
    except InvalidInputError:
        return
    assert faults(order, accesses, segments, UPLOADS, last_writes(accesses)) == []


@given(access_lists())
def test_no_sync_is_there_for_nothing(made: tuple[list[Access], tuple[int, ...]]) -> None:
    accesses, segments = made
    targets = last_writes(accesses)
    order, _ = planned(accesses, segments, UPLOADS, targets)
    for reduced in without_each_sync(order):
        assert faults(reduced, accesses, segments, UPLOADS, targets) != []


@given(access_lists())
def test_each_hazard_names_a_sync_between_its_dispatches(made: tuple[list[Access], tuple[int, ...]]) -> None:
    accesses, segments = made
    order, hazards = planned(accesses, segments)
    where = {step.dispatch: (number, at) for number, steps in enumerate(order) for at, step in enumerate(steps)}
    for hazard in hazards:
        (number, first), (other, second) = where[hazard.first], where[hazard.second]
        step = order[number][hazard.ordered_by]
        assert number == other
        assert first < hazard.ordered_by < second
        assert step.kind == "sync"
        assert hazard.kind == "WAR" or hazard.buffer in step.buffers
