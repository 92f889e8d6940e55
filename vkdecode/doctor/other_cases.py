"""The kernels of attention, of the KV cache and of moving values, each at an odd size against a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.doctor import references
from vkdecode.doctor.dispatch import UNSET, Wrong, error_of, float_bits, floats, generator, normal, run_kernel, unset
from vkdecode.gpu import Device, Lanes

_WORKGROUP = 64
_HEAD_DIM, _MAX_SEQ, _CACHED, _SCALE = 20, 37, 13, 0.3
_FORMS = (
    ("f32", 1, "bounded", "push", 0),
    ("f16", 3, "bounded", "buffer", 1),
    ("f16", 4, "masked", "push", 0),
    ("f32", 2, "masked", "buffer", 1),
    ("f16", 2, "bounded", "buffer", 0),
)
_PROMPT_FORMS = (("f32", 12, "bounded", "buffer", 1), ("f16", 8, "bounded", "buffer", 1))  # in the subgroup form only
# Query heads for each kv head, query heads and query tokens of a workgroup, room and real tokens of the step.
_SHAPES = {
    1: (5, 1, 1, 8, 5),
    2: (2, 2, 1, 1, 1),
    3: (3, 3, 1, 8, 7),
    4: (2, 2, 2, 8, 3),
    8: (2, 2, 4, 8, 7),
    12: (3, 3, 4, 8, 5),
}
_FACTOR = 2.5
_ACTIVATIONS: dict[str, Callable[[references.F64], references.F64]] = {
    "silu": references.silu,
    "gelu": references.gelu,
    "gelu_tanh": references.gelu_tanh,
    "scale": lambda x: x * _FACTOR,
    "softcap": lambda x: np.asarray(_FACTOR * np.tanh(x / _FACTOR)),
}
_KV: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}

KV_WRITE_KEYS = [f"kv_write KV={kv} OFFSET={offset}" for kv in ("f32", "f16") for offset in ("push", "buffer")]
ELEMENTWISE_KEYS = [f"elementwise OP={op}" for op in ("add", "mul", *_ACTIVATIONS)]
MOVE_KEYS = ["rope", "concat", "contiguize", "copy_words", "last_row"]


def attention_keys(form: str) -> list[str]:
    """Attention with every arm, every number of queries and both ways of the KV offset."""
    forms = _FORMS + (_PROMPT_FORMS if form == "subgroup" else ())
    return [f"attention LANES={form} KV={k} QUERIES={q} ARM={a} OFFSET={o} WRITE={w}" for k, q, a, o, w in forms]


def check_attention(device: Device, lanes: Lanes, key: str) -> float:
    """Run one attention; cache rows that do not count hold NaN. The error relative to the largest value."""
    axes = dict(term.split("=") for term in key.split()[1:])
    rng, dtype, masked, writes = generator(key), _KV[axes["KV"]], axes["ARM"] == "masked", axes["WRITE"] == "1"
    kv_heads = 2
    group, query_heads, query_tokens, room, count = _SHAPES[int(axes["QUERIES"])]
    heads = kv_heads * group
    q, k, v = (unset(room, size, _HEAD_DIM) for size in (heads, kv_heads, kv_heads))
    for part in (q, k, v):
        part[:count] = normal(rng, count, *part.shape[1:])
    caches = [unset(kv_heads, _MAX_SEQ, _HEAD_DIM, dtype=dtype) for _ in range(2)]
    visible = rng.random(_CACHED) < 0.7 if masked else np.ones(_CACHED, bool)
    at = np.flatnonzero(visible)
    for cache in caches:
        cache[:, at] = normal(rng, kv_heads, at.size, _HEAD_DIM).astype(dtype)
    buffers: dict[str, NDArray[Any]] = {"q": q, "k": k, "v": v, "cache_k": caches[0], "cache_v": caches[1]}
    buffers |= {"y": unset(room, heads, _HEAD_DIM), "token_count": np.array([count], np.uint32), "sinks": unset(heads)}
    if masked:
        buffers["mask"] = np.full(_MAX_SEQ, -np.inf, np.float32)
        buffers["mask"][at] = 0.0
    if axes["OFFSET"] == "buffer":
        buffers["offset"] = np.array([_CACHED, _CACHED + room], np.uint32)
    spec = {
        "WORKGROUP": lanes.tile if lanes.form == "subgroup" else min(_WORKGROUP, lanes.workgroup),
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": _HEAD_DIM,
        "MAX_SEQ": _MAX_SEQ,
        "STEP_TOKENS": room,
        "QUERY_HEADS": query_heads,
        "SCALE_BITS": float_bits(_SCALE),
        "WINDOW": 0,
        "CAP_BITS": 0,
        "HAS_SINKS": 0,
    }
    for name, size in (("Q", heads), ("K", kv_heads), ("V", kv_heads)):
        spec |= {f"{name}_OFFSET": 0, f"{name}_STRIDE": size * _HEAD_DIM // 4}
    push = {"attended_len": _CACHED + room} if not masked and axes["OFFSET"] == "push" else {}
    left = run_kernel(device, key, buffers, spec, (heads // query_heads, room // query_tokens, 1), push)
    wide = [part[:count].astype(np.float64) for part in (q, k, v)]
    cached = [cache[:, at].astype(np.float64) for cache in caches]
    expected = references.attention(wide[0], wide[1], wide[2], cached[0], cached[1], _SCALE)
    error = error_of(floats(left["y"]).reshape(q.shape)[:count], expected)
    if writes:
        for name, cache, rows in (("cache_k", caches[0], k), ("cache_v", caches[1], v)):
            error = max(error, _stored_error(left[name], cache, rows[:count], _CACHED))
    return error


def _stored_error(words: NDArray[np.uint32], before: NDArray[Any], rows: NDArray[np.float32], offset: int) -> float:
    """Hold a cache against the rows that were put into it, and the rest against what it was."""
    after = words.view(before.dtype).reshape(before.shape)
    count = len(rows)
    kept = np.ones(before.shape[1], bool)
    kept[offset : offset + count] = False
    bits = np.dtype(f"u{before.itemsize}")
    if (after.view(bits)[:, kept] != before.view(bits)[:, kept]).any():
        raise Wrong("wrote into rows of the KV cache other than the step's")
    stored = after[:, offset : offset + count].astype(np.float64)
    wanted = rows.transpose(1, 0, 2).astype(np.float64)
    # A half float is within a thousandth of what it holds.
    close = 0.0 if before.itemsize == 4 else 2.0**-10
    if not (np.abs(stored - wanted) <= np.abs(wanted) * close + 2.0**-14 * bool(close)).all():
        raise Wrong("the KV cache holds other rows than the step's")
    return 0.0


def check_kv_write(device: Device, lanes: Lanes, key: str) -> float:
    """Put rows into a cache, the last of them beyond its end."""
    rng, dtype, room, heads, offset = generator(key), _KV["f16" if "KV=f16" in key else "f32"], 5, 3, _MAX_SEQ - 3
    x = normal(rng, room, heads, _HEAD_DIM)
    cache = unset(heads, _MAX_SEQ, _HEAD_DIM, dtype=dtype)
    buffers: dict[str, NDArray[Any]] = {"x": x, "cache": cache}
    push = {"cached_len": offset, "token_count": 4}
    if "OFFSET=buffer" in key:
        buffers |= {"offset": np.array([offset, int(UNSET)], np.uint32), "token_counts": np.array([4], np.uint32)}
        push = {}
    words = heads * _HEAD_DIM // 4
    spec = {
        "WORKGROUP": _WORKGROUP,
        "KV_HEADS": heads,
        "HEAD_DIM": _HEAD_DIM,
        "MAX_SEQ": _MAX_SEQ,
        "X_OFFSET": 0,
        "X_STRIDE": words,
    }
    left = run_kernel(device, key, buffers, spec, (-(-words // _WORKGROUP), room, 1), push)
    return _stored_error(left["cache"], cache, x[:3], offset)


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
