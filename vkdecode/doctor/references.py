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


def attention(q: F64, k: F64, v: F64, cached_k: F64, cached_v: F64, scale: float) -> F64:
    """Causal grouped-query attention of a step over cached rows and its own.

    Args:
        q: [tokens, heads, head_dim].
        k: the step's keys, [tokens, kv_heads, head_dim].
        v: the step's values, like `k`.
        cached_k: keys of all cached rows that count, [kv_heads, rows, head_dim].
        cached_v: values of these, like `cached_k`.
        scale: factor of the scores.

    Returns:
        [tokens, heads, head_dim].

    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    out = np.empty_like(q)
    for token in range(tokens):
        for head in range(heads):
            one = head // group
            keys = np.concatenate([cached_k[one], k[: token + 1, one]])
            values = np.concatenate([cached_v[one], v[: token + 1, one]])
            scores = keys @ q[token, head] * scale
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values / weights.sum()
    return out
