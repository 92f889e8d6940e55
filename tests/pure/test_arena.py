"""Where activations lie: never where another one is still needed, and as soon as that is free again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_check import Access, Bytes, Order, barriers, faults, segments_of

from vkdecode.graph import NodeId
from vkdecode.runtime import Span, arena_place, place_activations, plan_order

Uses = list[tuple[tuple[NodeId, ...], tuple[NodeId, ...]]]
LINE = 256  # where one activation ends, the next begins a line further
CACHES = range(1000, 1003)
ROOMY = 1 << 30


def uses_from(*words: str) -> Uses:
    """Dispatches as `"0 1>2"`: what is read, what is written."""
    parts = [word.split(">") for word in words]
    return [tuple(tuple(NodeId(int(one)) for one in part.split()) for part in pair) for pair in parts]  # type: ignore[misc]  # pairs


def placed(uses: Uses, segments: Sequence[int], sizes: Mapping[NodeId, int], most: int = ROOMY) -> dict[NodeId, Span]:
    return place_activations(uses, segments, sizes, most)[0]


def equal(uses: Uses, nbytes: int = LINE) -> dict[NodeId, int]:
    return {node: nbytes for _, writes in uses for node in writes}


def clobbered(uses: Uses, spans: Mapping[NodeId, Span]) -> list[str]:
    """Who reads bytes that another activation has taken: each write leaves its name on every byte, each read looks.

    A dispatch reads and writes at once.
    """
    memory: dict[tuple[int, int], NodeId] = {}
    found = []
    for index, (reads, writes) in enumerate(uses):
        for node in reads:
            if node in spans and any(memory.get(byte, "poison") != node for byte in _bytes(spans[node])):
                found.append(f"dispatch {index} reads {node}")
        for node in (one for one in writes if one in spans):
            if any(spans[node].overlaps(spans[one]) for one in (*reads, *writes) if one != node and one in spans):
                found.append(f"dispatch {index} writes {node} where something else is")
            memory |= dict.fromkeys(_bytes(spans[node]), node)
    return found


def _bytes(span: Span) -> list[tuple[int, int]]:
    """Its bytes, by the 16 that are counted together."""
    return [(span.place, at) for at in range(span.start, span.end, 16)]


def regions(uses: Uses, spans: Mapping[NodeId, Span]) -> list[Access]:
    """Accesses for the judge of the order; caches and what is not placed have memories of their own."""

    def of(nodes: Sequence[NodeId]) -> tuple[Bytes, ...]:
        return tuple(Bytes(*spans[node]) if node in spans else Bytes(int(node), 0, 16) for node in nodes)

    return [Access(of(reads), of(writes)) for reads, writes in uses]


def ordered(uses: Uses, segments: Sequence[int], spans: Mapping[NodeId, Span]) -> int:
    """How many barriers order the dispatches in these places; they must be right."""
    order = planned(uses, segments, spans)
    assert not unordered(uses, spans, order)
    return barriers(order)


def planned(uses: Uses, segments: Sequence[int], spans: Mapping[NodeId, Span]) -> Order:
    found = regions(uses, spans)
    return plan_order(
        [([Span(*one) for one in reads], [Span(*one) for one in writes]) for reads, writes in found], segments
    )


def unordered(uses: Uses, spans: Mapping[NodeId, Span], order: Order) -> bool:
    return faults(order, regions(uses, spans), segments_of(order)) != []


# By hand


def test_a_chain_takes_turns_on_two_places() -> None:
    uses = uses_from(">0", "0>1", "1>2", "2>3", "3>4")
    spans = placed(uses, [5], equal(uses))
    assert [spans[NodeId(node)].start for node in range(5)] == [0, LINE, 0, LINE, 0]
    assert {span.place for span in spans.values()} == {arena_place(0)}


def test_what_no_barrier_separates_shares_nothing() -> None:
    uses = uses_from(">0", ">1", ">2", "9>3")
    spans = placed(uses, [4], equal(uses))
    assert len({span.start for span in spans.values()}) == 4


def test_a_barrier_that_others_need_frees_what_is_dead_before_it() -> None:
    """2 is read last by dispatch 3; dispatch 4 waits for 3, and dispatch 5, which waits for nothing, may have it."""
    uses = uses_from(">0", ">1", "0 1>2", "2>3", "3>4", "9>5")
    spans = placed(uses, [6], equal(uses))
    assert spans[NodeId(4)].start in (spans[NodeId(one)].start for one in (0, 1, 2))
    assert spans[NodeId(5)].start in (spans[NodeId(one)].start for one in (0, 1, 2))
    assert not spans[NodeId(4)].overlaps(spans[NodeId(5)])


def test_a_new_submission_frees_what_is_dead() -> None:
    uses = uses_from(">0", "9>1", "9>2")
    assert placed(uses, [2, 1], equal(uses))[NodeId(2)].start == 0
    assert placed(uses, [3], equal(uses))[NodeId(2)].start == 2 * LINE


def test_a_small_one_takes_the_first_gap_that_is_large_enough() -> None:
    uses = uses_from(">0", ">1", ">2", "0 1 2>3", "1 3>4", "1 4>5")
    sizes = {NodeId(node): size for node, size in enumerate((600, 16, 100, 16, 768, 300))}
    spans = placed(uses, [6], sizes)
    assert [(spans[NodeId(node)].start, spans[NodeId(node)].end) for node in range(6)] == [
        (0, 608),
        (768, 784),
        (1024, 1136),
        (1280, 1296),
        (0, 768),
        (1024, 1328),
    ]


def test_a_full_arena_is_followed_by_another() -> None:
    uses = uses_from(">0", ">1", ">2", "0 1 2>3")
    spans, arenas = place_activations(uses, [4], equal(uses), 2 * LINE)
    assert [(span.place, span.start) for span in spans.values()] == [
        (arena_place(0), 0),
        (arena_place(0), LINE),
        (arena_place(1), 0),
        (arena_place(1), LINE),
    ]
    assert arenas == (2 * LINE, 2 * LINE)


@pytest.mark.parametrize("most", [1 << 12, (1 << 12) + 16])
def test_an_activation_as_large_as_an_arena_may_be_fits_one(most: int) -> None:
    uses = uses_from(">0", "0>1")
    spans, arenas = place_activations(uses, [2], equal(uses, most), most)
    assert arenas == (most, most)
    assert {span.end for span in spans.values()} == {most}


def test_caches_and_results_have_no_place() -> None:
    uses = uses_from("5>0", "0>1", "1>1000")
    spans, arenas = place_activations(uses, [3], {NodeId(0): 16}, ROOMY)
    assert spans == {NodeId(0): Span(arena_place(0), 0, 16)}
    assert arenas == (16,)


# Random programs


@st.composite
def programs(draw: st.DrawFn, caches: bool = True) -> tuple[Uses, tuple[int, ...], dict[NodeId, int]]:
    """Dispatches that each write new activations, and perhaps a cache, from what was written before."""
    segments = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    uses: Uses = []
    made: list[NodeId] = []
    sizes: dict[NodeId, int] = {}
    for _ in range(sum(segments)):
        known = [*made[-6:], *(CACHES if caches else ()), 2000]
        reads = draw(st.lists(st.sampled_from(known), max_size=3))
        writes = [NodeId(len(made) + more) for more in range(draw(st.integers(0 if caches else 1, 2)))]
        sizes |= {node: draw(st.sampled_from((16, 240, 256, 272, 1000))) for node in writes}
        made += writes
        written = draw(st.lists(st.sampled_from(CACHES), max_size=1)) if caches else []
        uses.append((tuple(map(NodeId, reads)), (*writes, *map(NodeId, written))))
    return uses, segments, sizes


Program = tuple[Uses, tuple[int, ...], dict[NodeId, int]]
MOST = st.sampled_from((1024, 1056, 2048, ROOMY))


@given(programs(), MOST)
@settings(max_examples=300)
def test_no_two_live_activations_overlap(made: Program, most: int) -> None:
    uses, segments, sizes = made
    spans, arenas = place_activations(uses, segments, sizes, most)
    assert spans.keys() == sizes.keys()
    assert clobbered(uses, spans) == []
    ordered(uses, segments, spans)
    for node, span in spans.items():
        number = -1 - span.place
        assert span.start >= 0 and sizes[node] <= span.end - span.start and span.end <= arenas[number] <= most
        assert span.start % LINE == 0
    ends = [max((span.end for span in spans.values() if span.place == arena_place(one)), default=0) for one in range(9)]
    assert tuple(ends[: len(arenas)]) == arenas


@given(programs(caches=False), MOST)
def test_sharing_memory_takes_no_barrier(made: Program, most: int) -> None:
    uses, segments, sizes = made
    alone = {node: Span(-1 - number, 0, sizes[node]) for number, node in enumerate(sizes)}
    assert ordered(uses, segments, placed(uses, segments, sizes, most)) == ordered(uses, segments, alone)


@given(programs(), MOST)
def test_memory_is_taken_as_soon_as_a_barrier_allows(made: Program, most: int) -> None:
    """Each activation lies in the first place that does not meet one that is used since the last barrier, or later."""
    uses, segments, sizes = made
    spans = placed(uses, segments, sizes, most)
    since = _last_barriers(uses, segments)
    before: list[NodeId] = []
    for index, (_, writes) in enumerate(uses):
        for node in (one for one in writes if one in sizes):
            live = [spans[one] for one in before if _last_use(uses, one) >= since[index]]
            first = min(_places(live, sizes[node], most), key=lambda one: (-one.place, one.start))
            assert (spans[node].place, spans[node].start) == (first.place, first.start)
            before.append(node)


def _last_barriers(uses: Uses, segments: Sequence[int]) -> list[int]:
    """For each dispatch the first one behind the last barrier: it reads what was written behind the one before it."""
    starts = {sum(segments[:number]) for number in range(len(segments))}
    found: list[int] = []
    for index, (reads, _) in enumerate(uses):
        since = found[-1] if found else 0
        waits = any(set(reads) & set(uses[earlier][1]) for earlier in range(since, index))
        found.append(index if waits or index in starts else since)
    return found


def _last_use(uses: Uses, node: NodeId) -> int:
    return max(index for index, (reads, writes) in enumerate(uses) if node in reads or node in writes)


def _places(live: Sequence[Span], nbytes: int, most: int) -> list[Span]:
    """Wherever so many bytes meet nothing that is live, at the start of an arena or behind what is live."""
    nbytes = -(-nbytes // 16) * 16
    arenas = range(1 + max((-span.place for span in live), default=0))
    ends = [(-1 - span.place, -(-span.end // LINE) * LINE) for span in live]
    found = [Span(arena_place(arena), start, start + nbytes) for arena, start in [*((one, 0) for one in arenas), *ends]]
    return [one for one in found if one.end <= most and not any(one.overlaps(other) for other in live)]


# Controls


def test_an_activation_on_top_of_a_live_one_is_found() -> None:
    uses = uses_from(">0", "0>1", "1 0>2", "2>3")
    spans = placed(uses, [4], equal(uses))
    assert clobbered(uses, spans) == []
    for one, other in ((1, 0), (2, 1), (3, 2)):
        taken = spans[NodeId(other)]
        for where in (taken, taken._replace(start=taken.end - 16, end=taken.end + 16)):
            assert clobbered(uses, {**spans, NodeId(one): where}) != []


def test_what_was_never_written_is_found() -> None:
    uses = uses_from("1>0", "0>1")
    assert clobbered(uses, placed(uses, [2], equal(uses))) == ["dispatch 0 reads 1"]


@given(programs(caches=False))
def test_a_place_taken_a_barrier_too_early_is_found(made: Program) -> None:
    """What is written may not lie where something is that is used, or was since the last barrier."""
    uses, segments, sizes = made
    spans = placed(uses, segments, sizes)
    since = _last_barriers(uses, segments)
    order = planned(uses, segments, spans)
    for index, (_, writes) in enumerate(uses):
        used = [node for reads, others in uses[since[index] : index + 1] for node in (*reads, *others) if node in sizes]
        for one, other in ((one, other) for one in writes if one in sizes for other in used if other != one):
            taken = {**spans, one: spans[other]}
            assert clobbered(uses, taken) or unordered(uses, taken, order)
