"""The highest values of a row against a stable sort: odd sizes, ties, infinities, NaN, and rows that fill the list."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kernel_lab import F32, Trial, Words, axes_of, blank, ceil_div, generator, normal, subgroup, variants
from numpy.typing import NDArray

KEYS = ["group_max", *variants("top_k", LANES=["subgroup", "shared"])]
TOP_K = KEYS[1:]
# Columns, groups of a block, length of a group, invocations of the shared form.
SIZES = [(1, 64, 1, 1), (2, 5, 1, 4), (37, 8, 3, 16), (160, 64, 1, 64), (577, 16, 5, 8), (4099, 64, 8, 256)]


class Pair:
    """Both kernels for rows of one size; what `group_max` leaves is what `top_k` reads."""

    def __init__(
        self,
        key: str,
        columns: int,
        k: int,
        width: int = 64,
        length: int = 1,
        workgroup: int = 64,
        *,
        listed: int = 0,
    ) -> None:
        blocks = ceil_div(columns, width * length)
        self.groups = width * blocks
        x: NDArray[Any] = np.zeros(columns, np.float32)
        best: NDArray[Any] = blank(2 * self.groups)
        spec = {"WORKGROUP": width, "COLUMNS": columns, "LENGTH": length}
        self._first = Trial("group_max", {"x": x, "best": best}, spec, (blocks, 1, 1))
        workgroup = subgroup() if axes_of(key)["LANES"] == "subgroup" else workgroup
        spec = {"WORKGROUP": workgroup, "COLUMNS": columns, "GROUPS": self.groups, "K": k}
        spec |= {"BLOCK": width, "LENGTH": length, "LISTED": listed or max(4 * k, workgroup)}
        buffers = {"x": x, "best": best, "y": blank(2 * k)}
        self._second = Trial(key, buffers, spec, (1, 1, 1))

    def group_max(self, x: F32) -> Words:
        return self._first.run(x=x)["best"]

    def top_k(self, x: F32) -> Words:
        """Pairs of a column and a value's bits."""
        return self._second.run(x=x, best=self.group_max(x)[: 2 * self.groups])["y"]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._first.close()
        self._second.close()


def top_k(key: str, x: F32, k: int, *shape: int, listed: int = 0) -> Words:
    with Pair(key, x.size, k, *shape, listed=listed) as pair:
        return pair.top_k(x)


def reference(x: F32, k: int) -> Words:
    """The first of a stable sort, NaN before all."""
    with np.errstate(invalid="ignore"):
        order = np.lexsort((np.arange(x.size), -np.where(np.isnan(x), 0, x), ~np.isnan(x)))[:k]
    return np.stack([order.astype(np.uint32), x.view(np.uint32)[order]], axis=1).reshape(-1)


def check(key: str, x: F32, k: int, *shape: int, listed: int = 0) -> None:
    check_words(top_k(key, x, k, *shape, listed=listed), x, k)


def check_words(out: Words, x: F32, k: int) -> None:
    np.testing.assert_array_equal(out[: 2 * k], reference(x, k))
    assert (out[2 * k :] == blank(1)).all()


def rows(columns: int) -> dict[str, F32]:
    """Rows that are easy, and rows that are not."""
    rng = generator(columns)
    x = normal(rng, columns)
    few = np.where(rng.random(columns) < 0.05, x, np.float32(-np.inf))
    zeros = np.where(rng.random(columns) < 0.5, np.float32(0.0), np.float32(-0.0))
    tiny = (rng.integers(-9, 9, columns) * 1e-45).astype(np.float32)
    return {
        "normal": x,
        "ties": (np.round(x * 2) / 2).astype(np.float32),
        "equal": np.full(columns, -1.5, np.float32),
        "rising": np.sort(x),
        "falling": np.sort(x)[::-1].copy(),
        "zeros of both signs": zeros,
        "denormal": tiny,
        "masked": few,
        "all masked": np.full(columns, -np.inf, np.float32),
        "infinite": np.where(rng.random(columns) < 0.1, np.float32(np.inf), x),
        "negative": -np.abs(x) - 3,
    }


@pytest.mark.parametrize(("columns", "width", "length", "workgroup"), SIZES)
def test_the_highest_of_each_group_is_found(columns: int, width: int, length: int, workgroup: int) -> None:
    x = normal(generator(columns), columns)
    with Pair(TOP_K[0], columns, 1, width, length, workgroup) as pair:
        out, groups = pair.group_max(x), pair.groups
    padded = np.full((groups // width, length, width), -np.inf, np.float32)
    padded.reshape(-1)[:columns] = x
    found = out[: 2 * groups].reshape(-1, 2)
    held = np.isfinite(padded.max(axis=1).reshape(-1))
    np.testing.assert_array_equal(x[found[held, 1]], padded.max(axis=1).reshape(-1)[held])
    assert (found[~held, 0] == 0).all()
    assert (out[2 * groups :] == blank(1)).all()


@pytest.mark.parametrize("key", TOP_K)
@pytest.mark.parametrize(("columns", "width", "length", "workgroup"), SIZES)
def test_the_highest_values_come_best_first(key: str, columns: int, width: int, length: int, workgroup: int) -> None:
    for k in sorted({1, min(3, columns), min(64, columns, columns // length)}):
        with Pair(key, columns, k, width, length, workgroup) as pair:
            for name, x in rows(columns).items():
                try:
                    check_words(pair.top_k(x), x, k)
                except AssertionError as error:
                    raise AssertionError(f"{name}, the {k} highest: {error}") from error


@pytest.mark.parametrize("key", TOP_K)
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00001, 0x7F800001], ids=["quiet", "negative", "signalling"])
@pytest.mark.parametrize("at", [0, 300, 576])
def test_nan_comes_before_all(key: str, bits: int, at: int) -> None:
    x = normal(generator(bits), 577)
    x[5] = np.inf
    x.view(np.uint32)[at] = bits
    for k in (1, 40):
        out = top_k(key, x, k, 16, 5)
        assert out[0] == at
        # A driver may make a signalling NaN quiet on its way; that it is NaN must stay.
        assert math.isnan(out[1:2].view(np.float32)[0])


@pytest.mark.parametrize("key", TOP_K)
def test_values_that_overflow_the_list_are_bisected(key: str) -> None:
    """The ten highest in ten groups, and nearly all of these groups' values above the lowest of the ten maxima."""
    width, length, k = 8, 16, 10
    x = normal(generator(key), width * length * 4)
    blocks = x.reshape(4, length, width)
    blocks[1, :, :5] += 100
    blocks[2, :, 3:] += 100
    reaching = int((x >= np.sort(blocks.max(axis=1).reshape(-1))[-k]).sum())
    check(key, x, k, width, length, 16, listed=16)
    check(key, x, k, width, length, 16)
    ties = np.where(x > 50, np.float32(7), x)
    check(key, ties, k, width, length, 16, listed=16)
    assert reaching > 16 or (ties == 7).sum() > 16


@pytest.mark.parametrize("key", TOP_K)
def test_a_vocabulary_of_262144_is_taken_whole(key: str) -> None:
    x = np.round(normal(generator(key), 1 << 18) * 100)
    for k in (1, 64):
        check(key, x, k, 64, 64, 256)


@pytest.mark.parametrize("key", TOP_K)
def test_a_column_left_out_is_noticed(key: str) -> None:
    x = normal(generator(key), 577)
    best = int(x.argmax())
    other = np.where(np.arange(577) == best, np.float32(-9), x)
    with pytest.raises(AssertionError, match="not equal"):
        np.testing.assert_array_equal(top_k(key, other, 3, 16, 5)[:6], reference(x, 3))
