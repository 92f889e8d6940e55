"""RMS and layer normalization: one token per workgroup, rows shorter and longer than the workgroup."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_lab import (
    F32,
    F64,
    Words,
    axes_of,
    bits,
    blank,
    check,
    generator,
    normal,
    poisoned,
    run_once,
    subgroup,
    variants,
)
from numpy.typing import NDArray

KEYS = variants("norm", LANES=["subgroup", "shared"], NORM=["rms", "layer"])
EPSILON = 1e-5


def run(
    key: str,
    x: F32,
    weight: F32,
    bias: F32 | None = None,
    epsilon: float = EPSILON,
    workgroup: int = 32,
    columns: int = 0,
    groups: int = 1,
    first_groups: int = 0,
    view: tuple[int, int] = (0, 0),
    residual: F32 | None = None,
    turn: tuple[F32, F32, int, int] | None = None,
) -> Words:
    """Normalize rows of `groups` groups each.

    `view` is where they start in a wider row of x, and its width; `turn` holds cos, sin, a head's size and how many
    dimensions of it are turned.
    """
    axes = axes_of(key)
    spec = {
        "WORKGROUP": subgroup() if axes["LANES"] == "subgroup" else workgroup,
        "COLUMNS": columns or x.shape[1] // groups,
        "EPSILON_BITS": bits(epsilon),
        "X_OFFSET": view[0],
        "X_STRIDE": view[1] or x.shape[1],
        "FIRST_GROUPS": first_groups,
        "HAS_RESIDUAL": int(residual is not None),
        "HEAD_DIM": turn[2] if turn else 1,
        "ROTARY_DIM": turn[3] if turn else 0,
    }
    held = x
    if view[1]:
        held = poisoned((len(x), view[1]))
        held[:, view[0] : view[0] + x.shape[1]] = x
    buffers: dict[str, NDArray[Any]] = {"x": held, "weight": weight, "y": blank(x.size)}
    buffers["residual"] = poisoned(x.shape) if residual is None else residual
    buffers["rope_cos"], buffers["rope_sin"] = turn[:2] if turn else (poisoned((1,)), poisoned((1,)))
    if axes["NORM"] == "layer":
        spec["HAS_NORM_BIAS"] = int(bias is not None)
        buffers["bias"] = poisoned(weight.shape) if bias is None else bias
    return run_once(key, buffers, spec, (len(x), groups, 1))["y"]


def reference(key: str, x: F32, weight: F32, bias: F32 | None = None, epsilon: float = EPSILON) -> tuple[F64, F64]:
    """The values, and the sums of absolute values that they were computed from."""
    exact = x.astype(np.float64)
    layer = axes_of(key)["NORM"] == "layer"
    mean = exact.mean(axis=1, keepdims=True) if layer else np.zeros((len(x), 1))
    variance = ((exact - mean) ** 2).mean(axis=1, keepdims=True)
    factor = weight / np.sqrt(variance + float(np.float32(epsilon)))
    shift = np.zeros(x.shape[1]) if bias is None or not layer else bias.astype(np.float64)
    mean_size = np.abs(exact).mean(axis=1, keepdims=True) if layer else 0.0
    return (exact - mean) * factor + shift, (np.abs(exact) + mean_size) * np.abs(factor) + np.abs(shift)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("columns", "workgroup"), [(1, 64), (37, 2), (100, 64), (577, 16), (131, 256)])
def test_rows_are_normalized(key: str, columns: int, workgroup: int) -> None:
    rng = generator(key, columns)
    x = normal(rng, 5, columns)
    # A row of zeros stays near zero, one whose squares are near the end of float32 finite, and one far from zero exact.
    x[1] = 0.0
    x[2] *= np.float32(1e17)
    x[3] += np.float32(1000.0)
    weight, bias = normal(rng, columns), normal(rng, columns)
    for shift in (None, bias):
        check(run(key, x, weight, shift, EPSILON, workgroup), *reference(key, x, weight, shift), roundings=8)


def by_group(key: str, x: F32, groups: int, weights: F32, shifts: F32) -> tuple[F64, F64]:
    """`reference` for each group of each row, with a row of `weights` and `shifts` for each group."""
    columns = x.shape[1] // groups
    parts = x.reshape(-1, groups, 1, columns)
    pairs = [
        reference(key, parts[at, group], weights[group], shifts[group]) for at, group in np.ndindex(len(x), groups)
    ]
    values, sizes = (np.concatenate([pair[at] for pair in pairs]).reshape(x.shape) for at in (0, 1))
    return values, sizes


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("groups", "first_groups", "columns", "view"),
    [(3, 0, 20, (0, 0)), (3, 3, 20, (0, 0)), (5, 2, 37, (9, 201)), (5, 0, 37, (9, 201)), (2, 1, 64, (128, 300))],
)
def test_groups_of_a_row_are_normalized_apart(
    key: str, groups: int, first_groups: int, columns: int, view: tuple[int, int]
) -> None:
    rng = generator(key, groups, first_groups)
    x = normal(rng, 4, groups * columns) * np.repeat(np.float32(10) ** np.arange(groups, dtype=np.float32), columns)
    held = groups if first_groups == 0 else 1 + (first_groups < groups)
    weight, bias = normal(rng, held, columns), normal(rng, held, columns)
    which = np.arange(groups) if first_groups == 0 else (np.arange(groups) >= first_groups).astype(int)
    for shift in (None, bias):
        out = run(key, x, weight, shift, groups=groups, first_groups=first_groups, view=view)
        shifts = np.zeros_like(bias) if shift is None else shift
        check(out, *by_group(key, x, groups, weight[which], shifts[which]), roundings=8)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("groups", "head_dim", "rotary_dim"), [(3, 20, 20), (1, 20, 12), (3, 64, 16)])
def test_heads_are_turned_and_a_residual_added_afterwards(
    key: str, groups: int, head_dim: int, rotary_dim: int
) -> None:
    """Whether a group is one head, or all of them are."""
    rng = generator(key, groups, head_dim)
    x, residual = normal(rng, 4, 3 * head_dim), normal(rng, 4, 3 * head_dim)
    weight, bias = normal(rng, groups, 3 * head_dim // groups), normal(rng, groups, 3 * head_dim // groups)
    cos, sin = normal(rng, 4, head_dim // 2), normal(rng, 4, head_dim // 2)
    turn = (cos, sin, head_dim, rotary_dim)
    shifts = bias if "layer" in key else np.zeros_like(bias)
    values, sizes = (one.reshape(4, 3, head_dim) for one in by_group(key, x, groups, weight, shifts))
    half = rotary_dim // 2
    c, s = (one[:, None, :half].astype(np.float64) for one in (cos, sin))
    a, b = values[..., :half].copy(), values[..., half:rotary_dim].copy()
    values[..., :half], values[..., half:rotary_dim] = a * c - b * s, b * c + a * s
    a, b, c, s = sizes[..., :half].copy(), sizes[..., half:rotary_dim].copy(), np.abs(c), np.abs(s)
    sizes[..., :half], sizes[..., half:rotary_dim] = a * c + b * s, b * c + a * s
    for extra in (None, residual):
        out = run(key, x, weight, bias, groups=groups, residual=extra, turn=turn)
        added = np.zeros((4, 3, head_dim)) if extra is None else extra.reshape(4, 3, head_dim)
        check(out, values + added, sizes + np.abs(added), roundings=8)


@pytest.mark.parametrize("key", KEYS)
def test_the_epsilon_counts(key: str) -> None:
    x = normal(generator(key), 1, 37) * np.float32(1e-3)
    weight = np.ones(37, np.float32)
    for epsilon in (1e-6, 1e-5):
        check(run(key, x, weight, epsilon=epsilon), *reference(key, x, weight, epsilon=epsilon), roundings=8)
    with pytest.raises(AssertionError, match="values are wrong"):
        check(run(key, x, weight, epsilon=2e-5), *reference(key, x, weight))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("columns", [36, 38])
def test_a_wrong_column_count_is_noticed(key: str, columns: int) -> None:
    rng = generator(key, columns)
    x, weight = normal(rng, 1, 37), normal(rng, 37)
    with pytest.raises(AssertionError, match="values are wrong"):
        check(run(key, x, weight, columns=columns), *reference(key, x, weight))
