"""The order of a weight's rows and columns on the device, as `shaders/weights.glsl` describes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vkdecode.errors import ConfigError
from vkdecode.graph import RowPick, WeightSpec
from vkdecode.runtime.weight_layout import pack_rows, pack_width, packed_bytes, picked_rows, row_slots
from vkdecode.weights.dtypes import DType

TILES = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
ROW_TILES = st.sampled_from([2, 4])
DTYPES = st.sampled_from([DType.F32, DType.F16, DType.BF16])


def spec(part_rows: tuple[int, ...], order: str = "plain", head_dim: int = 0, rotary_dim: int = 0) -> WeightSpec:
    names = tuple(f"part{i}" for i in range(len(part_rows)))
    return WeightSpec(names, part_rows, 1, DType.F32, order, head_dim, rotary_dim)


def assert_each_row_once(slots: NDArray[np.int64], rows: int, block_rows: int) -> None:
    assert slots.size % block_rows == 0
    np.testing.assert_array_equal(np.sort(slots[slots >= 0]), np.arange(rows))
    assert (slots[slots < 0] == -1).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), TILES, ROW_TILES)
def test_plain_rows_stand_in_order(parts: list[int], tile: int, row_tiles: int) -> None:
    slots = row_slots(spec(tuple(parts)), tile, tile * row_tiles)
    assert_each_row_once(slots, sum(parts), tile * row_tiles)
    np.testing.assert_array_equal(slots[: sum(parts)], np.arange(sum(parts)))
    assert slots.size - sum(parts) < tile * row_tiles


@given(st.integers(1, 100), TILES, ROW_TILES)
def test_a_gate_stands_in_the_tile_before_its_product(pairs: int, tile: int, row_tiles: int) -> None:
    slots = row_slots(spec((pairs, pairs), "gated"), tile, tile * row_tiles)
    assert_each_row_once(slots, 2 * pairs, tile * row_tiles)
    for pair in range(pairs):
        at = pair // tile * 2 * tile + pair % tile
        assert slots[at] == pair
        assert slots[at + tile] == pairs + pair


@given(st.integers(1, 6), st.integers(1, 20), st.data(), TILES, ROW_TILES)
def test_rows_that_one_rotation_turns_are_a_tile_apart(
    heads: int, half: int, data: st.DataObject, tile: int, row_tiles: int
) -> None:
    rotary_half = data.draw(st.integers(0, half))
    one = spec((heads * 2 * half,), "rope", head_dim=2 * half, rotary_dim=2 * rotary_half)
    slots = row_slots(one, tile, tile * row_tiles)
    assert_each_row_once(slots, heads * 2 * half, tile * row_tiles)
    for pair in range(heads * half):
        head, i = divmod(pair, half)
        at = pair // tile * 2 * tile + pair % tile
        first, second = slots[at] - head * 2 * half, slots[at + tile] - head * 2 * half
        if i < rotary_half:
            assert (first, second) == (i, i + rotary_half)
        else:
            # Rows that are not rotated pass through in pairs, in order.
            assert (first, second) == (i + rotary_half, i + half)


def test_stacked_projections_pair_within_each_head() -> None:
    one = spec((8, 4, 4), "rope", head_dim=4, rotary_dim=4)
    assert row_slots(one, 2, 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert row_slots(one, 4, 8).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


@pytest.mark.parametrize(("gate", "up"), [(3, 4), (4, 3)])
def test_a_gate_without_its_product_is_refused(gate: int, up: int) -> None:
    with pytest.raises(ConfigError, match=f"part0 has {gate} rows and part1 has {up}"):
        row_slots(spec((gate, up), "gated"), 4, 8)


def bit_patterns(slots: int, columns: int, dtype: DType) -> NDArray[Any]:
    """Elements whose bits are all different and not zero."""
    words = np.arange(1, slots * columns + 1).reshape(slots, columns)
    if dtype.itemsize == 4:
        return words.astype(np.uint32).view(np.float32)
    return words.astype(np.uint16).view(np.dtype(dtype.numpy))


@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 2, 4, 8, 16]), DTYPES)
def test_packing_puts_each_element_where_the_kernels_look_for_it(
    tiles: int, columns: int, tile: int, dtype: DType
) -> None:
    rows = bit_patterns(tiles * tile, columns, dtype)
    packed = pack_rows(rows, tile)
    width = 16 // dtype.itemsize
    chunks = -(-columns // width)
    assert packed.dtype == np.uint32
    assert packed.shape == (tiles * tile * chunks * 4,)
    bits = np.uint32 if dtype.itemsize == 4 else np.uint16
    chunked = packed.view(bits).reshape(-1, width)
    for row in range(tiles * tile):
        for column in range(columns):
            where = (row // tile * chunks + column // width) * tile + row % tile
            assert chunked[where, column % width] == rows.view(bits)[row, column]
    # All that is left is padding, and it is zero.
    assert np.count_nonzero(chunked) == rows.size


@given(st.integers(1, 300), st.integers(1, 64), DTYPES)
def test_packed_bytes_are_what_packing_makes(columns: int, slots: int, dtype: DType) -> None:
    one = WeightSpec(("w",), (slots,), columns, dtype)
    assert packed_bytes(one, slots) == pack_rows(np.zeros((slots, columns), dtype.numpy), 1).nbytes
    assert pack_width(dtype) * dtype.itemsize == 16


def test_packing_does_not_change_its_input() -> None:
    rows = bit_patterns(8, 5, DType.F32)
    before = rows.copy()
    pack_rows(rows, 4)
    np.testing.assert_array_equal(rows.view(np.uint32), before.view(np.uint32))


def test_picked_rows_are_runs_of_a_tensor_or_pairs_of_a_head() -> None:
    rows = np.arange(8)
    np.testing.assert_array_equal(picked_rows(RowPick(), rows), rows)
    np.testing.assert_array_equal(picked_rows(RowPick(start=5), rows), rows + 5)
    np.testing.assert_array_equal(picked_rows(RowPick(2, 2, 6), rows), [2, 3, 8, 9, 14, 15, 20, 21])
    np.testing.assert_array_equal(picked_rows(RowPick(interleaved=4), rows), [0, 2, 1, 3, 4, 6, 5, 7])
    np.testing.assert_array_equal(picked_rows(RowPick(interleaved=8), rows), [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(picked_rows(RowPick(1, 4, 12, 4), rows), [1, 3, 2, 4, 13, 15, 14, 16])
    np.testing.assert_array_equal(picked_rows(RowPick(2, 2, 6), rows[5:2:-1]), [15, 14, 9])
