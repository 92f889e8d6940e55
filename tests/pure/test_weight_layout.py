"""The order of a weight's rows and columns on the device, as `shaders/weights.glsl` describes it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vkdecode.errors import ConfigError
from vkdecode.graph import RowPick, WeightSpec
from vkdecode.runtime.weight_layout import device_rows, pack_rows, packed_bytes, picked_rows, weight_bytes
from vkdecode.weights.block_layout import BLOCK_LAYOUTS, block_words
from vkdecode.weights.blocks import decode_rows, ggml_type, random_rows
from vkdecode.weights.dtypes import BLOCK_DTYPES, DType

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
    slots = device_rows(spec(tuple(parts)), tile, tile * row_tiles)
    assert_each_row_once(slots, sum(parts), tile * row_tiles)
    np.testing.assert_array_equal(slots[: sum(parts)], np.arange(sum(parts)))
    assert slots.size - sum(parts) < tile * row_tiles


@given(st.integers(1, 100), TILES, ROW_TILES)
def test_a_gate_stands_in_the_tile_before_its_product(pairs: int, tile: int, row_tiles: int) -> None:
    slots = device_rows(spec((pairs, pairs), "gated"), tile, tile * row_tiles)
    assert_each_row_once(slots, 2 * pairs, tile * row_tiles)
    for pair in range(pairs):
        at = pair // tile * 2 * tile + pair % tile
        assert slots[at] == pair
        assert slots[at + tile] == pairs + pair


@given(st.integers(1, 6), st.integers(1, 20), st.data(), TILES)
def test_rows_that_one_rotation_turns_are_a_tile_apart(heads: int, half: int, data: st.DataObject, tile: int) -> None:
    """A lane holds two neighbouring pairs, in the first two tiles of a block and in the last two."""
    rotary_half = data.draw(st.integers(0, half))
    one = spec((heads * 2 * half,), "rope", head_dim=2 * half, rotary_dim=2 * rotary_half)
    slots = device_rows(one, tile, tile * 4)
    assert_each_row_once(slots, heads * 2 * half, tile * 4)
    for pair in range(heads * half):
        head, i = divmod(pair, half)
        block, within = divmod(pair, 2 * tile)
        lane, odd = divmod(within, 2)
        at = block * 4 * tile + odd * 2 * tile + lane
        first, second = slots[at] - head * 2 * half, slots[at + tile] - head * 2 * half
        if i < rotary_half:
            assert (first, second) == (i, i + rotary_half)
        else:
            # Rows that are not rotated pass through in pairs, in order.
            assert (first, second) == (i + rotary_half, i + half)
    assert weight_bytes(one, tile, tile * 4) == packed_bytes(one, slots.size)


def test_stacked_projections_pair_within_each_head() -> None:
    one = spec((8, 4, 4), "rope", head_dim=4, rotary_dim=4)
    assert device_rows(one, 2, 8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15]
    assert device_rows(one, 4, 16).tolist() == [0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15]


@pytest.mark.parametrize(("gate", "up"), [(3, 4), (4, 3)])
def test_a_gate_without_its_product_is_refused(gate: int, up: int) -> None:
    with pytest.raises(ConfigError, match=f"part0 has {gate} rows and part1 has {up}"):
        device_rows(spec((gate, up), "gated"), 4, 8)


@given(st.integers(1, 5), st.integers(1, 50), st.sampled_from(["plain", "gated"]), TILES, ROW_TILES)
def test_each_expert_stands_like_a_matrix_of_its_own(
    experts: int, rows: int, order: str, tile: int, row_tiles: int
) -> None:
    parts = 2 if order == "gated" else 1
    stack = replace(spec((experts * rows,) * parts, order), experts=experts)
    slots = device_rows(stack, tile, tile * row_tiles).reshape(experts, -1)
    alone = device_rows(spec((rows,) * parts, order), tile, tile * row_tiles)
    for expert in range(experts):
        part, row = np.divmod(alone, rows)
        expected = np.where(alone < 0, -1, part * experts * rows + expert * rows + row)
        np.testing.assert_array_equal(slots[expert], expected)
    assert weight_bytes(stack, tile, tile * row_tiles) == packed_bytes(stack, slots.size)


def bit_patterns(slots: int, columns: int, dtype: DType) -> NDArray[Any]:
    """Elements whose bits are all different and not zero."""
    words = np.arange(1, slots * columns + 1).reshape(slots, columns)
    if dtype.itemsize == 4:
        return words.astype(np.uint32).view(np.float32)
    return words.astype(np.uint16).view(np.dtype(dtype.numpy))


@given(st.integers(1, 3), st.integers(1, 70), st.sampled_from([1, 2, 4, 8]), DTYPES)
def test_packing_puts_each_element_where_the_kernels_look_for_it(
    blocks: int, columns: int, tile: int, dtype: DType
) -> None:
    slots = blocks * 4 * tile
    rows = bit_patterns(slots, columns, dtype)
    packed = pack_rows(rows, dtype, tile)
    per_word = 4 // dtype.itemsize
    row_words = -(-columns // 32) * 32 // per_word
    assert packed.dtype == np.uint32
    assert packed.shape == (slots * row_words,)
    bits = np.uint32 if dtype.itemsize == 4 else np.uint16
    elements = packed.view(bits).reshape(-1, per_word)
    for row in range(slots):
        block, inside = divmod(row, 4 * tile)
        for column in range(columns):
            word = ((block * row_words + column // per_word) * tile + inside % tile) * 4 + inside // tile
            assert elements[word, column % per_word] == rows.view(bits)[row, column]
    # All that is left is padding, and it is zero.
    assert np.count_nonzero(elements) == rows.size


@given(st.integers(1, 300), st.integers(1, 16), DTYPES)
def test_packed_bytes_are_what_packing_makes(columns: int, blocks: int, dtype: DType) -> None:
    one = WeightSpec(("w",), (4 * blocks,), columns, dtype)
    packed = pack_rows(np.zeros((4 * blocks, columns), dtype.numpy), dtype, 1)
    assert packed_bytes(one, 4 * blocks) == packed.nbytes


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_blocks_grow_by_less_than_three_percent(dtype: DType) -> None:
    for columns in (256, 512, 1536, 4096):
        one = WeightSpec(("w",), (8,), columns, dtype)
        raw = np.zeros((8, dtype.row_bytes(columns)), np.uint8)
        assert packed_bytes(one, 8) == pack_rows(raw, dtype, 2).nbytes
        assert raw.nbytes <= packed_bytes(one, 8) <= 1.03 * raw.nbytes


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_words_of_a_block_hold_what_the_gguf_package_decodes(dtype: DType, blocks: int) -> None:
    """The planes and scales, read as `shaders/blocks.glsl` says, against the package; exact in float64."""
    layout = BLOCK_LAYOUTS[dtype]
    columns = blocks * dtype.block_columns
    raw = random_rows(np.random.default_rng(3), 6, columns, dtype)
    words = block_words(raw, dtype).astype(np.int64)
    expected = decode_rows(raw, ggml_type(dtype), dtype.block_bytes)
    for row, column in itertools.product(range(6), range(columns)):
        block, inside = divmod(column, layout.columns)
        part, c = divmod(inside, 32)
        value = _decoded(words[row, block], dtype, part, c)
        assert value == pytest.approx(float(expected[row, column]), rel=1e-5, abs=1e-7)


def _field(words: NDArray[np.int64], bits: int, c: int) -> int:
    """Column c of a plane: bit c of one word, or field c / (4 bits) of byte c % (4 bits)."""
    if bits == 1:
        return int(words[0]) >> c & 1
    field, byte = divmod(c, 4 * bits)
    return int(int(words[byte // 4]) >> (8 * (byte % 4) + bits * field) & (2**bits - 1))


def _half(word: int, which: int) -> float:
    return float(np.array([word >> 16 * which & 0xFFFF], np.uint16).view(np.float16)[0])


def _decoded(words: NDArray[np.int64], dtype: DType, part: int, c: int) -> float:
    layout = BLOCK_LAYOUTS[dtype]
    low = words[layout.scale_words :][part * layout.low_bits :]
    q = _field(low, layout.low_bits, c)
    if layout.high_bits:
        high = words[layout.scale_words + layout.parts * layout.low_bits :][part * layout.high_bits :]
        q = q | _field(high, layout.high_bits, c) << layout.low_bits
    first = int(words[0])
    scale_bytes = words[1 : layout.scale_words].astype(np.uint32).view(np.uint8)
    group = 2 * part + c // 16
    if dtype in (DType.Q4_1, DType.Q5_1):
        return _half(first, 0) * q + _half(first, 1)
    if dtype in (DType.Q4_0, DType.Q5_0):
        return _half(first, part) * (q - (8 if dtype is DType.Q4_0 else 16))
    if dtype is DType.Q8_0:
        return _half(first, part) * (q - 256 if q > 127 else q)
    if dtype is DType.IQ4_NL:
        table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
        return _half(first, part) * table[q]
    if dtype is DType.Q2_K:
        both = int(scale_bytes[group])
        return _half(first, 0) * (both & 15) * q - _half(first, 1) * (both >> 4)
    if dtype is DType.Q3_K:
        scale = int(scale_bytes[group // 2]) >> 4 * (group % 2) & 15
        scale |= (int(scale_bytes[8 + group // 4]) >> 2 * (group % 4) & 3) << 4
        return _half(first, 0) * (scale - 32) * (q - 4)
    if dtype is DType.Q6_K:
        return _half(first, 0) * int(scale_bytes.view(np.int8)[group]) * (q - 32)
    return _half(first, 0) * int(scale_bytes[2 * part]) * q - _half(first, 1) * int(scale_bytes[2 * part + 1])


def test_packing_does_not_change_its_input() -> None:
    rows = bit_patterns(8, 5, DType.F32)
    before = rows.copy()
    pack_rows(rows, DType.F32, 2)
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
