"""What kernels and models must compute, in float64 numpy; knows neither shaders nor plans."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def rms_norm(x: F64, weight: F64, epsilon: float) -> F64:
    """Rows [n, columns] over the root of their mean square; Zhang and Sennrich 2019."""
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight)


def layer_norm(x: F64, weight: F64, bias: F64 | float, epsilon: float) -> F64:
    """Rows [n, columns] with mean 0 and variance 1, scaled and shifted; Ba et al. 2016."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * weight + bias)


def silu(x: F64) -> F64:
    """Elfwing et al. 2017: x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: F64) -> F64:
    """GELU; Hendrycks and Gimpel 2016: x times the normal distribution's probability of less than x."""
    return np.asarray([value * 0.5 * math.erfc(-value / math.sqrt(2)) for value in x.flat]).reshape(x.shape)


def gelu_tanh(x: F64) -> F64:
    """The tanh form of GELU; Hendrycks and Gimpel 2016."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def clamped_swiglu(gate: F64, up: F64) -> F64:
    """min(gate, 7) sigmoid(1.702 min(gate, 7)) (clip(up, -7, 7) + 1); OpenAI's gpt-oss."""
    gate = np.minimum(gate, 7.0)
    return np.asarray(gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7.0, 7.0) + 1))


def rotate(x: F64, cos: F64, sin: F64) -> F64:
    """Turn heads [n, heads, head_dim] by cos and sin [n, pairs]; dimensions from 2 * pairs on stay. Su et al. 2021."""
    pairs = cos.shape[1]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * pairs :]], axis=-1)


def attention(q: F64, k: F64, v: F64, scale: float) -> F64:
    """Causal grouped-query attention of tokens [tokens, heads, head_dim] over their own k and v alone."""
    return cached_attention(q, k.swapaxes(0, 1), v.swapaxes(0, 1), np.arange(len(q)), 0, scale)


def cached_attention(
    q: F64,
    keys: F64,
    values: F64,
    positions: NDArray[np.int64],
    start: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: F64 | None = None,
) -> F64:
    """Causal grouped-query attention of a step over the rows of a cache that count.

    Args:
        q: [tokens, heads, head_dim].
        keys: of the step's rows and of those before it, in any order, [kv_heads, rows, head_dim].
        values: of the same rows, like `keys`.
        positions: of the same rows, int [rows].
        start: the position of the step's first token.
        scale: factor of the scores.
        window: how many positions a token sees, its own included; 0 for all.
        cap: c where scores become c tanh(score / c); 0 for no cap.
        sinks: for each head the score of a row without a value.

    Returns:
        [tokens, heads, head_dim].

    """
    tokens, heads, _ = q.shape
    group = heads // len(keys)
    out = np.empty_like(q)
    for token in range(tokens):
        seen = positions <= start + token
        if window:
            seen &= positions > start + token - window
        for head in range(heads):
            scores = keys[head // group, seen] @ q[token, head] * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[token, head] = weights[: seen.sum()] @ values[head // group, seen]
    return out
