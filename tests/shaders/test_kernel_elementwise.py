"""Sums, products and activations value by value, with workgroups folded to two axes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kernel_lab import F32, F64, Words, axes_of, bits, blank, check, generator, normal, run_once, variants
from numpy.typing import NDArray

KEYS = variants("elementwise", OP=["add", "mul", "silu", "gelu", "gelu_tanh", "scale", "softcap", "clamped_swiglu"])
FACTOR = 2.7
SIZES = [
    (1, 64, (1, 1, 1)),
    (37, 5, (3, 3, 1)),
    (64, 64, (1, 1, 1)),
    (131, 8, (5, 4, 1)),
]


def run(
    key: str, a: F32, b: F32, count: int, workgroup: int, workgroups: tuple[int, int, int], factor: float = FACTOR
) -> Words:
    buffers: dict[str, NDArray[np.float32] | Words] = {"a": a, "y": blank(a.size)}
    if axes_of(key)["OP"] in ("add", "mul", "clamped_swiglu"):
        buffers["b"] = b
    spec = {"WORKGROUP": workgroup, "COUNT": count}
    if axes_of(key)["OP"] in ("scale", "softcap"):
        spec["FACTOR_BITS"] = bits(factor)
    return run_once(key, buffers, spec, workgroups)["y"]


def reference(key: str, a: F32, b: F32) -> tuple[F64, F64]:
    """The values, and the sizes that their errors are relative to: an exponential scales its argument's error."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    operation = axes_of(key)["OP"]
    if operation == "add":
        return left + right, np.abs(left + right)
    if operation == "mul":
        return left * right, np.abs(left * right)
    if operation == "clamped_swiglu":
        gate, up = np.minimum(left, 7), np.clip(right, -7, 7) + 1
        with np.errstate(over="ignore"):
            value = gate / (1 + np.exp(-1.702 * gate)) * up
        return value, np.abs(value) * (1 + np.abs(gate)) + np.abs(gate * (np.abs(up) + 2)) + 1e-30
    factor = float(np.float32(FACTOR))
    if operation == "scale":
        return left * factor, np.abs(left * factor)
    if operation == "softcap":
        return factor * np.tanh(left / factor), np.full(left.shape, 2 * factor)
    if operation == "gelu":
        tail = np.array([math.erfc(-value / math.sqrt(2)) for value in left])
        # Below the smallest float32 a tail may be held as zero.
        return left * tail / 2, np.abs(left * tail) * (1 + left**2) + 1e-30
    argument = left if operation == "silu" else np.sqrt(8 / np.pi) * (left + 0.044715 * left**3)
    with np.errstate(over="ignore"):
        value = left / (1 + np.exp(-argument))
    # What is this near to zero may be held as zero.
    return value, np.abs(value) * (1 + np.abs(argument)) + 1e-30


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("count", "workgroup", "workgroups"), SIZES)
def test_every_value(key: str, count: int, workgroup: int, workgroups: tuple[int, int, int]) -> None:
    rng = generator(key, count)
    a, b = normal(rng, count) * 4, normal(rng, count)
    check(run(key, a, b, count, workgroup, workgroups), *reference(key, a, b), roundings=8)


@pytest.mark.parametrize("key", variants("elementwise", OP=["silu", "gelu", "gelu_tanh", "softcap"]))
def test_activations_are_finite_at_the_ends(key: str) -> None:
    a = np.array([-3e38, -1e13, -1e4, -100.0, -88.0, -0.0, 0.0, 20.0, 88.0, 1e4, 1e13, 3e38], np.float32)
    out = run(key, a, a, a.size, 64, (1, 1, 1))
    with np.errstate(over="ignore"):
        expected, _ = reference(key, a, a)
    check(out, expected, np.abs(expected) + 1e-30, roundings=1000)


@pytest.mark.parametrize("key", variants("elementwise", OP=["scale", "softcap"]))
def test_a_wrong_factor_is_noticed(key: str) -> None:
    a = normal(generator(key), 37)
    check(run(key, a, a, 37, 64, (1, 1, 1)), *reference(key, a, a), roundings=8)
    with pytest.raises(AssertionError, match="values are wrong"):
        check(run(key, a, a, 37, 64, (1, 1, 1), 2.71), *reference(key, a, a))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("count", [36, 38])
def test_a_wrong_count_is_noticed(key: str, count: int) -> None:
    rng = generator(key, count)
    a, b = normal(rng, 37), normal(rng, 37)
    out = run(key, a, b, count, 64, (1, 1, 1))
    with pytest.raises(AssertionError, match=r"values are wrong|outside the output"):
        check(out, *reference(key, a, b))
