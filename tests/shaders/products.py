"""One product of linear.comp: its sizes, random inputs, what it binds, and what must come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_lab import (
    F64,
    UNIT_ROUNDOFF,
    Trial,
    Words,
    axes_of,
    bits,
    blank,
    ceil_div,
    check,
    generator,
    normal,
    poisoned,
    subgroup,
    tiled,
)
from kv_rows import KV_DTYPES, check_stored, empty_cache
from numpy.typing import NDArray

from vkdecode.runtime.weight_layout import pack_rows
from vkdecode.weights.blocks import decode_rows, ggml_type, random_rows
from vkdecode.weights.dtypes import BLOCK_DTYPES, PLAIN_DTYPES

DTYPES = {dtype.value: dtype for dtype in (*PLAIN_DTYPES, *BLOCK_DTYPES)}
EPSILON = 1e-2
ROUNDINGS = 16
SLOPE = 1.15  # of silu and gelu at most
ROW_TILES = 4
GARBAGE = 0xFFFF_FFF0
NORMS = ("none", "rms", "layer")
ACTIVATIONS = ("none", "silu", "gelu_tanh")


@dataclass(frozen=True)
class Shape:
    """Sizes of one dispatch. `tile` 0 is the subgroup's size; `rows` are given as tiles and rows beside them.

    `heads` (of q, of k and as many of v, head_dim, rotary_dim) replaces the rows in the rope epilogue. Of `room`
    tokens `count` are real. A block format has `blocks` blocks instead of the columns. The rope epilogue puts rows into
    a cache from `offset` on, which it reads from device memory where `on_device` says so.
    """

    columns: int
    blocks: int
    tiles: int
    extra_rows: int
    groups: int
    heads: tuple[int, int, int, int]
    room: int
    count: int
    bias: bool = False
    norm_bias: bool = False
    tile: int = 0
    split: int = 1
    stage_packs: int = 1
    offset: int = 0
    on_device: bool = False


@dataclass(frozen=True)
class Fused:
    """What else a dispatch does: NORMS and ACTIVATIONS by name, and whether it adds a residual."""

    norm: str = "none"
    activation: str = "none"
    residual: bool = False


SUBGROUP_SHAPES = [
    Shape(36, 3, 5, 3, groups=2, heads=(3, 2, 20, 12), room=16, count=5, bias=True, offset=7, on_device=True),
    Shape(4, 1, 0, 1, groups=1, heads=(2, 1, 4, 4), room=16, count=9, norm_bias=True),
    Shape(40, 2, 8, 0, groups=3, heads=(2, 1, 64, 64), room=48, count=40, offset=3),
    Shape(28, 4, 9, 1, groups=2, heads=(1, 1, 80, 0), room=16, count=3, bias=True, norm_bias=True, on_device=True),
    Shape(132, 5, 1, 2, groups=1, heads=(3, 1, 12, 4), room=64, count=49, norm_bias=True, offset=11, on_device=True),
]
STAGES = [(8, 1, 1), (4, 4, 8), (32, 8, 8), (16, 2, 4), (32, 1, 3)]  # tile, split, chunks staged at a time
SHARED_SHAPES = [
    dataclasses.replace(shape, tile=tile, split=split, stage_packs=packs)
    for shape, (tile, split, packs) in zip(SUBGROUP_SHAPES, STAGES, strict=True)
]


class Problem:
    """Random inputs for one kernel and shape, what it binds, and what must come out.

    Attributes:
        count: the real tokens that the kernel is told of.
        offset: the row of the first one in the cache.

    """

    def __init__(
        self, key: str, shape: Shape, fused: Fused | None = None, changed: Mapping[str, int] | None = None
    ) -> None:
        self.key = key
        self.axes = axes_of(key)
        self.epilogue = self.axes["EPILOGUE"]
        self.fused = fused or Fused()
        self.dtype = DTYPES[self.axes["DTYPE"]]
        self.columns = shape.blocks * self.dtype.block_columns if self.dtype.is_block else shape.columns
        self.paired = self.epilogue != "plain"
        self.token_tile = int(self.axes["TOKENS"])
        self.shape = shape = shape if self.token_tile > 1 else dataclasses.replace(shape, room=1, count=1)
        self.count, self.offset = shape.count, shape.offset
        self.cache_rows = shape.offset + shape.count + 2
        self.tile = shape.tile or subgroup()
        q_heads, kv_heads, head_dim, _ = shape.heads
        self.rows = shape.tiles * self.tile + shape.extra_rows
        self.outputs = self.rows
        if self.epilogue == "rope":
            self.rows = (q_heads + 2 * kv_heads) * head_dim // 2
            self.outputs = q_heads * head_dim
        tiles = ceil_div(self.rows, self.tile) * (2 if self.paired else 1)
        self.blocks = ceil_div(tiles, ROW_TILES)
        self.slots = self.blocks * ROW_TILES * self.tile
        self.draw()
        workgroups = (ceil_div(self.blocks, shape.groups), shape.room // self.token_tile, 1)
        self.trial = Trial(key, self.buffers(), {**self.spec(), **(changed or {})}, workgroups)

    def draw(self) -> None:
        """Inputs; padding rows of weights and tokens are poison."""
        rng = generator(self.key, self.shape)
        shape, real = self.shape, self.shape.count
        held = 2 * self.rows if self.paired else self.rows
        if self.dtype.is_block:
            self.stored: NDArray[Any] = random_rows(rng, held, self.columns, self.dtype)
            decoded = decode_rows(self.stored, ggml_type(self.dtype), self.dtype.block_bytes)
            self.weight = decoded.astype(np.float64)
            # The kernels sum scaled integers and offsets by themselves, and these are about as large as the weights.
            self.sizes = np.abs(self.weight) + np.abs(self.weight).max(axis=1, keepdims=True)
        else:
            self.stored = normal(rng, held, self.columns).astype(self.dtype.numpy)
            self.weight = self.stored.astype(np.float64)
            self.sizes = np.abs(self.weight)
        self.bias = normal(rng, held)
        self.norm_weight = normal(rng, self.columns)
        self.norm_bias = normal(rng, self.columns)
        self.x = poisoned((shape.room, self.columns))
        self.x[:real] = normal(rng, real, self.columns) + np.float32(0.5)
        self.residual = poisoned((shape.room, self.outputs))
        self.residual[:real] = normal(rng, real, self.outputs) * 4
        half, rotary_half = shape.heads[2] // 2, shape.heads[3] // 2
        self.cos, self.sin = poisoned((shape.room, half)), poisoned((shape.room, half))
        # They are of no real angle, so that a mix-up shows.
        self.cos[:real, :rotary_half] = normal(rng, real, rotary_half)
        self.sin[:real, :rotary_half] = normal(rng, real, rotary_half)

    def slot_rows(self) -> NDArray[np.int64]:
        """The row of each slot, or -1."""
        slots = np.full(self.slots, -1)
        if not self.paired:
            slots[: self.rows] = np.arange(self.rows)
            return slots
        for pair in range(self.rows):
            for which in (0, 1):
                if self.epilogue == "gated":
                    tile, lane = pair // self.tile * 2 + which, pair % self.tile
                    slots[tile * self.tile + lane] = (pair, self.rows + pair)[which]
                else:  # two pairs a lane, neighbours in their head
                    block, within = divmod(pair, 2 * self.tile)
                    tile, lane = block * ROW_TILES + 2 * (within % 2) + which, within // 2
                    slots[tile * self.tile + lane] = self.rotated_rows(pair)[which]
        return slots

    def rotated_rows(self, pair: int) -> tuple[int, int]:
        """The two rows of a head that one rotation turns; of what is not rotated, the rows that are left."""
        _, _, head_dim, rotary_dim = self.shape.heads
        head, i = divmod(pair, head_dim // 2)
        first = head * head_dim + i
        if i < rotary_dim // 2:
            return first, first + rotary_dim // 2
        return first + rotary_dim // 2, first + head_dim // 2

    def spec(self) -> dict[str, int]:
        shape = self.shape
        q_heads, kv_heads, head_dim, rotary_dim = shape.heads
        only: dict[str, int] = {}
        if self.epilogue == "plain":
            only = {"HAS_RESIDUAL": int(self.fused.residual)}
        elif self.epilogue == "rope":
            only = {"KV_HEADS": kv_heads, "OFFSET_ON_DEVICE": int(shape.on_device)}
        return {
            **only,
            "WORKGROUP": self.tile * shape.split,
            "TILE": self.tile,
            "COLUMNS": self.columns,
            "HAS_BIAS": int(shape.bias),
            "EPSILON_BITS": bits(EPSILON),
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "QUERY_HEADS": q_heads,
            "X_CHUNK": shape.stage_packs * 32,
            "NORM": NORMS.index(self.fused.norm),
            "HAS_NORM_BIAS": int(shape.norm_bias),
            "ACTIVATION": ACTIVATIONS.index(self.fused.activation),
            "EXPERTS_USED": 0,  # test_kernel_experts.py has the stacks
            "EXPERT_X": 0,
            "KEEP_X": int(shape.groups > 1),
        }

    def push(self) -> dict[str, int]:
        push = {"rows": self.rows, "groups": self.shape.groups, "outputs": self.outputs, "expert_blocks": GARBAGE}
        if self.epilogue != "rope":
            return push
        offset = GARBAGE if self.shape.on_device else self.offset
        return {**push, "cache_rows": self.cache_rows, "cached_len": offset}

    def empty_cache(self) -> NDArray[Any]:
        _, kv_heads, head_dim, _ = self.shape.heads
        return empty_cache(kv_heads, self.cache_rows, head_dim, KV_DTYPES[self.axes["KV"]])

    def buffers(self) -> dict[str, NDArray[Any]]:
        slots = self.slot_rows()
        if self.dtype.is_block:
            weight: NDArray[Any] = np.full((self.slots, self.stored.shape[1]), 0xFF, np.uint8)  # scales are NaN
        else:
            weight = poisoned((self.slots, self.columns), self.stored.dtype)
        weight[slots >= 0] = self.stored[slots[slots >= 0]]
        bias = poisoned((self.slots,))
        if self.shape.bias:
            bias[slots >= 0] = self.bias[slots[slots >= 0]]
        normed, layer = self.fused.norm != "none", self.fused.norm == "layer"
        unread = poisoned((self.columns,))
        buffers: dict[str, NDArray[Any]] = {
            "weight": pack_rows(weight, self.dtype, self.tile) if self.dtype.is_block else tiled(weight, self.tile),
            "x": self.x,
            "bias": bias,
            "y": blank(self.shape.room * self.outputs),
            "norm_weight": self.norm_weight if normed else unread,
            "norm_bias": self.norm_bias if layer and self.shape.norm_bias else unread,
        }
        if self.epilogue == "plain":
            buffers["residual"] = self.residual if self.fused.residual else poisoned((1,))
        if self.epilogue == "rope":
            # What is not read is poison; attended_len has no part in a write.
            on_device = np.array([self.offset, GARBAGE], np.uint32)
            offset = on_device if self.shape.on_device else poisoned((2,), np.uint32)
            buffers |= {"rope_cos": self.cos, "rope_sin": self.sin, "offset": offset}
            buffers |= {"cache_k": self.empty_cache(), "cache_v": self.empty_cache()}
        if self.token_tile > 1 or self.epilogue == "rope":
            buffers["token_count"] = np.array([self.count], np.uint32)
        else:
            buffers["route"] = poisoned((1,))
        return buffers

    def run(self, wrong: Mapping[str, int] | None = None, **changed: NDArray[Any]) -> dict[str, Words]:
        return self.trial.run({**self.push(), **(wrong or {})}, **{**self.buffers(), **changed})

    def expected(self) -> tuple[F64, F64]:
        """All values of the product, [room, …], and the sums of absolute values; NaN where a token is not real."""
        x, sizes = self.normalized()
        value, magnitude = x @ self.weight.T, sizes @ self.sizes.T
        if self.shape.bias:
            value, magnitude = value + self.bias, magnitude + np.abs(self.bias)
        if self.epilogue == "gated":
            return gated(self.fused.activation, value, magnitude)
        if self.epilogue == "rope":
            return self.rotated(value, magnitude)
        if self.fused.activation != "none":
            value, magnitude = activated(self.fused.activation, value), SLOPE * magnitude
        if self.fused.residual:
            return value + self.residual, magnitude + np.abs(self.residual)
        return value, magnitude

    def normalized(self) -> tuple[F64, F64]:
        """x after the norm, and the sums of absolute values that it was computed from."""
        x = self.x.astype(np.float64)
        norm = self.fused.norm
        if norm == "none":
            return x, np.abs(x)
        mean = x.mean(axis=1, keepdims=True) if norm == "layer" else np.zeros((len(x), 1))
        factor = self.norm_weight / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + float(np.float32(EPSILON)))
        bias = self.norm_bias if norm == "layer" and self.shape.norm_bias else np.zeros(self.columns)
        mean_size = np.abs(x).mean(axis=1, keepdims=True) if norm == "layer" else 0.0
        return (x - mean) * factor + bias, (np.abs(x) + mean_size) * np.abs(factor) + np.abs(bias)

    def rotated(self, value: F64, magnitude: F64) -> tuple[F64, F64]:
        q_heads, kv_heads, head_dim, rotary_dim = self.shape.heads
        half, turned = rotary_dim // 2, q_heads + kv_heads
        room = len(value)
        value = value.reshape(room, -1, head_dim)
        magnitude = magnitude.reshape(room, -1, head_dim)
        out, sums = value.copy(), magnitude.copy()
        c, s = self.cos[:, None, :half].astype(np.float64), self.sin[:, None, :half].astype(np.float64)
        a, b = value[:, :turned, :half], value[:, :turned, half:rotary_dim]
        size_a, size_b = magnitude[:, :turned, :half], magnitude[:, :turned, half:rotary_dim]
        out[:, :turned, :half], out[:, :turned, half:rotary_dim] = a * c - b * s, b * c + a * s
        sums[:, :turned, :half] = size_a * abs(c) + size_b * abs(s)
        sums[:, :turned, half:rotary_dim] = size_b * abs(c) + size_a * abs(s)
        return out.reshape(room, -1), sums.reshape(room, -1)

    def check(self, out: Mapping[str, Words]) -> None:
        values, magnitude = self.expected()
        shape, real = self.shape, self.count
        token = np.arange(shape.room)[:, None]
        # A tile of tokens that holds a real one is computed whole; one that holds none is left alone. Without tiles
        # nothing asks whether the one token counts.
        computed = token < (ceil_div(real, self.token_tile) * self.token_tile if self.token_tile > 1 else 1)
        if self.epilogue == "rope":
            _, kv_heads, head_dim, _ = shape.heads
            rows = values[:real, self.outputs :].reshape(real, 2, kv_heads, head_dim)
            errors = ROUNDINGS * UNIT_ROUNDOFF * magnitude[:real, self.outputs :].reshape(rows.shape)
            for which, name in enumerate(("cache_k", "cache_v")):
                before = self.empty_cache()
                check_stored(out[name], before, rows[:, which], self.offset, errors[:, which])
            values, magnitude = values[:, : self.outputs], magnitude[:, : self.outputs]
        check(out["y"], values, magnitude, token < real, computed, roundings=ROUNDINGS)


def activated(name: str, value: F64) -> F64:
    if name == "silu":
        with np.errstate(over="ignore"):
            return np.asarray(value / (1 + np.exp(-value)), np.float64)
    inner: F64 = np.sqrt(2 / np.pi) * (value + 0.044715 * value**3)
    return np.asarray(0.5 * value * (1 + np.tanh(inner)), np.float64)


def gated(name: str, value: F64, magnitude: F64) -> tuple[F64, F64]:
    """act(gate) * up for rows [gates, ups]."""
    gate, up = np.split(value, 2, axis=1)
    size_gate, size_up = np.split(magnitude, 2, axis=1)
    # Far below zero the exponential is infinite and the gate closes.
    closed = activated(name, gate)
    return closed * up, SLOPE * size_gate * np.abs(up) + np.abs(closed) * size_up
