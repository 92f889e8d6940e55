"""The order in which a weight's rows and columns lie on the device; pure numpy.

The layout is the one that `shaders/weights.glsl` describes: each word of a row next to the same word of the rows that a
lane and its neighbours work on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ConfigError, DeviceError
from vkdecode.gpu import ROW_TILES
from vkdecode.graph import MaxUnits, RowPick, WeightSpec
from vkdecode.weights.block_layout import BLOCK_LAYOUTS, PACK, block_words
from vkdecode.weights.dtypes import DType

Rows = NDArray[np.int64]


def _row_words(dtype: DType, columns: int) -> int:
    """32-bit words of a row."""
    if dtype.is_block:
        layout = BLOCK_LAYOUTS[dtype]
        return -(-columns // layout.columns) * layout.words
    return -(-columns // PACK) * PACK * dtype.itemsize // 4


def device_rows(spec: WeightSpec, tile: int, block_rows: int) -> Rows:
    """For each row slot on the device the row of the stacked parts that it holds, or -1 for padding; int64 [slots].

    Gated pairs have the first rows of `tile` pairs in one tile and their partners in the next. Rotary pairs come two to
    a lane, neighbours in their head: four tiles hold the first rows of the even ones, their partners, and the same of
    the odd ones. Each expert of a stack starts a block.
    """
    if spec.experts:
        return np.concatenate([device_rows(one, tile, block_rows) for one in _each_expert(spec)])
    units = slice(spec.first_unit, spec.first_unit + spec.units)
    if spec.order == "plain":
        rows = np.arange(spec.rows)[units]
    else:
        each = 1 if spec.order == "gated" else 2  # pairs of a lane that are neighbours
        first, second = (half[units] for half in (_gated_pairs(spec) if each == 1 else _rope_pairs(spec)))
        pairs = -(-first.size // (each * tile)) * each * tile
        padded = np.full((2, pairs), -1, np.int64)
        padded[0, : first.size] = first
        padded[1, : second.size] = second
        rows = padded.reshape(2, -1, tile, each).transpose(1, 3, 0, 2).reshape(-1)
    slots = np.full(-(-rows.size // block_rows) * block_rows, -1, np.int64)
    slots[: rows.size] = rows
    return slots


def _each_expert(spec: WeightSpec) -> Iterator[WeightSpec]:
    """The parts of a stack."""
    units = spec.units // spec.experts
    return (replace(spec, first_unit=one * units, unit_count=units, experts=0) for one in range(spec.experts))


def picked_rows(pick: RowPick, rows: Rows) -> Rows:
    """The rows of a tensor that a part made by `pick` has as its rows `rows`; int64 of the same shape."""
    if pick.interleaved:
        head, within = np.divmod(rows, pick.interleaved)
        half = pick.interleaved // 2
        rows = head * pick.interleaved + within % half * 2 + within // half
    if pick.run:
        rows = rows // pick.run * pick.stride + rows % pick.run
    return rows + pick.start


def _gated_pairs(spec: WeightSpec) -> tuple[Rows, Rows]:
    half = len(spec.part_rows) // 2
    gate, up = sum(spec.part_rows[:half]), sum(spec.part_rows[half:])
    if gate != up:
        raise ConfigError(
            f"{spec.names[0]} has {gate} rows and {spec.names[half]} has {up}; a gate and its product need equally many"
        )
    return np.arange(gate), np.arange(gate, gate + up)


def _rope_pairs(spec: WeightSpec) -> tuple[Rows, Rows]:
    half, rotary_half = spec.head_dim // 2, spec.rotary_dim // 2
    i = np.arange(half)
    first = np.where(i < rotary_half, i, i + rotary_half)
    second = first + np.where(i < rotary_half, rotary_half, half - rotary_half)
    heads = np.arange(spec.rows // spec.head_dim)[:, None] * spec.head_dim
    return (heads + first).reshape(-1), (heads + second).reshape(-1)


def pack_rows(rows: NDArray[np.generic], dtype: DType, tile: int) -> NDArray[np.uint32]:
    """Arrange rows [slots, columns], whole blocks of `ROW_TILES * tile`, as the kernels read them; uint32, flat.

    Rows of a block format come as files store them, uint8 [slots, bytes].
    """
    slots = rows.shape[0]
    if dtype.is_block:
        words = block_words(rows.view(np.uint8), dtype).reshape(slots, -1)
    else:
        width = _row_words(dtype, rows.shape[1]) * 4 // dtype.itemsize
        if width != rows.shape[1]:
            padded = np.zeros((slots, width), rows.dtype)
            padded[:, : rows.shape[1]] = rows
            rows = padded
        words = np.ascontiguousarray(rows).view(np.uint32)
    blocks = words.reshape(slots // (ROW_TILES * tile), ROW_TILES, tile, -1)
    return np.ascontiguousarray(blocks.transpose(0, 3, 2, 1)).reshape(-1)


def packed_bytes(spec: WeightSpec, slots: int) -> int:
    """Bytes of a packed weight with this many row slots."""
    return slots * _row_words(spec.dtype, spec.columns) * 4


def weight_bytes(spec: WeightSpec, tile: int, block_rows: int) -> int:
    """Bytes of a weight constant on the device, padding included."""
    if spec.experts:
        return spec.experts * weight_bytes(next(_each_expert(spec)), tile, block_rows)
    units = spec.units
    rows = units if spec.order == "plain" else -(-units // tile) * tile * 2
    slots = -(-rows // block_rows) * block_rows
    return slots * 4 if spec.vector else packed_bytes(spec, slots)


def max_units(buffer_bytes: int, block_rows: int, where: str) -> MaxUnits:
    """How many rows, or pairs of rows, of a weight a storage buffer of this size may hold; what splitting asks.

    The function that it returns raises `DeviceError`, naming `where`, if not even the smallest part fits: parts are
    whole blocks of rows.
    """

    def units(spec: WeightSpec) -> int:
        row_bytes = packed_bytes(spec, 1)
        slots = buffer_bytes // row_bytes // block_rows * block_rows
        if not slots:
            raise DeviceError(
                f"not even one block of rows of {spec.title} fits one storage buffer of {where}: "
                f"{block_rows * row_bytes} bytes, and {buffer_bytes} are allowed"
            )
        return slots if spec.order == "plain" else slots // 2

    return units
