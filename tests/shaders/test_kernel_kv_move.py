"""Moving this step's K and V rows from where they landed to where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from kernel_lab import Trial, axes_of, blank, ceil_div, check_kept, generator, normal, variants, words_of
from kv_rows import KV_DTYPES
from numpy.typing import NDArray

KEYS = variants("kv_move", KV=["f32", "f16"])
MAX_SEQ, LANDING, BEHIND = 11, 6, 2
CACHE_ROWS = MAX_SEQ + LANDING + BEHIND


class Problem:
    """One kernel, with two caches of which every row is another."""

    def __init__(self, key: str, heads: int, head_dim: int, workgroup: int) -> None:
        rng = generator(key, heads, head_dim)
        dtype = KV_DTYPES[axes_of(key)["KV"]]
        names = ("cache_k", "cache_v")
        self.before = {name: normal(rng, heads, CACHE_ROWS, head_dim).astype(dtype) for name in names}
        spec = {"WORKGROUP": workgroup, "KV_HEADS": heads, "HEAD_DIM": head_dim}
        groups = (ceil_div(heads * head_dim // 4, workgroup), LANDING, 1)
        self.trial = Trial(key, self.before, spec, groups)

    def check(self, cached: int, count: int, wrong: Mapping[str, int] | None = None, rows: int = CACHE_ROWS) -> None:
        """Hold what a move leaves against copies of rows, bit by bit."""
        push = {"cache_rows": CACHE_ROWS, "max_seq": MAX_SEQ, "cached_len": cached, "token_count": count}
        out = self.trial.run({**push, **(wrong or {})})
        moved = min(count, MAX_SEQ - cached, rows - MAX_SEQ)
        for name, before in self.before.items():
            after: NDArray[Any] = before.copy()
            if moved > 0:
                after[:, cached : cached + moved] = before[:, MAX_SEQ : MAX_SEQ + moved]
            words = blank(out[name].size)
            words[: after.nbytes // 4] = words_of(after)
            check_kept(out[name], words, np.ones(words.size, bool))


SIZES = [(1, 4, 64), (3, 20, 4), (2, 64, 64), (5, 80, 8), (2, 128, 32)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("heads", "head_dim", "workgroup"), SIZES)
def test_the_rows_that_landed_are_moved_and_no_others(key: str, heads: int, head_dim: int, workgroup: int) -> None:
    problem = Problem(key, heads, head_dim, workgroup)
    for cached, count in ((0, 1), (0, LANDING), (3, 0), (4, 5), (5, LANDING), (MAX_SEQ - 1, 1)):
        problem.check(cached, count)
    problem.trial.close()


@pytest.mark.parametrize("key", KEYS)
def test_rows_beyond_a_cache_are_neither_read_nor_written(key: str) -> None:
    problem = Problem(key, 1, 20, 64)
    # The end of the conversation's rows, one behind it, and the end of the buffer itself.
    for cached in (MAX_SEQ - 2, MAX_SEQ, CACHE_ROWS, 0xFFFF_FF00):
        problem.check(cached, LANDING)
    # With one head, a cache of fewer rows is the beginning of this one.
    fewer = MAX_SEQ + 2
    problem.check(3, LANDING, {"cache_rows": fewer}, fewer)
    problem.check(3, LANDING, {"cache_rows": MAX_SEQ}, MAX_SEQ)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "wrong",
    [{"cached_len": 4}, {"token_count": 2}, {"token_count": 4}, {"max_seq": 10}, {"cache_rows": CACHE_ROWS - 1}],
    ids=str,
)
def test_a_wrong_constant_is_noticed(key: str, wrong: dict[str, int]) -> None:
    problem = Problem(key, 3, 20, 64)
    problem.check(3, 3)
    with pytest.raises(AssertionError, match="outside the output"):
        problem.check(3, 3, wrong)
