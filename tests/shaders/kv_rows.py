"""What the KV cache must hold after a write: the rows in it, everything else as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_lab import Mask, Words, blank, check_kept, words_of
from numpy.typing import NDArray

KV_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
LARGEST_HALF = 65504.0
SMALLEST_NORMAL_HALF = 2.0**-14
SMALLEST_HALF = 2.0**-24


def empty_cache(kv_heads: int, rows: int, head_dim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """[kv_heads, rows, head_dim] of NaN that a write would change."""
    words = blank(kv_heads * rows * head_dim * dtype.itemsize // 4)
    cache: NDArray[Any] = words.view(dtype).reshape(kv_heads, rows, head_dim)
    return cache


def stored_right(stored: NDArray[Any], values: NDArray[Any], errors: NDArray[Any] | float = 0.0) -> Mask:
    """Which stored values are what a cache may hold for values that are known up to these errors.

    Half floats end at 65504, and larger values are held as that. Vulkan leaves open which of its two neighbours a value
    is rounded to, and whether one too small for a normal half float becomes zero.
    """
    exact = values.astype(np.float64)
    if stored.dtype == np.float32:
        with np.errstate(invalid="ignore"):
            near: Mask = (stored == exact) | (np.abs(stored - exact) <= errors)
        return near
    clamped = np.clip(exact, -LARGEST_HALF, LARGEST_HALF)
    _, exponent = np.frexp(np.minimum(np.abs(clamped) + errors, LARGEST_HALF))
    gap = np.maximum(np.ldexp(1.0, exponent - 11), SMALLEST_HALF)
    close: Mask = np.abs(stored.astype(np.float64) - clamped) < gap + errors
    flushed: Mask = (np.abs(clamped) < SMALLEST_NORMAL_HALF + errors) & (stored == 0)
    return close | flushed


def check_stored(
    words: Words, before: NDArray[Any], rows: NDArray[Any], offset: int, errors: NDArray[Any] | float = 0.0
) -> None:
    """Assert that a cache holds the rows from the offset on, as far as there is room, and nothing else new.

    Args:
        words: the cache's words after the write, with those behind it.
        before: what it held, [kv_heads, cache_rows, head_dim].
        rows: [tokens, kv_heads, head_dim].
        offset: the first row's place.
        errors: how far off the rows may be before they are rounded, like `rows`.

    """
    cache_rows = before.shape[1]
    count = max(min(rows.shape[0], cache_rows - offset), 0)
    written = np.zeros(before.shape, bool)
    written[:, offset : offset + count] = True
    after = words.view(before.dtype)[: before.size].reshape(before.shape)
    allowed = np.broadcast_to(errors, rows.shape)[:count].transpose(1, 0, 2)
    wrong = ~stored_right(after[:, offset : offset + count], rows[:count].transpose(1, 0, 2), allowed)
    first = np.argwhere(wrong)[:1].tolist()
    assert not wrong.any(), f"{int(wrong.sum())} values of the cache's new rows are wrong, first at {first}"
    held = words_of(before)
    old = blank(words.size)
    old[: held.size] = held
    kept = np.ones(words.size, bool)
    kept[: held.size] = ~written.reshape(-1)[:: 4 // before.itemsize]
    check_kept(words, old, kept)
