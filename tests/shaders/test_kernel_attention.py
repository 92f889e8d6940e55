"""Grouped-query attention over cached and own rows, with and without the fused KV write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
    variants,
)
from kv_rows import KV_DTYPES, check_stored
from numpy.typing import NDArray

from vkdecode.gpu import DeviceInfo, Lanes, shared_lanes, subgroup_lanes
from vkdecode.runtime import attention_workgroup, most_cached_rows

FORMS = [  # arm, where the offset is, and whether the write is fused
    ("bounded", "push", 0),
    ("bounded", "buffer", 0),
    ("bounded", "buffer", 1),
    ("masked", "push", 0),
    ("masked", "buffer", 1),
]
KEYS = [
    f"{key} ARM={arm} OFFSET={offset} WRITE={write}"
    for forms, queries in ((["subgroup", "shared"], [1, 2, 3, 4]), (["subgroup"], [8, 12]))
    for key in variants("attention", LANES=forms, KV=["f32", "f16"], QUERIES=queries)
    for arm, offset, write in FORMS
]
GARBAGE = 0xFFFF_FFF0


def case(index: int, key: str) -> tuple[str, Shape]:
    """A shape's name and the shape: Latin squares over the forms and the other axes, moved on for each width."""
    axes = axes_of(key)
    number = (index % len(FORMS) + 2 * (axes["KV"] == "f16") + (axes["LANES"] == "shared") + TURN) % 5
    return f"{key} {number}", SHAPES[int(axes["QUERIES"])][number]


CASES = [pytest.param(key, case(index, key)[1], id=case(index, key)[0]) for index, key in enumerate(KEYS)]


class Problem:
    """One kernel at one shape: its random inputs, its dispatch, and what must come out."""

    def __init__(self, key: str, shape: Shape, wrong: Mapping[str, int] | None = None) -> None:
        self.axes = axes_of(key)
        self.shape = shape
        self.writes = self.axes["WRITE"] == "1"
        self.rng = generator(key, shape)
        workgroup = subgroup() if self.axes["LANES"] == "subgroup" else shape.workgroup
        spec = {
            "WORKGROUP": workgroup,
            "KV_HEADS": shape.kv_heads,
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "MAX_SEQ": shape.max_seq,
            "STEP_TOKENS": shape.room,
            "QUERY_HEADS": shape.query_heads,
            "SCALE_BITS": bits(shape.scale),
            "WINDOW": shape.window,
            "CAP_BITS": bits(shape.cap),
            "HAS_SINKS": int(shape.sinks),
        }
        widths = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        # With four columns of nobody before q and after v where one storage holds all three.
        self.columns: dict[str, tuple[int, int]] = {}
        start = 4 if shape.fused else 0
        for name, heads in widths.items():
            width = heads * shape.head_dim
            self.columns[name] = (start, start + width)
            spec[f"{name.upper()}_OFFSET"] = start // 4
            start = start + width if shape.fused else 0
        for name, (_, end) in self.columns.items():
            spec[f"{name.upper()}_STRIDE"] = (start + 4 if shape.fused else end) // 4
        self.stride = start + 4
        workgroups = (shape.heads // shape.query_heads, shape.room // shape.query_tokens, 1)
        self.draw(1, 1)
        self.trial = Trial(key, self.buffers(1), {**spec, **(wrong or {})}, workgroups)

    def draw(self, cached: int, count: int) -> None:
        """Other inputs: q, k, v of the real tokens, `cached` rows in the cache, and which of these the mask shows."""
        shape = self.shape
        self.count = count
        self.q = normal(self.rng, count, shape.heads, shape.head_dim)
        self.k = normal(self.rng, count, shape.kv_heads, shape.head_dim)
        self.v = normal(self.rng, count, shape.kv_heads, shape.head_dim)
        # Beyond the range of half floats, so that the step's own rows are seen not to come from the cache.
        self.v[..., 0] *= np.float32(1e5)
        held = min(cached, shape.max_seq)
        dtype = KV_DTYPES[self.axes["KV"]]
        self.cached_k = normal(self.rng, shape.kv_heads, held, shape.head_dim).astype(dtype)
        self.cached_v = normal(self.rng, shape.kv_heads, held, shape.head_dim).astype(dtype)
        self.cached = cached
        self.sinks = normal(self.rng, shape.heads) * 2 if shape.sinks else poisoned((shape.heads,))
        self.visible = np.ones(held, bool)
        if self.axes["ARM"] == "masked" and not shape.window:
            self.visible = self.rng.random(held) < 0.8

    def rows(self, name: str, values: F32) -> F32:
        """[room, columns] with padding rows of NaN."""
        start, end = self.columns[name]
        out: F32 = poisoned((self.shape.room, self.stride if self.shape.fused else end - start))
        start = start if self.shape.fused else 0
        out[: self.count, start : start + values[0].size] = values.reshape(self.count, -1)
        return out

    def cache(self, values: NDArray[Any]) -> NDArray[Any]:
        """[kv_heads, max_seq, head_dim] with NaN where nothing is cached or nothing of it is visible."""
        shape = self.shape
        words = blank(shape.kv_heads * shape.max_seq * shape.head_dim * values.itemsize // 4)
        out = words.view(values.dtype).reshape(shape.kv_heads, shape.max_seq, shape.head_dim)
        at = np.flatnonzero(self.visible)
        out[:, at] = values[:, at]
        return out

    def buffers(self, cached: int) -> dict[str, NDArray[Any]]:
        shape = self.shape
        q, k, v = (self.rows(name, values) for name, values in (("q", self.q), ("k", self.k), ("v", self.v)))
        if shape.fused:
            for name, part in (("k", k), ("v", v)):
                start, end = self.columns[name]
                q[:, start:end] = part[:, start:end]
            k = v = q
        buffers: dict[str, NDArray[Any]] = {
            "q": q,
            "k": k,
            "v": v,
            "cache_k": self.cache(self.cached_k),
            "cache_v": self.cache(self.cached_v),
            "y": blank(shape.room * shape.heads * shape.head_dim),
            "token_count": np.array([self.count], np.uint32),
            "sinks": self.sinks,
        }
        if self.axes["ARM"] == "masked":
            mask = np.full(shape.max_seq, -np.inf, np.float32)
            hidden = self.rng.choice([-np.inf, -1.0, -1e-30], self.visible.size)
            ages = self.cached - np.arange(self.visible.size) if shape.window else np.zeros(self.visible.size)
            mask[: self.visible.size] = np.where(self.visible, ages, hidden)
            buffers["mask"] = mask
        if self.axes["OFFSET"] == "buffer":
            # What a form does not need holds garbage: it must not be read.
            start = cached if self.writes else GARBAGE
            end = cached + shape.room if self.axes["ARM"] == "bounded" else GARBAGE
            buffers["offset"] = np.array([start, end], np.uint32)
        return buffers

    def run(self, cached: int, attended_len: int | None = None, **changed: NDArray[Any]) -> dict[str, Words]:
        attended_len = cached + self.shape.room if attended_len is None else attended_len
        push = {"attended_len": attended_len} if "attended_len" in self.trial.kernel.push else {}
        return self.trial.run(push, **{**self.buffers(cached), **changed})

    def expected(self) -> tuple[F64, F64]:
        """Values [room, heads, head_dim], NaN for padding, and the size that their errors are relative to."""
        shape = self.shape
        values = np.full((shape.room, shape.heads, shape.head_dim), np.nan)
        sizes = np.full_like(values, np.nan)
        cached_k = self.cached_k[:, self.visible].astype(np.float64)
        cached_v = self.cached_v[:, self.visible].astype(np.float64)
        cached_at = np.flatnonzero(self.visible)
        for token in range(self.count):
            positions = np.concatenate([cached_at, self.cached + np.arange(token + 1)])
            seen = (positions > self.cached + token - shape.window) | (shape.window == 0)
            for head in range(shape.heads):
                kv_head = head // shape.group
                keys = np.concatenate([cached_k[kv_head], self.k[: token + 1, kv_head]])
                rows = np.concatenate([cached_v[kv_head], self.v[: token + 1, kv_head]])
                query = self.q[token, head].astype(np.float64)
                scale = float(np.float32(shape.scale))
                scores = keys @ query * scale
                if shape.cap:
                    scores = shape.cap * np.tanh(scores / shape.cap)
                scores[~seen] = -np.inf
                sink = float(self.sinks[head]) if shape.sinks else -np.inf
                highest = max(scores.max(), sink)
                weights = np.exp(scores - highest)
                weights /= weights.sum() + np.exp(sink - highest)
                values[token, head] = weights @ rows
                # A score's rounding error is the relative error of its weight.
                score_size = (np.abs(keys) @ np.abs(query)).max() * scale
                sizes[token, head] = weights @ np.abs(rows) * (1 + score_size + shape.cap)
        return values, sizes

    def check(self, cached: int, out: Mapping[str, Words]) -> None:
        values, sizes = self.expected()
        token = np.arange(self.shape.room)[:, None, None]
        tile = self.shape.query_tokens
        check(out["y"], values, sizes, token < self.count, token < -(-self.count // tile) * tile, roundings=16)
        if self.writes:
            for name, cached_rows, own in (("cache_k", self.cached_k, self.k), ("cache_v", self.cached_v, self.v)):
                check_stored(out[name], self.cache(cached_rows), own, cached)


@pytest.mark.parametrize(("key", "shape"), CASES)
def test_attention(key: str, shape: Shape) -> None:
    problem = Problem(key, shape)
    # None, one, an odd number on both sides of a block, one row of room, a full cache, and more than there is.
    for cached in (0, 1, 7, shape.max_seq - 2, shape.max_seq - 1, shape.max_seq, shape.max_seq + 5):
        for count in shape.counts:
            problem.draw(cached, count)
            problem.check(cached, problem.run(cached))
    problem.trial.close()


# A decode step, and a prefill with several tokens in a workgroup, so that a window ends inside of one.
WINDOWED = [Shape(1, 4, 4, 1, 20, 37, 1, (1,), 16, True, 0.3), Shape(2, 2, 2, 2, 20, 37, 8, (7,), 8, False, 0.3)]
WINDOWS = (1, 2, 5, 8, 16, 19)
CAPS = ((3.0, False, 0), (50.0, False, 5), (0.0, True, 0), (2.0, True, 3))  # cap, whether heads have sinks, window


def here(varied: Sequence[Any]) -> list[Any]:
    """The part of forms x lanes x shapes x `varied` that this width runs; each of them is run at one of the widths."""
    numbered = itertools.product(*map(enumerate, (FORMS, ("subgroup", "shared"), WINDOWED, varied)))
    return [
        pytest.param(form, lanes, shape, value, id=f"{'-'.join(map(str, form))}-{lanes}-{number}-{value}")
        for (at, form), (side, lanes), (number, shape), (index, value) in numbered
        if (at + 2 * side + number + index) % 4 in HERE
    ]


def test_the_cases_of_this_width_hold_each_pair_of_axes() -> None:
    for varied in (WINDOWS, CAPS):
        cases = [case.values for case in here(varied)]
        axes = dict(enumerate((FORMS, ("subgroup", "shared"), WINDOWED, varied)))
        for one, other in itertools.combinations(axes, 2):
            assert {(case[one], case[other]) for case in cases} == set(itertools.product(axes[one], axes[other]))


@pytest.mark.parametrize(("form", "lanes", "shape", "window"), here(WINDOWS))
def test_a_window_hides_what_a_mask_would_at_every_length(
    form: tuple[str, str, int], lanes: str, shape: Shape, window: int
) -> None:
    arm, offset, write = form
    key = f"attention LANES={lanes} KV=f32 QUERIES=4 ARM={arm} OFFSET={offset} WRITE={write}"
    problem = Problem(key, replace(shape, window=window))
    for cached in range(shape.max_seq - shape.room + 1):
        problem.draw(cached, shape.counts[0])
        problem.check(cached, problem.run(cached))
    problem.trial.close()


@pytest.mark.parametrize(("form", "lanes", "shape", "scores"), here(CAPS))
def test_scores_may_have_a_cap_and_heads_a_sink(
    form: tuple[str, str, int], lanes: str, shape: Shape, scores: tuple[float, bool, int]
) -> None:
    arm, offset, write = form
    cap, sinks, window = scores
    key = f"attention LANES={lanes} KV=f16 QUERIES=4 ARM={arm} OFFSET={offset} WRITE={write}"
    problem = Problem(key, replace(shape, window=window, cap=cap, sinks=sinks, scale=1.5))
    for cached in (0, 1, 7, 23):
        problem.draw(cached, shape.counts[0])
        problem.check(cached, problem.run(cached))
    problem.trial.close()


def test_a_capped_score_neither_overflows_nor_loses_its_sign() -> None:
    for lanes in ("subgroup", "shared"):
        key = f"attention LANES={lanes} KV=f32 QUERIES=4 ARM=bounded OFFSET=push WRITE=0"
        problem = Problem(key, replace(SHAPES[4][1], cap=20.0))
        problem.draw(37, 8)
        problem.cached_k *= np.float32(1e6)
        problem.check(37, problem.run(37))


@pytest.mark.parametrize("lanes", ["subgroup", "shared"])
@pytest.mark.parametrize("wrong", [{"WINDOW": 4}, {"WINDOW": 6}, {"CAP_BITS": bits(2.1)}, {"HAS_SINKS": 0}], ids=str)
def test_a_wrong_window_cap_or_sink_is_noticed(lanes: str, wrong: dict[str, int]) -> None:
    for shape in WINDOWED:
        key = f"attention LANES={lanes} KV=f32 QUERIES=4 ARM=bounded OFFSET=push WRITE=0"
        problem = Problem(key, replace(shape, window=5, cap=2.0, sinks=True), wrong)
        problem.draw(11, shape.counts[0])
        with pytest.raises(AssertionError, match="values are wrong"):
            problem.check(11, problem.run(11))


def test_the_cases_reach_all_shapes_in_both_forms() -> None:
    cases = [(axes_of(str(case.values[0])), case.values[1]) for case in CASES]
    for lanes in ("subgroup", "shared"):
        reached = {shape for axes, shape in cases if axes["LANES"] == lanes}
        most = 12 if lanes == "subgroup" else 4
        assert reached == {shape for queries, shapes in SHAPES.items() for shape in shapes if queries <= most}


@pytest.mark.parametrize("form", [subgroup_lanes, shared_lanes])
def test_the_longest_cache_of_a_cpu_driver_is_read_to_its_end(form: Callable[[DeviceInfo], Lanes]) -> None:
    lanes = form(device().info)
    head_dim = 64
    rows = most_cached_rows(lanes, head_dim)
    shape = Shape(1, 4, 4, 1, head_dim, rows, 1, (1,), attention_workgroup(lanes), False, 1.0)
    problem = Problem(f"attention LANES={lanes.form} KV=f32 QUERIES=4 ARM=bounded OFFSET=push WRITE=0", shape)
    problem.draw(rows, 1)
    for values in (problem.cached_k, problem.cached_v, problem.k, problem.v):
        values[:] = 0.0
    problem.cached_v[0, -1] = rows + 1  # the mean over all rows is 1 because of the last one alone
    y = problem.run(rows)["y"][: 4 * head_dim].view(np.float32)
    np.testing.assert_allclose(y, 1.0, rtol=1e-3)


def test_every_row_may_be_masked() -> None:
    """Then the step's own rows alone count."""
    for lanes in ("subgroup", "shared"):
        problem = Problem(f"attention LANES={lanes} KV=f16 QUERIES=4 ARM=masked OFFSET=push WRITE=0", SHAPES[4][1])
        problem.draw(9, 5)
        problem.visible[:] = False
        problem.check(9, problem.run(9))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    """The running maximum moves by thousands, in both directions, over several blocks."""
    for lanes in ("subgroup", "shared"):
        problem = Problem(f"attention LANES={lanes} KV=f32 QUERIES=4 ARM=bounded OFFSET=push WRITE=0", SHAPES[4][1])
        problem.draw(37, 8)
        for first, factor in ((0, 1.0), (11, 3000.0), (20, 1.0), (29, 30.0)):
            problem.cached_k[:, first:] = normal(problem.rng, 1, 37 - first, 20) * np.float32(factor)
        problem.check(37, problem.run(37))


CONTROL = "attention LANES={} KV=f16 QUERIES=1 ARM=bounded OFFSET=push WRITE=0"
CONTROL_SHAPE = Shape(2, 5, 1, 1, 20, 37, 8, (5,), 16, True, 0.3)


@pytest.mark.parametrize("lanes", ["subgroup", "shared"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"SCALE_BITS": bits(0.3001)},
        {"MAX_SEQ": 36},
        {"K_STRIDE": 73},
        {"V_OFFSET": 60},
        {"STEP_TOKENS": 7},
        {"GROUP": 4},
    ],
    ids=str,
)
def test_a_wrong_constant_is_noticed(lanes: str, wrong: dict[str, int]) -> None:
    problem = Problem(CONTROL.format(lanes), CONTROL_SHAPE, wrong)
    problem.draw(7, 5)
    with pytest.raises(AssertionError, match=r"values are wrong|outside the output"):
        problem.check(7, problem.run(7))


@pytest.mark.parametrize("lanes", ["subgroup", "shared"])
def test_a_wrong_attended_length_is_noticed(lanes: str) -> None:
    problem = Problem(CONTROL.format(lanes), CONTROL_SHAPE)
    problem.draw(7, 5)
    problem.check(7, problem.run(7))
    for attended_len in (14, 16):
        with pytest.raises(AssertionError, match="values are wrong"):
            problem.check(7, problem.run(7, attended_len))


@pytest.mark.parametrize("lanes", ["subgroup", "shared"])
def test_a_wrong_write_offset_is_noticed(lanes: str) -> None:
    key = f"attention LANES={lanes} KV=f16 QUERIES=1 ARM=bounded OFFSET=buffer WRITE=1"
    problem = Problem(key, CONTROL_SHAPE)
    problem.draw(7, 5)
    problem.check(7, problem.run(7))
    out = problem.run(7, offset=np.array([8, 15], np.uint32))
    with pytest.raises(AssertionError, match=r"outside the output|new rows are wrong"):
        problem.check(7, out)
