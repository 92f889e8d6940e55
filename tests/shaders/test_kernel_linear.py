"""Products with a tiled weight and everything fused around them: norms, bias, residual, rotation, activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_lab import (
    ELEMENTS,
    F64,
    TURN,
    Words,
    axes_of,
    bits,
    blank,
    ceil_div,
    check,
    generator,
    normal,
    poisoned,
    run_once,
    subgroup,
    tiled,
    variants,
)
from numpy.typing import NDArray

KEYS = variants(
    "linear",
    LANES=["subgroup", "shared"],
    DTYPE=["f32", "f16", "bf16"],
    TOKENS=[1, 8],
    NORM=["none", "rms", "layer"],
    EPILOGUE=["none", "add", "rope", "gated", "gelu_tanh"],
)
EPSILON = 1e-2
SLOPE = 1.15  # of silu and gelu at most
ROW_TILES = {"subgroup": 4, "shared": 2}


@dataclass(frozen=True)
class Shape:
    """Sizes of one dispatch. `tile` 0 is the subgroup's size; `rows` are given as tiles and rows beside them.

    `heads` (all of them, the rotated ones, head_dim, rotary_dim) replaces the rows in the rope epilogue. Of `room`
    tokens `count` are real.
    """

    columns: int
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


SUBGROUP_SHAPES = [
    Shape(37, 5, 3, groups=2, heads=(3, 2, 20, 12), room=8, count=5, bias=True),
    Shape(1, 0, 1, groups=1, heads=(2, 2, 4, 4), room=16, count=9, norm_bias=True),
    Shape(40, 8, 0, groups=3, heads=(2, 1, 64, 64), room=16, count=8),
    Shape(29, 9, 1, groups=2, heads=(1, 0, 80, 20), room=16, count=3, bias=True, norm_bias=True),
    Shape(131, 1, 2, groups=1, heads=(3, 3, 6, 2), room=24, count=17, norm_bias=True),
]
STAGES = [(8, 1, 1), (4, 4, 3), (32, 8, 8), (16, 2, 5), (32, 1, 32)]  # tile, split, packs staged at a time
SHARED_SHAPES = [
    dataclasses.replace(shape, tile=tile, split=split, stage_packs=packs)
    for shape, (tile, split, packs) in zip(SUBGROUP_SHAPES, STAGES, strict=True)
]
# Five shapes in a Latin square over the epilogues and the other axes, moved on for each width.
CASES = [
    pytest.param(key, shapes[number], id=f"{key} {number}")
    for index, key in enumerate(KEYS)
    for shapes in [SUBGROUP_SHAPES if "LANES=subgroup" in key else SHARED_SHAPES]
    for number in [(index + index // 5 + 2 * TURN) % 5]
]


class Problem:
    """Random inputs for one kernel and shape, what it binds, and what must come out."""

    def __init__(self, key: str, shape: Shape) -> None:
        self.key = key
        self.axes = axes_of(key)
        self.epilogue = self.axes["EPILOGUE"]
        self.dtype = ELEMENTS[self.axes["DTYPE"]]
        self.pack = 16 // self.dtype.itemsize
        self.paired = self.epilogue in ("rope", "gated")
        self.token_tile = int(self.axes["TOKENS"])
        self.shape = shape = shape if self.token_tile > 1 else dataclasses.replace(shape, room=1, count=1)
        self.tile = shape.tile or subgroup()
        heads, _, head_dim, _ = shape.heads
        self.rows = heads * head_dim // 2 if self.epilogue == "rope" else shape.tiles * self.tile + shape.extra_rows
        self.outputs = 2 * self.rows if self.epilogue == "rope" else self.rows
        tiles = ceil_div(self.rows, self.tile) * (2 if self.paired else 1)
        self.blocks = ceil_div(tiles, ROW_TILES[self.axes["LANES"]])
        self.slots = self.blocks * ROW_TILES[self.axes["LANES"]] * self.tile
        self.draw()

    def draw(self) -> None:
        """Inputs; padding rows of weights and tokens are poison."""
        rng = generator(self.key, self.shape)
        shape, real = self.shape, self.shape.count
        held = 2 * self.rows if self.paired else self.rows
        self.weight = normal(rng, held, shape.columns).astype(self.dtype)
        self.bias = normal(rng, held)
        self.norm_weight = normal(rng, shape.columns)
        self.norm_bias = normal(rng, shape.columns)
        self.x = poisoned((shape.room, shape.columns))
        self.x[:real] = normal(rng, real, shape.columns) + np.float32(0.5)
        self.residual = poisoned((shape.room, self.outputs))
        self.residual[:real] = normal(rng, real, self.outputs) * 4
        half, rotary_half = shape.heads[2] // 2, shape.heads[3] // 2
        self.cos, self.sin = poisoned((shape.room, half)), poisoned((shape.room, half))
        # Pairs after the rotated ones have cosine 1 and sine 0. The rotated ones have no real angle, so that a
        # mix-up shows.
        self.cos[:real, rotary_half:], self.sin[:real, rotary_half:] = 1.0, 0.0
        self.cos[:real, :rotary_half] = normal(rng, real, rotary_half)
        self.sin[:real, :rotary_half] = normal(rng, real, rotary_half)

    def slot_rows(self) -> NDArray[np.int64]:
        """The row of each slot, or -1."""
        slots = np.full(self.slots, -1)
        if not self.paired:
            slots[: self.rows] = np.arange(self.rows)
            return slots
        for pair in range(self.rows):
            two = (pair, self.rows + pair) if self.epilogue == "gated" else self.rotated_rows(pair)
            for which in (0, 1):
                slots[(pair // self.tile * 2 + which) * self.tile + pair % self.tile] = two[which]
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
        _, rotated, head_dim, rotary_dim = shape.heads
        only_layer = {"HAS_NORM_BIAS": int(shape.norm_bias)} if self.axes["NORM"] == "layer" else {}
        return {
            **only_layer,
            "WORKGROUP": self.tile * shape.split,
            "TILE": self.tile,
            "COLUMNS": shape.columns,
            "ROWS": self.rows,
            "GROUPS": shape.groups,
            "OUTPUTS": self.outputs,
            "HAS_BIAS": int(shape.bias),
            "EPSILON_BITS": bits(EPSILON),
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "ROTARY_HEADS": rotated,
            "X_CHUNK": shape.stage_packs * self.pack,
        }

    def buffers(self) -> dict[str, NDArray[Any]]:
        slots = self.slot_rows()
        weight = poisoned((self.slots, self.shape.columns), self.dtype)
        weight[slots >= 0] = self.weight[slots[slots >= 0]]
        bias = poisoned((self.slots,))
        if self.shape.bias:
            bias[slots >= 0] = self.bias[slots[slots >= 0]]
        buffers: dict[str, NDArray[Any]] = {
            "weight": tiled(weight, self.tile),
            "x": self.x,
            "bias": bias,
            "y": blank(self.shape.room * self.outputs),
        }
        if self.axes["NORM"] != "none":
            buffers["norm_weight"] = self.norm_weight
        if self.axes["NORM"] == "layer":
            buffers["norm_bias"] = self.norm_bias if self.shape.norm_bias else poisoned((self.shape.columns,))
        if self.epilogue == "add":
            buffers["residual"] = self.residual
        if self.epilogue == "rope":
            buffers |= {"rope_cos": self.cos, "rope_sin": self.sin}
        if self.token_tile > 1:
            buffers["token_count"] = np.array([self.shape.count], np.uint32)
        return buffers

    def run(self, wrong: Mapping[str, int] | None = None, **changed: NDArray[Any]) -> Words:
        workgroups = (ceil_div(self.blocks, self.shape.groups), self.shape.room // self.token_tile, 1)
        return run_once(self.key, {**self.buffers(), **changed}, {**self.spec(), **(wrong or {})}, workgroups)["y"]

    def expected(self) -> tuple[F64, F64]:
        """Values [room, outputs] and the sums of absolute values; NaN where a token is not real."""
        x, sizes = self.normalized()
        weight = self.weight.astype(np.float64)
        value, magnitude = x @ weight.T, sizes @ np.abs(weight.T)
        if self.shape.bias:
            value, magnitude = value + self.bias, magnitude + np.abs(self.bias)
        if self.epilogue == "add":
            return value + self.residual, magnitude + np.abs(self.residual)
        if self.epilogue == "gated":
            return gated(value, magnitude)
        if self.epilogue == "rope":
            return self.rotated(value, magnitude)
        if self.epilogue == "gelu_tanh":
            return gelu_tanh(value), SLOPE * magnitude
        return value, magnitude

    def normalized(self) -> tuple[F64, F64]:
        """x after the norm, and the sums of absolute values that it was computed from."""
        x = self.x.astype(np.float64)
        norm = self.axes["NORM"]
        if norm == "none":
            return x, np.abs(x)
        mean = x.mean(axis=1, keepdims=True) if norm == "layer" else np.zeros((len(x), 1))
        factor = self.norm_weight / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + float(np.float32(EPSILON)))
        bias = self.norm_bias if norm == "layer" and self.shape.norm_bias else np.zeros(self.shape.columns)
        mean_size = np.abs(x).mean(axis=1, keepdims=True) if norm == "layer" else 0.0
        return (x - mean) * factor + bias, (np.abs(x) + mean_size) * np.abs(factor) + np.abs(bias)

    def rotated(self, value: F64, magnitude: F64) -> tuple[F64, F64]:
        heads, rotated, head_dim, rotary_dim = self.shape.heads
        half = rotary_dim // 2
        value = value.reshape(-1, heads, head_dim)
        magnitude = magnitude.reshape(-1, heads, head_dim)
        out, sums = value.copy(), magnitude.copy()
        c, s = self.cos[:, None, :half].astype(np.float64), self.sin[:, None, :half].astype(np.float64)
        a, b = value[:, :rotated, :half], value[:, :rotated, half:rotary_dim]
        size_a, size_b = magnitude[:, :rotated, :half], magnitude[:, :rotated, half:rotary_dim]
        out[:, :rotated, :half], out[:, :rotated, half:rotary_dim] = a * c - b * s, b * c + a * s
        sums[:, :rotated, :half] = size_a * abs(c) + size_b * abs(s)
        sums[:, :rotated, half:rotary_dim] = size_b * abs(c) + size_a * abs(s)
        return out.reshape(-1, self.outputs), sums.reshape(-1, self.outputs)

    def check(self, out: Words) -> None:
        values, magnitude = self.expected()
        token = np.arange(self.shape.room)[:, None]
        # A tile of tokens that holds a real one is computed whole; one that holds none is left alone.
        computed = token < ceil_div(self.shape.count, self.token_tile) * self.token_tile
        check(out, values, magnitude, token < self.shape.count, computed, roundings=16)


def gelu_tanh(value: F64) -> F64:
    out: F64 = 0.5 * value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3)))
    return out


def gated(value: F64, magnitude: F64) -> tuple[F64, F64]:
    """silu(gate) * up for rows [gates, ups]."""
    gate, up = np.split(value, 2, axis=1)
    size_gate, size_up = np.split(magnitude, 2, axis=1)
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(-gate))
    # Far below zero the exponential is infinite and the gate closes.
    return silu * up, SLOPE * size_gate * np.abs(up) + np.abs(silu) * size_up


@pytest.mark.parametrize(("key", "shape"), CASES)
def test_product(key: str, shape: Shape) -> None:
    problem = Problem(key, shape)
    problem.check(problem.run())


def test_each_shape_meets_each_epilogue_and_element_type() -> None:
    cases = [(axes_of(str(case.values[0])), case.values[1]) for case in CASES]
    shapes = SUBGROUP_SHAPES + SHARED_SHAPES
    assert len({(axes["EPILOGUE"], axes["DTYPE"], shape) for axes, shape in cases}) == 5 * 3 * len(shapes)
    assert len({(axes["EPILOGUE"], axes["TOKENS"], shape) for axes, shape in cases}) == 5 * 2 * len(shapes)
    assert len({(axes["NORM"], axes["TOKENS"], shape) for axes, shape in cases}) == 3 * 2 * len(shapes)


CONTROL = "linear LANES=shared DTYPE=f16 TOKENS=8 NORM=rms EPILOGUE=rope"


@pytest.mark.parametrize(
    "wrong",
    [
        {"COLUMNS": 36},
        {"COLUMNS": 38},
        {"ROWS": 29},
        {"ROWS": 31},
        {"TILE": 4},
        {"EPSILON_BITS": bits(2 * EPSILON)},
        {"HAS_BIAS": 0},
        {"ROTARY_HEADS": 3},
        {"ROTARY_DIM": 14},
        {"GROUPS": 1},
    ],
    ids=str,
)
def test_a_wrong_constant_is_noticed(wrong: dict[str, int]) -> None:
    problem = Problem(CONTROL, SHARED_SHAPES[0])
    with pytest.raises(AssertionError, match=r"values are wrong|outside the output"):
        problem.check(problem.run(wrong))


def test_a_wrong_token_count_is_noticed() -> None:
    for shape, count in ((SHARED_SHAPES[1], 8), (SHARED_SHAPES[3], 9)):
        problem = Problem(CONTROL, shape)
        with pytest.raises(AssertionError, match=r"values are wrong|outside the output"):
            problem.check(problem.run(token_count=np.array([count], np.uint32)))


def test_an_infinite_gate_closes() -> None:
    """Gates far below zero give zero, not NaN."""
    problem = Problem("linear LANES=subgroup DTYPE=f32 TOKENS=1 NORM=none EPILOGUE=gated", SUBGROUP_SHAPES[1])
    problem.x[:] = 1.0
    problem.weight[:] = np.array([[-1e30], [3.0]], np.float32)
    check(problem.run(), np.zeros((1, 1)), 0.0)
