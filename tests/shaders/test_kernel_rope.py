"""Rotary embedding of a view, with partly rotated heads and tables that are no real cosines."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_lab import F32, F64, Words, blank, ceil_div, check, generator, normal, poisoned, run_once

KEYS = ["rope"]


def run(
    x: F32, cos: F32, sin: F32, heads: int, head_dim: int, rotary_dim: int, offset: int, workgroup: int = 64
) -> Words:
    tokens, stride = x.shape
    spec = {
        "WORKGROUP": workgroup,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "X_OFFSET": offset,
        "X_STRIDE": stride,
    }
    buffers = {"x": x, "rope_cos": cos, "rope_sin": sin, "y": blank(tokens * heads * head_dim)}
    return run_once("rope", buffers, spec, (ceil_div(heads * head_dim, workgroup), tokens, 1))["y"]


def rotated(x: F32, cos: F32, sin: F32, rotary_dim: int) -> tuple[F64, F64]:
    """[tokens, heads, head_dim] turned pair by pair, and the sums of absolute values."""
    value = x.astype(np.float64)
    magnitude = np.abs(value)
    for i in range(rotary_dim // 2):
        a, b = x[..., i].astype(np.float64), x[..., i + rotary_dim // 2].astype(np.float64)
        c, s = cos[:, None, i].astype(np.float64), sin[:, None, i].astype(np.float64)
        value[..., i] = a * c - b * s
        value[..., i + rotary_dim // 2] = b * c + a * s
        magnitude[..., i] = np.abs(a * c) + np.abs(b * s)
        magnitude[..., i + rotary_dim // 2] = np.abs(b * c) + np.abs(a * s)
    return value, magnitude


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "offset", "behind", "workgroup"),
    [
        (1, 4, 4, 0, 0, 64),
        (3, 20, 12, 5, 2, 7),
        (2, 64, 64, 64, 64, 64),
        (5, 80, 20, 1, 0, 32),
        (1, 128, 2, 0, 3, 256),
    ],
)
def test_pairs_are_turned(heads: int, head_dim: int, rotary_dim: int, offset: int, behind: int, workgroup: int) -> None:
    rng = generator(heads, head_dim)
    tokens = 3
    width = heads * head_dim
    x = poisoned((tokens, offset + width + behind))
    x[:, offset : offset + width] = normal(rng, tokens, width)
    # Pairs past the rotated ones are never read here.
    cos, sin = poisoned((tokens, head_dim // 2)), poisoned((tokens, head_dim // 2))
    cos[:, : rotary_dim // 2] = normal(rng, tokens, rotary_dim // 2)
    sin[:, : rotary_dim // 2] = normal(rng, tokens, rotary_dim // 2)
    out = run(x, cos, sin, heads, head_dim, rotary_dim, offset, workgroup)
    view = x[:, offset : offset + width].reshape(tokens, heads, head_dim)
    expected, magnitude = rotated(view, cos, sin, rotary_dim)
    check(out, expected.reshape(tokens, width), magnitude.reshape(tokens, width), roundings=4)


@pytest.mark.parametrize("wrong", [{"offset": 1}, {"rotary_dim": 10}, {"head_dim": 40, "heads": 1}])
def test_a_wrong_constant_is_noticed(wrong: dict[str, int]) -> None:
    rng = generator("control")
    x = normal(rng, 2, 41)
    cos, sin = normal(rng, 2, 20), normal(rng, 2, 20)
    expected, magnitude = rotated(
        x[:, :40].reshape(2, 2, 20), cos.reshape(4, 10)[[0, 1]], sin.reshape(4, 10)[[0, 1]], 12
    )
    right = {"heads": 2, "head_dim": 20, "rotary_dim": 12, "offset": 0}
    check(run(x, cos, sin, **right), expected.reshape(2, 40), magnitude.reshape(2, 40), roundings=4)
    with pytest.raises(AssertionError, match="values are wrong"):
        check(run(x, cos, sin, **{**right, **wrong}), expected.reshape(2, 40), magnitude.reshape(2, 40), roundings=4)
