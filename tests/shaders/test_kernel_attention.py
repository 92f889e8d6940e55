"""Grouped-query attention over the rows of a cache, those of the step among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from attention_shapes import SHAPES, Shape
from kernel_lab import (
    F32,
    F64,
    HERE,
    TURN,
    Trial,
    Words,
    axes_of,
    bits,
    blank,
    check,
    device,
    generator,
    normal,
    poisoned,
    subgroup,
)
from kv_rows import KV_DTYPES, empty_cache
from numpy.typing import NDArray

from vkdecode.gpu import DeviceInfo, Lanes, shared_lanes, subgroup_lanes
from vkdecode.runtime import attention_workgroup, max_cached_rows

FORMS = [*(("subgroup", queries) for queries in SHAPES), *(("shared", queries) for queries in SHAPES if queries <= 4)]
KEYS = [f"attention LANES={lanes} KV={kv} QUERIES={queries}" for lanes, queries in FORMS for kv in ("f32", "f16")]


class Way(NamedTuple):
    """How a dispatch is told what it attends to; `landing`: the step's rows are behind those of the conversation."""

    masked: bool
    on_device: bool

    @property
    def landing(self) -> bool:
        return self.masked and not self.on_device

    def __str__(self) -> str:
        return f"{'masked' if self.masked else 'bounded'}-{'on-device' if self.on_device else 'pushed'}"


WAYS = [Way(False, False), Way(False, True), Way(True, False), Way(True, True)]
BOUNDED, LANDING = WAYS[0], WAYS[2]
GARBAGE = 0xFFFF_FFF0
ROWS_BEHIND = 3  # of a cache that no form has a use for


def cases() -> list[Any]:
    """For each form and number of queries all shapes at the device's own width, and two, one a type, at others."""
    out = []
    for at, (lanes, queries) in enumerate(FORMS):
        first = (at + 2 * TURN) % 4
        for number, shape in enumerate(SHAPES[queries]):
            if TURN == 0 or number in (first, first + 1):
                kv, way = ("f32", "f16")[(at + number) % 2], WAYS[(number + at // 2 + TURN) % 4]
                key = f"attention LANES={lanes} KV={kv} QUERIES={queries}"
                out.append(pytest.param(key, way, shape, id=f"{key} {way}"))
    return out


CASES = cases()


class Problem:
    """One kernel at one shape: its random inputs, its dispatch, and what must come out."""

    def __init__(self, key: str, way: Way, shape: Shape, wrong: Mapping[str, int] | None = None) -> None:
        self.axes, self.way, self.shape = axes_of(key), way, shape
        self.window = shape.window
        self.rng = generator(key, way, shape)
        self.cache_rows = shape.max_seq + shape.room + ROWS_BEHIND
        width = shape.heads * shape.head_dim
        # Four columns of nobody before q and those of k and v behind it, where it is among others.
        self.first = 4 if shape.fused else 0
        self.stride = 8 + width + 2 * shape.kv_heads * shape.head_dim if shape.fused else width
        spec = {
            "WORKGROUP": subgroup() if self.axes["LANES"] == "subgroup" else shape.workgroup,
            "KV_HEADS": shape.kv_heads,
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "QUERY_HEADS": shape.query_heads,
            "SCALE_BITS": bits(shape.scale),
            "Q_OFFSET": self.first // 4,
            "Q_STRIDE": self.stride // 4,
            "CAP_BITS": bits(shape.cap),
            "HAS_SINKS": int(shape.sinks),
            "MASKED": int(way.masked),
            "OFFSET_ON_DEVICE": int(way.on_device),
        }
        workgroups = (shape.heads // shape.query_heads, shape.room // shape.query_tokens, 1)
        self.draw(1, 1)
        self.trial = Trial(key, self.buffers(), {**spec, **(wrong or {})}, workgroups)

    def draw(self, cached: int, count: int) -> None:
        """Other inputs: q of the real tokens, the rows of a cache that count, and which of these the mask shows."""
        shape = self.shape
        self.cached, self.count = cached, count
        self.own = shape.max_seq if self.way.landing else cached
        self.q = normal(self.rng, count, shape.heads, shape.head_dim)
        # The position of what is in each row, or -1.
        self.positions = np.full(self.cache_rows, -1)
        held = min(cached, shape.max_seq if self.way.masked else self.cache_rows)
        self.positions[:held] = np.arange(held)
        if self.way.masked:
            hidden = self.rng.random(held) < 0.2
            # With a window the first row's age is that of the step's first token.
            hidden[:1] &= not self.window
            self.positions[:held][hidden] = -1
        step = self.positions[self.own : self.own + count]
        step[:] = cached + np.arange(step.size)
        dtype = KV_DTYPES[self.axes["KV"]]
        self.cache_k = empty_cache(shape.kv_heads, self.cache_rows, shape.head_dim, dtype)
        self.cache_v = self.cache_k.copy()
        at = np.flatnonzero(self.positions >= 0)
        for cache in (self.cache_k, self.cache_v):
            cache[:, at] = normal(self.rng, shape.kv_heads, at.size, shape.head_dim)
        self.sinks = normal(self.rng, shape.heads) * 2 if shape.sinks else poisoned((shape.heads,))

    def hide(self) -> None:
        """Mask all rows before the step."""
        before = np.arange(self.cache_rows) < self.own
        self.positions[before] = -1
        self.cache_k[:, before] = self.cache_v[:, before] = np.nan

    def mask(self) -> F32:
        """Ages where a row is shown and the window asks for them, else zeros; different negative values elsewhere."""
        rows = np.arange(self.shape.max_seq)
        before = self.positions[: rows.size]
        shown = (before >= 0) & (rows < self.own)
        ages = self.cached - rows if self.window else np.zeros(rows.size)
        return np.where(shown, ages, self.rng.choice([-np.inf, -1.0, -1e-30], rows.size)).astype(np.float32)

    def buffers(self) -> dict[str, NDArray[Any]]:
        shape = self.shape
        q: F32 = poisoned((shape.room, self.stride))
        width = shape.heads * shape.head_dim
        q[: self.count, self.first : self.first + width] = self.q.reshape(self.count, width)
        # What a way does not need is poison: it must not be read.
        offset = poisoned((2,), np.uint32)
        if self.way.on_device:
            offset = np.array([GARBAGE, self.own + shape.room], np.uint32)
        return {
            "q": q,
            "cache_k": self.cache_k,
            "cache_v": self.cache_v,
            "y": blank(shape.room * width),
            "token_count": np.array([self.count], np.uint32),
            "sinks": self.sinks,
            "mask": self.mask() if self.way.masked else poisoned((shape.max_seq,)),
            "offset": offset,
        }

    def run(self, wrong: Mapping[str, int] | None = None, **changed: NDArray[Any]) -> Words:
        push = {
            "cache_rows": self.cache_rows,
            "max_seq": self.shape.max_seq if self.way.masked else GARBAGE,
            "step_tokens": self.shape.room,
            "window": self.window,
            "attended_len": GARBAGE if self.way.on_device else self.own + self.shape.room,
        }
        return self.trial.run({**push, **(wrong or {})}, **{**self.buffers(), **changed})["y"]

    def expected(self) -> tuple[F64, F64]:
        """Values [room, heads, head_dim], NaN for padding, and the size that their errors are relative to."""
        shape = self.shape
        values = np.full((shape.room, shape.heads, shape.head_dim), np.nan)
        sizes = np.full_like(values, np.nan)
        at = np.flatnonzero(self.positions >= 0)
        keys, rows = (cache[:, at].astype(np.float64) for cache in (self.cache_k, self.cache_v))
        positions, own = self.positions[at], self.cached + np.arange(self.count)[:, None]
        seen = (positions <= own) & ((positions > own - self.window) | (self.window == 0))
        q = self.q.reshape(self.count, shape.kv_heads, shape.group, shape.head_dim).astype(np.float64)
        scale = float(np.float32(shape.scale))
        scores = np.einsum("tkgd,krd->tkgr", q, keys) * scale
        score_sizes = np.einsum("tkgd,krd->tkgr", np.abs(q), np.abs(keys)) * scale
        if shape.cap:
            scores = shape.cap * np.tanh(scores / shape.cap)
        scores = np.where(seen[:, None, None], scores, -np.inf)
        sinks = np.full(shape.heads, -np.inf) if not shape.sinks else self.sinks.astype(np.float64)
        sinks = sinks.reshape(shape.kv_heads, shape.group, 1)
        highest = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
        weights = np.exp(scores - highest)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - highest)
        # A score's rounding error is the relative error of its weight.
        score_size = np.where(seen[:, None, None], score_sizes, 0.0).max(axis=-1)[..., None]
        mixed = np.einsum("tkgr,krd->tkgd", weights, rows)
        size = np.einsum("tkgr,krd->tkgd", weights, np.abs(rows)) * (1 + score_size + shape.cap)
        values[: self.count], sizes[: self.count] = mixed.reshape(self.q.shape), size.reshape(self.q.shape)
        return values, sizes

    def check(self, out: Words) -> None:
        values, sizes = self.expected()
        token = np.arange(self.shape.room)[:, None, None]
        tile = self.shape.query_tokens
        check(out, values, sizes, token < self.count, token < -(-self.count // tile) * tile, roundings=16)


@pytest.mark.parametrize(("key", "way", "shape"), CASES)
def test_attention(key: str, way: Way, shape: Shape) -> None:
    problem = Problem(key, way, shape)
    for count in shape.counts:
        # None, one, an odd number on both sides of a block, as many as leave room, a full cache, more than there is.
        for cached in (0, 1, 7, shape.max_seq - count, shape.max_seq, problem.cache_rows + 5):
            problem.draw(cached, count)
            problem.check(problem.run())
    problem.draw(7, 0)
    problem.check(problem.run())
    problem.trial.close()


# A decode step, and a prefill with several tokens in a workgroup, so that a window ends inside of one.
WINDOWED = [Shape(1, 4, 4, 1, 20, 37, 1, (1,), 16, True, 0.3), Shape(2, 2, 2, 2, 20, 37, 8, (7,), 8, False, 0.3)]
WINDOWS = (1, 2, 5, 8, 16, 19)
CAPS = ((3.0, False, 0), (50.0, False, 5), (0.0, True, 0), (2.0, True, 3))  # cap, whether heads have sinks, window
LANES = ("subgroup", "shared")
PROMPT = "attention LANES={} KV=f32 QUERIES=4"


@pytest.mark.parametrize(
    ("way", "lanes", "shape"),
    [
        pytest.param(way, lanes, shape, id=f"{way}-{lanes}-{number}")
        for at, way in enumerate(WAYS)
        for side, lanes in enumerate(LANES)
        for number, shape in enumerate(WINDOWED)
        if TURN == 0 or (at + 2 * side + number) % 4 in HERE
    ],
)
def test_a_window_hides_what_a_mask_would_at_every_length(way: Way, lanes: str, shape: Shape) -> None:
    problem = Problem(PROMPT.format(lanes), way, shape)
    for (number, problem.window), cached in itertools.product(
        enumerate(WINDOWS), range(shape.max_seq - shape.room + 1)
    ):
        if (number + cached + cached // 4) % 4 in HERE:
            problem.draw(cached, shape.counts[0])
            problem.check(problem.run())
    problem.trial.close()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("shape", WINDOWED, ids=["decode", "prompt"])
@pytest.mark.parametrize(("cap", "sinks", "window"), CAPS)
def test_scores_may_have_a_cap_and_heads_a_sink(lanes: str, shape: Shape, cap: float, sinks: bool, window: int) -> None:
    number = LANES.index(lanes) + 2 * WINDOWED.index(shape) + [one[0] for one in CAPS].index(cap) + TURN
    key = f"attention LANES={lanes} KV=f16 QUERIES=4"
    problem = Problem(key, WAYS[number % 4], replace(shape, window=window, cap=cap, sinks=sinks, scale=1.5))
    for cached in (0, 1, 7, 23):
        problem.draw(cached, shape.counts[0])
        problem.check(problem.run())
    problem.trial.close()


@pytest.mark.parametrize("lanes", LANES)
def test_a_capped_score_neither_overflows_nor_loses_its_sign(lanes: str) -> None:
    problem = Problem(PROMPT.format(lanes), BOUNDED, replace(SHAPES[4][1], cap=20.0))
    problem.draw(29, 8)
    problem.cache_k[:, :29] *= np.float32(1e6)
    problem.check(problem.run())


@pytest.mark.parametrize("lanes", LANES)
def test_every_row_may_be_masked(lanes: str) -> None:
    """Then the step's own rows alone count."""
    for way in WAYS[2:]:
        problem = Problem(f"attention LANES={lanes} KV=f16 QUERIES=4", way, SHAPES[4][1])
        problem.draw(9, 5)
        problem.hide()
        problem.check(problem.run())


@pytest.mark.parametrize("lanes", LANES)
def test_scores_far_apart_neither_overflow_nor_vanish(lanes: str) -> None:
    """The running maximum moves by thousands, in both directions, over several blocks."""
    problem = Problem(PROMPT.format(lanes), BOUNDED, SHAPES[4][1])
    problem.draw(37, 8)
    for first, factor in ((0, 1.0), (11, 3000.0), (20, 1.0), (29, 30.0)):
        problem.cache_k[:, first:37] = normal(problem.rng, 1, 37 - first, 20) * np.float32(factor)
    problem.check(problem.run())


@pytest.mark.parametrize("form", [subgroup_lanes, shared_lanes])
def test_the_longest_cache_of_a_cpu_driver_is_read_to_its_end(form: Callable[[DeviceInfo], Lanes]) -> None:
    lanes = form(device().info)
    head_dim = 64
    rows = max_cached_rows(lanes, head_dim)
    max_seq = rows - 1 - ROWS_BEHIND
    shape = Shape(1, 4, 4, 1, head_dim, max_seq, 1, (1,), attention_workgroup(lanes), False, 1.0)
    problem = Problem(PROMPT.format(lanes.form), BOUNDED, shape)
    problem.positions = np.arange(rows)
    problem.cached = problem.own = rows - 1
    problem.cache_k[:] = problem.cache_v[:] = 0.0
    problem.cache_v[0, -1] = rows  # the mean over all rows is 1 because of the last one alone
    y = problem.run()[: 4 * head_dim].view(np.float32)
    np.testing.assert_allclose(y, 1.0, rtol=1e-3)


def test_the_cases_reach_each_kernel_and_at_the_own_width_all_shapes_in_all_ways() -> None:
    reached = [(axes_of(str(key)), way, shape) for key, way, shape in (case.values for case in CASES)]
    assert {(axes["LANES"], int(axes["QUERIES"]), axes["KV"]) for axes, _, _ in reached} == {
        (*form, kv) for form in FORMS for kv in ("f32", "f16")
    }
    if TURN == 0:
        shapes = {(axes["LANES"], int(axes["QUERIES"]), shape) for axes, _, shape in reached}
        assert shapes == {(lanes, queries, shape) for lanes, queries in FORMS for shape in SHAPES[queries]}
        assert {(axes["LANES"], axes["KV"], way) for axes, way, _ in reached} == {
            (lanes, kv, way) for lanes in LANES for kv in ("f32", "f16") for way in WAYS
        }
        assert {(axes["LANES"], shape.room > 1, way) for axes, way, shape in reached} == {
            (lanes, several, way) for lanes in LANES for several in (False, True) for way in WAYS
        }


CONTROL_SHAPE = Shape(2, 5, 1, 1, 20, 37, 8, (5,), 16, True, 0.3, window=9, cap=2.0, sinks=True)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    "wrong",
    [
        {"SCALE_BITS": bits(0.3001)},
        {"GROUP": 4},
        {"Q_OFFSET": 0},
        {"Q_STRIDE": 71},
        {"CAP_BITS": bits(2.01)},
        {"HAS_SINKS": 0},
        {"MASKED": 0},
        {"cache_rows": 47},
        {"max_seq": 12},
        {"step_tokens": 7},
        {"window": 8},
        {"window": 10},
        {"attended_len": 44},
        {"attended_len": 46},
    ],
    ids=str,
)
def test_a_wrong_constant_is_noticed(lanes: str, wrong: dict[str, int]) -> None:
    spec = {name: value for name, value in wrong.items() if name.isupper()}
    push = {name: value for name, value in wrong.items() if name not in spec}
    problem = Problem(f"attention LANES={lanes} KV=f16 QUERIES=1", LANDING, CONTROL_SHAPE, spec)
    problem.draw(13, 5)
    problem.positions[12] = 12  # that the mask may not hide for the control of max_seq
    problem.cache_k[:, 12] = problem.cache_v[:, 12] = 1.0
    if not spec:
        problem.check(problem.run())
    with pytest.raises(AssertionError, match=r"values are wrong|outside the output"):
        problem.check(problem.run(push))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("way", [way for way in WAYS if way.on_device], ids=str)
def test_a_wrong_offset_on_the_device_is_noticed(lanes: str, way: Way) -> None:
    problem = Problem(f"attention LANES={lanes} KV=f16 QUERIES=1", way, replace(CONTROL_SHAPE, window=0))
    problem.draw(7, 5)
    problem.check(problem.run())
    for attended_len in (14, 16):
        with pytest.raises(AssertionError, match="values are wrong"):
            problem.check(problem.run(offset=np.array([7, attended_len], np.uint32)))


@pytest.mark.parametrize("lanes", LANES)
def test_a_row_that_the_mask_shows_or_hides_wrongly_is_noticed(lanes: str) -> None:
    for way in WAYS[2:]:
        problem = Problem(PROMPT.format(lanes), way, SHAPES[4][1])
        problem.draw(29, 8)
        mask = problem.mask()
        shown, hidden = np.flatnonzero(mask >= 0), np.flatnonzero(mask < 0)
        for row, value in ((shown[-1], -1.0), (hidden[0], 0.0)):
            other = mask.copy()
            other[row] = value
            with pytest.raises(AssertionError, match="values are wrong"):
                problem.check(problem.run(mask=other))
