"""Writing this step's K and V rows into a KV cache, at every offset and past its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_lab import F32, Trial, Words, axes_of, ceil_div, generator, normal, poisoned, variants
from kv_rows import KV_DTYPES, check_stored, empty_cache, stored_right
from numpy.typing import NDArray

KEYS = variants("kv_write", KV=["f32", "f16"])
CACHE_ROWS = 11
ROOM = 8
GARBAGE = 0xFFFF_FFF0


class Problem:
    """One kernel, with caches that hold `cached` rows of ones.

    K and V are side by side in one storage, with columns of nobody before, between and behind them, or, where `columns`
    is None, each in a storage of its own.
    """

    def __init__(
        self,
        key: str,
        on_device: bool,
        heads: int = 3,
        head_dim: int = 20,
        columns: tuple[int, int, int] | None = (4, 8, 4),
        workgroup: int = 64,
    ) -> None:
        self.dtype = KV_DTYPES[axes_of(key)["KV"]]
        self.heads, self.head_dim, self.on_device = heads, head_dim, on_device
        self.rng = generator(key, heads, head_dim)
        width = heads * head_dim
        self.starts = {"k": 0, "v": 0}
        self.stride, self.together = width, columns is not None
        if columns is not None:
            before, between, behind = columns
            self.starts = {"k": before, "v": before + width + between}
            self.stride = self.starts["v"] + width + behind
        spec = {"WORKGROUP": workgroup, "KV_HEADS": heads, "HEAD_DIM": head_dim, "OFFSET_ON_DEVICE": int(on_device)}
        for name, start in self.starts.items():
            spec |= {f"{name.upper()}_OFFSET": start // 4, f"{name.upper()}_STRIDE": self.stride // 4}
        self.k, self.v = self.draw(1), self.draw(1)
        self.trial = Trial(key, self.buffers(0, 0), spec, (ceil_div(width // 4, workgroup), ROOM, 1))

    def draw(self, count: int) -> F32:
        return normal(self.rng, count, self.heads, self.head_dim)

    def buffers(self, cached: int, offset: int) -> dict[str, NDArray[Any]]:
        k: F32 = poisoned((ROOM, self.stride))
        v = k if self.together else poisoned((ROOM, self.stride))
        for out, rows, start in ((k, self.k, self.starts["k"]), (v, self.v, self.starts["v"])):
            width = self.heads * self.head_dim
            out[: len(rows), start : start + width] = rows.reshape(len(rows), width)
        # What is not read holds poison; attended_len has no part in a write.
        offsets = np.array([offset, GARBAGE], np.uint32) if self.on_device else poisoned((2,), np.uint32)
        return {
            "k": k,
            "v": v,
            "cache_k": self.before(cached),
            "cache_v": self.before(cached),
            "token_count": np.array([len(self.k)], np.uint32),
            "offset": offsets,
        }

    def before(self, cached: int) -> NDArray[Any]:
        cache = empty_cache(self.heads, CACHE_ROWS, self.head_dim, self.dtype)
        cache[:, :cached] = 1.0
        return cache

    def run(self, cached: int, offset: int) -> dict[str, Words]:
        push = {"cache_rows": CACHE_ROWS, "cached_len": GARBAGE if self.on_device else offset}
        return self.trial.run(push, **self.buffers(cached, offset))

    def check(self, cached: int, offset: int | None = None) -> None:
        out = self.run(cached, cached if offset is None else offset)
        for name, rows in (("cache_k", self.k), ("cache_v", self.v)):
            check_stored(out[name], self.before(cached), rows, cached)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("on_device", [False, True], ids=["pushed", "on-device"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "columns", "workgroup"),
    [
        (1, 4, None, 64),
        (3, 20, (4, 8, 4), 4),
        (2, 64, (128, 0, 0), 64),
        (5, 80, (0, 4, 8), 8),
        (2, 128, None, 32),
    ],
)
def test_rows_are_written(
    key: str, on_device: bool, heads: int, head_dim: int, columns: tuple[int, int, int] | None, workgroup: int
) -> None:
    problem = Problem(key, on_device, heads, head_dim, columns, workgroup)
    for cached, count in (
        (0, 1), (0, ROOM), (1, 3), (5, 5), (5, 0), (CACHE_ROWS - 1, 1), (CACHE_ROWS - 1, 4), (CACHE_ROWS, 2),
    ):  # fmt: skip
        problem.k, problem.v = problem.draw(count), problem.draw(count)
        problem.check(cached)
    problem.trial.close()


@pytest.mark.parametrize("key", [key for key in KEYS if "KV=f16" in key])
def test_half_floats_hold_extremes(key: str) -> None:
    problem = Problem(key, False, 1)
    row = np.array([0.0, -0.0, 65504, -65504, 65519, 65520, -65536, 3e38, -3e38, np.inf], np.float32)
    small = np.array([6.1e-5, -6.1e-5, 5e-5, 1e-7, -1e-8, 1e-30, 1 / 3, -2049, 2050.9, -np.inf], np.float32)
    problem.k = np.concatenate([row, small]).reshape(1, 1, 20)
    problem.v = -problem.k
    problem.check(3)
    out = problem.run(3, 3)
    for name, sign in (("cache_k", 1), ("cache_v", -1)):
        stored = out[name].view(np.float16)[3 * 20 : 4 * 20]
        assert np.isfinite(stored).all()
        np.testing.assert_array_equal(stored[2:10], sign * np.sign(row[2:]) * 65504)


def test_the_comparison_sees_one_unit_too_many() -> None:
    values = np.array([1 / 3, -1000.3, 65504, 1e-6, 2.0], np.float32)
    near = values.astype(np.float16)
    assert stored_right(near, values).all()
    for towards in (np.inf, -np.inf):
        with np.errstate(over="ignore"):
            two = np.nextafter(np.nextafter(near, np.float16(towards)), np.float16(towards))
        assert not stored_right(two, values).any()
        assert not stored_right(np.nextafter(values, np.float32(towards)), values).any()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("on_device", [False, True], ids=["pushed", "on-device"])
@pytest.mark.parametrize("offset", [4, 6])
def test_a_wrong_offset_is_noticed(key: str, on_device: bool, offset: int) -> None:
    problem = Problem(key, on_device)
    problem.k, problem.v = problem.draw(3), problem.draw(3)
    problem.check(5)
    with pytest.raises(AssertionError, match=r"new rows are wrong|outside the output"):
        problem.check(5, offset)


@pytest.mark.parametrize("key", KEYS)
def test_k_in_place_of_v_is_noticed(key: str) -> None:
    problem = Problem(key, False)
    problem.k, problem.v = problem.draw(3), problem.draw(3)
    out = problem.run(5, 5)
    for name, rows in (("cache_k", problem.v), ("cache_v", problem.k)):
        with pytest.raises(AssertionError, match="new rows are wrong"):
            check_stored(out[name], problem.before(5), rows, 5)
