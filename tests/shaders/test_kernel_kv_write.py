"""Writing a projection's rows into a KV cache, at every offset and past its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_lab import F32, Trial, Words, axes_of, blank, ceil_div, generator, normal, poisoned, variants
from kv_rows import KV_DTYPES, check_stored, stored_right
from numpy.typing import NDArray

KEYS = variants("kv_write", KV=["f32", "f16"], OFFSET=["push", "buffer"])
MAX_SEQ = 11
ROOM = 8


class Problem:
    """One kernel, with a cache that holds `cached` rows of ones."""

    def __init__(self, key: str, heads: int, head_dim: int, before: int, behind: int, workgroup: int = 64) -> None:
        self.dtype = KV_DTYPES[axes_of(key)["KV"]]
        self.heads, self.head_dim, self.first = heads, head_dim, before
        self.columns = before + heads * head_dim + behind
        self.rng = generator(key, heads, head_dim)
        spec = {
            "WORKGROUP": workgroup,
            "KV_HEADS": heads,
            "HEAD_DIM": head_dim,
            "MAX_SEQ": MAX_SEQ,
            "X_OFFSET": before // 4,
            "X_STRIDE": self.columns // 4,
        }
        workgroups = (ceil_div(heads * head_dim // 4, workgroup), ROOM, 1)
        self.on_device = axes_of(key)["OFFSET"] == "buffer"
        buffers: dict[str, NDArray[Any]] = {"x": self.x(self.draw(1)), "cache": self.before(0)}
        if self.on_device:
            buffers |= {"offset": np.zeros(2, np.uint32), "token_counts": np.ones(1, np.uint32)}
        self.trial = Trial(key, buffers, spec, workgroups)

    def draw(self, count: int) -> F32:
        return normal(self.rng, count, self.heads, self.head_dim)

    def x(self, rows: F32) -> F32:
        out: F32 = poisoned((ROOM, self.columns))
        out[: len(rows), self.first : self.first + rows[0].size] = rows.reshape(len(rows), -1)
        return out

    def before(self, cached: int) -> NDArray[Any]:
        words = blank(self.heads * MAX_SEQ * self.head_dim * self.dtype.itemsize // 4)
        cache: NDArray[Any] = words.view(self.dtype).reshape(self.heads, MAX_SEQ, self.head_dim)
        cache[:, :cached] = 1.0
        return cache

    def run(self, rows: F32, cached: int, offset: int | None = None) -> Words:
        offset = cached if offset is None else offset
        changed: dict[str, NDArray[Any]] = {"x": self.x(rows), "cache": self.before(cached)}
        push = {"cached_len": offset, "token_count": len(rows)}
        if self.on_device:
            # attended_len has no part in a write.
            changed["offset"] = np.array([offset, 0xFFFF_FFFF], np.uint32)
            changed["token_counts"] = np.array([len(rows)], np.uint32)
            push = {}
        return self.trial.run(push, **changed)["cache"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "before", "behind", "workgroup"),
    [(1, 4, 0, 0, 64), (3, 20, 4, 8, 4), (2, 64, 128, 0, 64), (5, 80, 0, 4, 8), (2, 128, 4, 4, 32)],
)
def test_rows_are_written(key: str, heads: int, head_dim: int, before: int, behind: int, workgroup: int) -> None:
    problem = Problem(key, heads, head_dim, before, behind, workgroup)
    for cached, count in ((0, 1), (0, ROOM), (1, 3), (5, 5), (MAX_SEQ - 1, 1), (MAX_SEQ - 1, 4), (MAX_SEQ, 2)):
        rows = problem.draw(count)
        check_stored(problem.run(rows, cached), problem.before(cached), rows, cached)


@pytest.mark.parametrize("key", [key for key in KEYS if "KV=f16" in key])
def test_half_floats_hold_extremes(key: str) -> None:
    problem = Problem(key, 1, 20, 0, 0)
    row = np.array([0.0, -0.0, 65504, -65504, 65519, 65520, -65536, 3e38, -3e38, np.inf], np.float32)
    small = np.array([6.1e-5, -6.1e-5, 5e-5, 1e-7, -1e-8, 1e-30, 1 / 3, -2049, 2050.9, -np.inf], np.float32)
    rows = np.concatenate([row, small]).reshape(1, 1, 20)
    out = problem.run(rows, 3)
    check_stored(out, problem.before(3), rows, 3)
    stored = out.view(np.float16)[3 * 20 : 4 * 20]
    assert np.isfinite(stored).all()
    np.testing.assert_array_equal(stored[2:10], np.sign(row[2:]) * 65504)


def test_the_comparison_sees_one_unit_too_many() -> None:
    values = np.array([1 / 3, -1000.3, 65504, 1e-6, 2.0], np.float32)
    near = values.astype(np.float16)
    assert stored_right(near, values).all()
    for towards in (np.inf, -np.inf):
        with np.errstate(over="ignore"):
            two = np.nextafter(np.nextafter(near, np.float16(towards)), np.float16(towards))
        assert not stored_right(two, values).any()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("offset", [4, 6])
def test_a_wrong_offset_is_noticed(key: str, offset: int) -> None:
    problem = Problem(key, 3, 20, 4, 8)
    rows = problem.draw(3)
    with pytest.raises(AssertionError, match=r"new rows are wrong|outside the output"):
        check_stored(problem.run(rows, 5, offset), problem.before(5), rows, 5)
