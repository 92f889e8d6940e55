"""The kernels of attention and of the KV cache, each at an odd size against a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.doctor import references
from vkdecode.doctor.dispatch import (
    TOLERANCE,
    UNSET,
    Wrong,
    error_of,
    float_bits,
    floats,
    generator,
    normal,
    run_kernel,
    unset,
)
from vkdecode.gpu import Device, Lanes
from vkdecode.runtime import attention_workgroup

KV: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
KV_KEYS = [f"{name} KV={kv}" for name in ("kv_write", "kv_move") for kv in KV]

_WORKGROUP = 64
_HEAD_DIM, _MAX_SEQ, _CACHED, _SCALE, _CAP = 20, 37, 13, 0.3, 2.0
_CACHE_ROWS = _MAX_SEQ + 8


@dataclass(frozen=True)
class _Form:
    """One kernel, how it is told what to attend to, and its sizes.

    With a mask and no offset on the device the step's rows are those behind the conversation's. `group` query heads
    share a kv head; a workgroup takes `query_heads` and `query_tokens`; of `room` tokens `count` are real.
    """

    kv: str
    masked: bool
    on_device: bool
    group: int
    query_heads: int
    query_tokens: int
    room: int
    count: int
    window: int = 0
    cap: float = 0.0
    sinks: bool = False

    def key(self, lanes: str) -> str:
        """The kernel's name."""
        return f"attention LANES={lanes} KV={self.kv} QUERIES={self.query_heads * self.query_tokens}"


_FORMS = (
    _Form("f32", False, False, 5, 1, 1, 8, 5),
    _Form("f16", False, True, 3, 3, 1, 8, 7, window=5, cap=_CAP),
    _Form("f16", True, False, 2, 2, 2, 8, 3, window=7),
    _Form("f32", True, True, 2, 2, 1, 1, 1, sinks=True),
    _Form("f16", True, False, 2, 2, 1, 8, 5),
)
_PROMPT_FORMS = (  # in the subgroup form only
    _Form("f32", False, True, 3, 3, 4, 8, 5),
    _Form("f16", False, True, 2, 2, 4, 8, 7),
)


def attention_keys(form: str) -> list[str]:
    """Attention with every number of queries, with and without a mask, and with both ways of the KV offset."""
    return [one.key(form) for one in _FORMS + (_PROMPT_FORMS if form == "subgroup" else ())]


def check_attention(device: Device, lanes: Lanes, key: str) -> float:
    """Run one attention; cache rows that do not count hold NaN. The error relative to the largest value."""
    form = next(one for one in _FORMS + _PROMPT_FORMS if one.key(lanes.form) == key)
    rng, kv_heads, heads = generator(key), 2, 2 * form.group
    landing = form.masked and not form.on_device
    own = _MAX_SEQ if landing else _CACHED
    before = np.arange(_CACHED)
    if form.masked:
        hidden = rng.random(_CACHED) < 0.3
        hidden[0] = False
        before = before[~hidden]
    at = np.concatenate([before, own + np.arange(form.count)])
    positions = np.concatenate([before, _CACHED + np.arange(form.count)])
    q, sinks = unset(form.room, heads, _HEAD_DIM), normal(rng, heads)
    q[: form.count] = normal(rng, form.count, heads, _HEAD_DIM)
    caches = [unset(kv_heads, _CACHE_ROWS, _HEAD_DIM, dtype=KV[form.kv]) for _ in range(2)]
    for cache in caches:
        cache[:, at] = normal(rng, kv_heads, at.size, _HEAD_DIM)
    mask = np.full(_MAX_SEQ, -np.inf, np.float32)
    mask[before] = _CACHED - before if form.window else 0.0
    attended_len = own + form.room
    buffers: dict[str, NDArray[Any]] = {
        "q": q,
        "cache_k": caches[0],
        "cache_v": caches[1],
        "y": unset(form.room, heads, _HEAD_DIM),
        "token_count": np.array([form.count], np.uint32),
        "sinks": sinks if form.sinks else unset(heads),
        "mask": mask if form.masked else unset(_MAX_SEQ),
        "offset": np.array([_CACHED, attended_len], np.uint32) if form.on_device else unset(2, dtype=np.uint32),
    }
    spec = {
        "WORKGROUP": attention_workgroup(lanes),
        "KV_HEADS": kv_heads,
        "GROUP": form.group,
        "HEAD_DIM": _HEAD_DIM,
        "QUERY_HEADS": form.query_heads,
        "SCALE_BITS": float_bits(_SCALE),
        "Q_OFFSET": 0,
        "Q_STRIDE": heads * _HEAD_DIM // 4,
        "CAP_BITS": float_bits(form.cap),
        "HAS_SINKS": int(form.sinks),
        "MASKED": int(form.masked),
        "OFFSET_ON_DEVICE": int(form.on_device),
    }
    push = {
        "cache_rows": _CACHE_ROWS,
        "max_seq": _MAX_SEQ,
        "step_tokens": form.room,
        "window": form.window,
        "attended_len": int(UNSET) if form.on_device else attended_len,
    }
    groups = (heads // form.query_heads, form.room // form.query_tokens, 1)
    left = floats(run_kernel(device, key, buffers, spec, groups, push)["y"]).reshape(q.shape)
    keys, values = (cache[:, at].astype(np.float64) for cache in caches)
    wide_sinks = sinks.astype(np.float64) if form.sinks else None
    expected = references.cached_attention(
        q[: form.count].astype(np.float64), keys, values, positions, _CACHED, _SCALE, form.window, form.cap, wide_sinks
    )
    return error_of(left[: form.count], expected)


def check_kv(device: Device, lanes: Lanes, key: str) -> float:
    """Put rows into a cache, or move them inside of one, the last of them beyond the end."""
    dtype = KV[key.partition("=")[2]]
    return _check_move(device, key, dtype) if key.startswith("kv_move") else _check_write(device, key, dtype)


def _check_write(device: Device, key: str, dtype: np.dtype[Any]) -> float:
    """With the offset as a push constant and from device memory."""
    rng, room, count, heads, offset = generator(key), 5, 4, 3, _CACHE_ROWS - 3
    k, v = normal(rng, room, heads, _HEAD_DIM), normal(rng, room, heads, _HEAD_DIM)
    cache = unset(heads, _CACHE_ROWS, _HEAD_DIM, dtype=dtype)
    words = heads * _HEAD_DIM // 4
    spec = {"WORKGROUP": _WORKGROUP, "KV_HEADS": heads, "HEAD_DIM": _HEAD_DIM}
    spec |= {"K_OFFSET": 0, "K_STRIDE": words, "V_OFFSET": 0, "V_STRIDE": words}
    buffers: dict[str, NDArray[Any]] = {"k": k, "v": v, "cache_k": cache, "cache_v": cache}
    buffers["token_count"] = np.array([count], np.uint32)
    for on_device in (0, 1):
        buffers["offset"] = np.array([offset if on_device else UNSET, UNSET], np.uint32)
        push = {"cache_rows": _CACHE_ROWS, "cached_len": int(UNSET) if on_device else offset}
        constants = {**spec, "OFFSET_ON_DEVICE": on_device}
        left = run_kernel(device, key, buffers, constants, (-(-words // _WORKGROUP), room, 1), push)
        for name, rows in (("cache_k", k), ("cache_v", v)):
            check_rows(left[name], cache, rows[:3].astype(np.float64), offset, 0.0)
    return 0.0


def _check_move(device: Device, key: str, dtype: np.dtype[Any]) -> float:
    rng, room, heads, offset = generator(key), 5, 3, _MAX_SEQ - 3
    buffers = {name: normal(rng, heads, _CACHE_ROWS, _HEAD_DIM).astype(dtype) for name in ("cache_k", "cache_v")}
    words = heads * _HEAD_DIM // 4
    spec = {"WORKGROUP": _WORKGROUP, "KV_HEADS": heads, "HEAD_DIM": _HEAD_DIM}
    push = {"cache_rows": _CACHE_ROWS, "max_seq": _MAX_SEQ, "cached_len": offset, "token_count": 4}
    left = run_kernel(device, key, buffers, spec, (-(-words // _WORKGROUP), room, 1), push)
    for name, before in buffers.items():
        wanted = before.copy()
        wanted[:, offset:_MAX_SEQ] = before[:, _MAX_SEQ : _MAX_SEQ + 3]
        if (left[name] != wanted.reshape(-1).view(np.uint32)).any():
            raise Wrong("the KV cache holds other rows than those that were to be moved")
    return 0.0


def check_rows(
    words: NDArray[np.uint32],
    before: NDArray[Any],
    rows: NDArray[np.float64],
    offset: int,
    tolerance: float = TOLERANCE,
) -> None:
    """Hold a cache against the rows that were put into it, and the rest against what it was.

    Args:
        words: the cache afterwards.
        before: what it held, [kv_heads, rows, head_dim].
        rows: [tokens, kv_heads, head_dim].
        offset: the first row's place.
        tolerance: error allowed before rounding, relative to the largest value.

    Raises:
        Wrong: either is something else.

    """
    after = words.view(before.dtype).reshape(before.shape)
    kept = np.ones(before.shape[1], bool)
    kept[offset : offset + len(rows)] = False
    bits = np.dtype(f"u{before.itemsize}")
    if (after.view(bits)[:, kept] != before.view(bits)[:, kept]).any():
        raise Wrong("wrote into rows of the KV cache other than the step's")
    stored, wanted = after[:, ~kept].astype(np.float64), rows.swapaxes(0, 1)
    # A half float is within a thousandth of what it holds.
    rounding = 0.0 if before.itemsize == 4 else np.abs(wanted) * 2.0**-10 + 2.0**-14
    if not (np.abs(stored - wanted) <= rounding + tolerance * max(1.0, float(np.abs(wanted).max()))).all():
        raise Wrong("the KV cache holds other rows than the step's")
