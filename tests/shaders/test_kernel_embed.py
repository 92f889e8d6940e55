"""The embedding lookup: rows of a tiled weight, at any tile, column count and workgroup."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_lab import ELEMENTS, axes_of, blank, ceil_div, check, generator, normal, poisoned, run_once, tiled, variants
from numpy.typing import NDArray

from vkdecode.runtime.weight_layout import pack_rows
from vkdecode.weights.blocks import decode_rows, ggml_type, random_rows
from vkdecode.weights.dtypes import BLOCK_DTYPES, PLAIN_DTYPES, DType

KEYS = variants("embed", DTYPE=[dtype.value for dtype in (*PLAIN_DTYPES, *BLOCK_DTYPES)], PART=["0", "1"])
PLAIN = [key for key in KEYS if axes_of(key)["DTYPE"] in ELEMENTS]
BLOCKS = [key for key in KEYS if axes_of(key)["DTYPE"] not in ELEMENTS]
WHOLE = [key for key in PLAIN if axes_of(key)["PART"] == "0"]
PARTS = [key for key in PLAIN if axes_of(key)["PART"] == "1"]


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize(
    ("columns", "tile", "workgroup"), [(1, 4, 64), (7, 8, 1), (37, 5, 3), (130, 16, 4), (64, 32, 64)]
)
def test_rows_are_looked_up(key: str, columns: int, tile: int, workgroup: int) -> None:
    dtype = ELEMENTS[axes_of(key)["DTYPE"]]
    rng = generator(key, columns)
    rows = 2 * tile + 1
    ids = np.array([rows - 1, 0, tile - 1, tile, 0], np.uint32)
    weight = poisoned((4 * tile, columns), dtype)
    weight[ids] = normal(rng, ids.size, columns).astype(dtype)
    expected = weight[ids].astype(np.float64)
    chunks = ceil_div(columns, 32)
    out = run_once(
        key,
        {"weight": tiled(weight, tile), "token_ids": ids, "y": blank(expected.size)},
        {"WORKGROUP": workgroup, "TILE": tile, "COLUMNS": columns},
        (ceil_div(chunks, workgroup), ids.size, 1),
    )
    check(out["y"], expected, 0.0)


@pytest.mark.parametrize("key", PARTS)
@pytest.mark.parametrize(("columns", "tile", "workgroup"), [(7, 8, 1), (37, 5, 3), (64, 32, 64)])
@pytest.mark.parametrize("chained", [True, False])
def test_a_part_gives_its_rows_and_passes_on_the_others(
    key: str, columns: int, tile: int, workgroup: int, chained: bool
) -> None:
    dtype = ELEMENTS[axes_of(key)["DTYPE"]]
    rng = generator(key, columns, chained)
    first, count = 11, tile + 1
    ids = np.array([first, first - 1, first + count - 1, first + count, 0, 1000], np.uint32)
    mine = np.array([0, 2])
    weight = poisoned((4 * tile, columns), dtype)
    weight[ids[mine] - first] = normal(rng, mine.size, columns).astype(dtype)
    others = normal(rng, ids.size, columns)
    expected = others.astype(np.float64) if chained else np.zeros((ids.size, columns))
    expected[mine] = weight[ids[mine] - first].astype(np.float64)
    others[mine] = np.nan
    spec = {"WORKGROUP": workgroup, "TILE": tile, "COLUMNS": columns}
    spec |= {"FIRST_ROW": first, "ROW_COUNT": count, "HAS_OTHERS": int(chained)}
    buffers = {"weight": tiled(weight, tile), "token_ids": ids, "y": blank(expected.size), "others": others}
    chunks = ceil_div(columns, 32)
    out = run_once(key, buffers, spec, (ceil_div(chunks, workgroup), ids.size, 1))
    check(out["y"], expected, 0.0)
    with pytest.raises(AssertionError, match="values are wrong"):
        wrong = run_once(key, buffers, {**spec, "FIRST_ROW": first + 1}, (ceil_div(chunks, workgroup), ids.size, 1))
        check(wrong["y"], expected, 0.0)


@pytest.mark.parametrize("key", BLOCKS)
@pytest.mark.parametrize(("blocks", "tile", "workgroup"), [(1, 8, 64), (3, 5, 2), (2, 16, 1)])
def test_rows_of_blocks_are_those_of_the_gguf_package(key: str, blocks: int, tile: int, workgroup: int) -> None:
    dtype = DType(axes_of(key)["DTYPE"])
    columns, part = blocks * dtype.block_columns, axes_of(key)["PART"] == "1"
    rng = generator(key, blocks)
    ids = np.array([8 * tile - 1, 0, tile - 1, tile, 5 * tile, 0], np.uint32)
    stored = np.full((8 * tile, dtype.row_bytes(columns)), 0xFF, np.uint8)
    stored[ids] = random_rows(rng, ids.size, columns, dtype)
    expected = decode_rows(stored[ids], ggml_type(dtype), dtype.block_bytes).astype(np.float64)
    buffers: dict[str, NDArray[Any]] = {
        "weight": pack_rows(stored, dtype, tile),
        "token_ids": ids,
        "y": blank(expected.size),
    }
    spec = {"WORKGROUP": workgroup, "TILE": tile, "COLUMNS": columns}
    if part:
        ids += 3
        ids[-1] = 2
        others = np.full((ids.size, columns), np.nan, np.float32)
        others[-1] = expected[-1] = normal(rng, columns)
        buffers["others"] = others
        spec |= {"FIRST_ROW": 3, "ROW_COUNT": 8 * tile, "HAS_OTHERS": 1}
    out = run_once(key, buffers, spec, (ceil_div(columns // 32, workgroup), ids.size, 1))
    # An integer times a scale plus an offset of about the same size is rounded once; the reference rounds more often.
    check(out["y"], expected, np.abs(expected).max(), roundings=4)


def test_a_wrong_column_count_is_noticed() -> None:
    weight = normal(generator("control"), 32, 37)
    buffers = {"weight": tiled(weight, 8), "token_ids": np.array([1, 2], np.uint32), "y": blank(74)}
    for columns, right in ((37, True), (36, False), (38, False)):
        out = run_once(WHOLE[0], buffers, {"WORKGROUP": 64, "TILE": 8, "COLUMNS": columns}, (1, 2, 1))
        if right:
            check(out["y"], weight[[1, 2]], 0.0)
        else:
            with pytest.raises(AssertionError, match=r"values are wrong|outside the output"):
                check(out["y"], weight[[1, 2]], 0.0)
