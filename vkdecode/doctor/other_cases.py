"""The kernels of single operations and those that move values, each at an odd size against a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.doctor import references
from vkdecode.doctor.dispatch import UNSET, Wrong, error_of, float_bits, floats, generator, normal, run_kernel, unset
from vkdecode.gpu import Device, Lanes

_WORKGROUP = 64
_HEAD_DIM = 20
_FACTOR = 2.5
_ACTIVATIONS: dict[str, Callable[[references.F64], references.F64]] = {
    "silu": references.silu,
    "gelu": references.gelu,
    "gelu_tanh": references.gelu_tanh,
    "scale": lambda x: x * _FACTOR,
    "softcap": lambda x: np.asarray(_FACTOR * np.tanh(x / _FACTOR)),
}

ELEMENTWISE_KEYS = [f"elementwise OP={op}" for op in ("add", "mul", *_ACTIVATIONS)]
MOVE_KEYS = ["rope", "concat", "contiguize", "copy_words", "last_row"]


def check_elementwise(device: Device, lanes: Lanes, key: str) -> float:
    """One operation over an odd count, its workgroups folded to two axes."""
    rng, count = generator(key), 5 * _WORKGROUP + 3
    a, b = normal(rng, count) * 3, normal(rng, count)
    a[:2] = (-3e4, 3e4)
    buffers: dict[str, NDArray[Any]] = {"a": a, "y": unset(count)}
    wide = a.astype(np.float64)
    operation = key.partition("=")[2]
    if operation in ("add", "mul"):
        buffers["b"] = b
        expected = wide + b if operation == "add" else wide * b
    else:
        expected = _ACTIVATIONS[operation](wide)
    spec = {"WORKGROUP": _WORKGROUP, "COUNT": count}
    if operation in ("scale", "softcap"):
        spec["FACTOR_BITS"] = float_bits(_FACTOR)
    left = run_kernel(device, key, buffers, spec, (3, 2, 1))["y"]
    error = error_of(floats(left)[:2], expected[:2])
    return max(error, error_of(floats(left)[2:], expected[2:]))


def check_move(device: Device, lanes: Lanes, key: str) -> float:
    """Rotation, and what only moves values."""
    rng, tokens = generator(key), 3
    groups = (2, tokens, 1)
    if key == "rope":
        heads, rotary, offset, stride = 3, 12, 5, 3 * _HEAD_DIM + 7
        x = normal(rng, tokens, stride)
        cos, sin = normal(rng, tokens, _HEAD_DIM // 2), normal(rng, tokens, _HEAD_DIM // 2)
        width = heads * _HEAD_DIM
        spec = {"WORKGROUP": 32, "HEADS": heads, "HEAD_DIM": _HEAD_DIM, "ROTARY_DIM": rotary}
        spec |= {"X_OFFSET": offset, "X_STRIDE": stride}
        buffers: dict[str, NDArray[Any]] = {"x": x, "rope_cos": cos, "rope_sin": sin, "y": unset(tokens, width)}
        view = x[:, offset : offset + width].reshape(tokens, heads, _HEAD_DIM).astype(np.float64)
        turns = [part[:, : rotary // 2].astype(np.float64) for part in (cos, sin)]
        expected = references.rotate(view, turns[0], turns[1])
        return error_of(floats(run_kernel(device, key, buffers, spec, groups)["y"]), expected)
    a, b = normal(rng, tokens, 37), normal(rng, tokens, 53)
    push: dict[str, int] = {}
    spec = {"WORKGROUP": _WORKGROUP}
    if key == "concat":
        buffers = {"a": a, "b": b, "y": unset(tokens, 90)}
        spec |= {"A_COLUMNS": 37, "B_COLUMNS": 53}
        expected = np.concatenate([a, b], axis=1, dtype=np.float64)
    elif key == "contiguize":
        buffers = {"x": a, "y": unset(tokens, 21)}
        spec |= {"COLUMNS": 21, "X_OFFSET": 9, "X_STRIDE": 37}
        expected = a[:, 9:30].astype(np.float64)
    elif key == "last_row":
        buffers = {"x": b, "token_count": np.array([2], np.uint32), "y": unset(53)}
        spec["COLUMNS"] = 53
        expected, groups = b[1].astype(np.float64), (1, 1, 1)
    else:
        buffers = {"source": a, "target": unset(50)}
        push = {"source_start": 11, "target_start": 3, "count": 47}
        expected, groups = a.reshape(-1)[11:58].astype(np.float64), (2, 1, 1)
    left = next(iter(run_kernel(device, key, buffers, spec, groups, push).values()))
    if key == "copy_words":
        if (left[:3] != UNSET).any():
            raise Wrong("wrote before the first word that it was to write")
        left = left[3:]
    if (floats(left).reshape(expected.shape) != expected).any():
        raise Wrong("values are not the ones that were to be moved")
    return 0.0
