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
    view: tuple[int, int] = (0, 0),
) -> Words:
    """Normalize rows of `groups` groups each; `view` is where they start in a wider row of x, and its width."""
    axes = axes_of(key)
    spec = {
        "WORKGROUP": subgroup() if axes["LANES"] == "subgroup" else workgroup,
        "COLUMNS": columns or x.shape[1] // groups,
        "EPSILON_BITS": bits(epsilon),
        "X_OFFSET": view[0],
        "X_STRIDE": view[1] or x.shape[1],
        "ONE_WEIGHT": int(weight.size * groups == x.shape[1] and groups > 1),
    }
    held = x
    if view[1]:
        held = poisoned((len(x), view[1]))
        held[:, view[0] : view[0] + x.shape[1]] = x
    buffers: dict[str, NDArray[Any]] = {"x": held, "weight": weight, "y": blank(x.size)}
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


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("one_weight", [False, True])
@pytest.mark.parametrize(("groups", "columns", "view"), [(3, 20, (0, 0)), (5, 37, (9, 201)), (2, 64, (128, 300))])
def test_groups_of_a_row_are_normalized_apart(
    key: str, groups: int, columns: int, view: tuple[int, int], one_weight: bool
) -> None:
    rng = generator(key, groups, one_weight)
    x = normal(rng, 4, groups * columns) * np.repeat(np.float32(10) ** np.arange(groups, dtype=np.float32), columns)
    weight, bias = (normal(rng, columns if one_weight else groups * columns) for _ in range(2))
    for shift in (None, bias):
        out = run(key, x, weight, shift, groups=groups, view=view)
        weights, shifts = (
            np.resize(np.zeros(1, np.float32) if one is None else one, (4 * groups, columns)) for one in (weight, shift)
        )
        parts = zip(x.reshape(4 * groups, 1, columns), weights, shifts, strict=True)
        pairs = [reference(key, *part) for part in parts]
        expected, sizes = (np.concatenate([pair[at] for pair in pairs]).reshape(x.shape) for at in (0, 1))
        check(out, expected, sizes, roundings=8)


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
