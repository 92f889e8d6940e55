"""The embedding lookup: rows of a tiled weight, at any tile, column count and workgroup."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_lab import ELEMENTS, axes_of, blank, ceil_div, check, generator, normal, poisoned, run_once, tiled, variants

KEYS = variants("embed", DTYPE=["f32", "f16", "bf16"])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("columns", "tile", "workgroup"), [(1, 4, 64), (7, 8, 1), (37, 5, 3), (130, 16, 4), (64, 32, 64)]
)
def test_rows_are_looked_up(key: str, columns: int, tile: int, workgroup: int) -> None:
    dtype = ELEMENTS[axes_of(key)["DTYPE"]]
    rng = generator(key, columns)
    rows = 2 * tile + 1
    ids = np.array([rows - 1, 0, tile - 1, tile, 0], np.uint32)
    weight = poisoned((3 * tile, columns), dtype)
    weight[ids] = normal(rng, ids.size, columns).astype(dtype)
    expected = weight[ids].astype(np.float64)
    chunks = ceil_div(columns, 16 // dtype.itemsize)
    out = run_once(
        key,
        {"weight": tiled(weight, tile), "token_ids": ids, "y": blank(expected.size)},
        {"WORKGROUP": workgroup, "TILE": tile, "COLUMNS": columns},
        (ceil_div(chunks, workgroup), ids.size, 1),
    )
    check(out["y"], expected, 0.0)


def test_a_wrong_column_count_is_noticed() -> None:
    weight = normal(generator("control"), 8, 37)
    buffers = {"weight": tiled(weight, 8), "token_ids": np.array([1, 2], np.uint32), "y": blank(74)}
    for columns, right in ((37, True), (36, False), (38, False)):
        out = run_once(KEYS[0], buffers, {"WORKGROUP": 64, "TILE": 8, "COLUMNS": columns}, (1, 2, 1))
        if right:
            check(out["y"], weight[[1, 2]], 0.0)
        else:
            with pytest.raises(AssertionError, match=r"values are wrong|outside the output"):
                check(out["y"], weight[[1, 2]], 0.0)
