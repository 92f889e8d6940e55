"""Rotary position embeddings (RoPE): frequencies from a config, cos and sin for positions.

Reads every spelling that Hugging Face configs have used: `rope_scaling` with `type` or `rope_type`, `rope_parameters`,
and `rope_theta` outside or inside of them. The formulas are those of transformers' `modeling_rope_utils`, named at each
function.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ConfigError, UnsupportedModelError

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]

_DEFAULT_THETA = 10000.0
_LARGEST = 1e30  # far above any length or base that a model uses, and safe to multiply


@dataclass(frozen=True, eq=False)
class Rope:
    """Frequencies of one rotary embedding.

    `inv_freq` is float64 [rotary_dim/2], in radians per position. Position 0 ≤ p turns pair i by p·inv_freq[i]. cos and
    sin are multiplied by `attention_factor`. `max_positions`, where set, is how many positions the frequencies are
    exact for. `local` is the embedding of windowed layers where it is another one. `long_inv_freq`, where set, takes
    the place of `inv_freq` over a context of more than `short_positions`.
    """

    inv_freq: F64
    attention_factor: float
    rotary_dim: int
    max_positions: int | None = None
    local: Rope | None = None
    long_inv_freq: F64 | None = None
    short_positions: int = 0

    def for_length(self, max_seq_len: int | None) -> Rope:
        """The embedding over a context of this many positions; None for a short one."""
        if self.long_inv_freq is None or max_seq_len is None or max_seq_len <= self.short_positions:
            return self
        return replace(self, inv_freq=self.long_inv_freq)

    def cos_sin(self, positions: NDArray[Any], pad_to_pairs: int | None = None) -> tuple[F32, F32]:
        """Return (cos, sin), each float32 [n, pairs], for integer positions [n]; angles are computed in float64.

        `pairs` is rotary_dim/2, or `pad_to_pairs`: the pairs after the rotated ones then get cos 1 and sin 0. Raises
        `UnsupportedModelError` for positions beyond `max_positions`.
        """
        where = np.asarray(positions)
        if self.max_positions is not None and where.size and int(where.max()) >= self.max_positions:
            raise UnsupportedModelError(
                f"position {int(where.max())} needs dynamic RoPE scaling, "
                f"which is supported up to {self.max_positions} positions"
            )
        angles = where.astype(np.float64)[:, None] * self.inv_freq
        pairs = len(self.inv_freq) if pad_to_pairs is None else pad_to_pairs
        if pairs < len(self.inv_freq):
            raise ConfigError(f"cannot fit {len(self.inv_freq)} rotated pairs into {pairs}")
        cos: F32 = np.ones((len(where), pairs), np.float32)
        sin: F32 = np.zeros((len(where), pairs), np.float32)
        cos[:, : len(self.inv_freq)] = np.cos(angles) * self.attention_factor
        sin[:, : len(self.inv_freq)] = np.sin(angles) * self.attention_factor
        return cos, sin


class RopeRows:
    """What a model asks of its embedding at every step.

    Decoding asks for one position after the other, so these are worked out some at a time.
    """

    _TOGETHER = 64

    def __init__(self, rope: Rope, pairs: int) -> None:
        self._rope = rope
        self._pairs = pairs
        self._first = 0
        self._max_seq_len: int | None = None
        self._rows: tuple[F32, F32] = np.empty((0, pairs), np.float32), np.empty((0, pairs), np.float32)

    def cos_sin(self, positions: NDArray[Any], max_seq_len: int | None) -> tuple[F32, F32]:
        """Return (cos, sin), each float32 [n, pairs], for positions [n] in a cache of `max_seq_len` rows.

        A single row is a view, not to be written to; raises like `Rope.cos_sin`.
        """
        if positions.size != 1:
            return self._rope.for_length(max_seq_len).cos_sin(positions, self._pairs)
        position = int(positions[0])
        if not 0 <= position - self._first < len(self._rows[0]) or max_seq_len != self._max_seq_len:
            last = max(min(position + self._TOGETHER, self._rope.max_positions or sys.maxsize), position + 1)
            self._rows = self._rope.for_length(max_seq_len).cos_sin(np.arange(position, last), self._pairs)
            self._first, self._max_seq_len = position, max_seq_len
        at = position - self._first
        return self._rows[0][at : at + 1], self._rows[1][at : at + 1]


@dataclass(frozen=True)
class _Params:
    """The RoPE settings of a config after all spellings were folded into one."""

    values: Mapping[str, Any]
    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int | None

    def default_inv_freq(self) -> F64:
        """1 / theta^(2i/d), the frequencies of the unscaled embedding (`compute_default_rope_parameters`)."""
        return np.asarray(self.theta ** (-np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; `ConfigError` when it is missing without a default, or is anything else."""
        return _positive(self.values.get(key, default), f"{key} of {self.kind} RoPE")

    def factor(self) -> float:
        """The scaling factor; below 1 it would shrink the context, which no model means."""
        value = self.number("factor")
        if value < 1.0:
            raise ConfigError(f"factor of {self.kind} RoPE is {value}; it must be at least 1")
        return value

    def original_length(self) -> float:
        """Positions of pretraining; transformers falls back to `max_position_embeddings`."""
        return self.number("original_max_position_embeddings", self.max_position_embeddings)


def with_rope_default(config: Mapping[str, Any], key: str, value: float) -> Mapping[str, Any]:
    """The config with `rope_theta` or `partial_rotary_factor` as a family has it where the config gives none."""
    inner = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    given = config.get(key) is not None or any(isinstance(one, Mapping) and one.get(key) is not None for one in inner)
    return config if given else {**config, key: value}


def rope_from_config(
    config: Mapping[str, Any], head_dim: int, max_seq_len: int | None = None, *, layer_type: str | None = None
) -> Rope:
    """Build the rotary embedding that a Hugging Face style config describes.

    `max_seq_len`, where known, is how many positions will be used: dynamic scaling that would start below it is
    refused. `layer_type` picks from `rope_parameters` that are given per layer type. Raises `UnsupportedModelError` for
    a RoPE type that is not supported, `ConfigError` for missing, impossible or contradicting values.
    """
    params = _read_params(config, head_dim, layer_type)
    build = _TYPES.get(params.kind)
    if build is None:
        raise UnsupportedModelError(f"RoPE type {params.kind!r} is not supported; supported: {', '.join(_TYPES)}")
    rope = build(params)
    if not np.isfinite(rope.inv_freq).all():
        raise ConfigError(f"rope_theta {params.theta} with {params.kind} RoPE gives frequencies that are not finite")
    if max_seq_len is not None and rope.max_positions is not None and max_seq_len > rope.max_positions:
        raise UnsupportedModelError(
            f"dynamic RoPE scaling is supported up to {rope.max_positions} positions, but {max_seq_len} are asked for"
        )
    rope.inv_freq.setflags(write=False)
    return rope


def _default(params: _Params) -> Rope:
    return Rope(params.default_inv_freq(), 1.0, params.rotary_dim)


def _linear(params: _Params) -> Rope:
    """Position interpolation (`_compute_linear_scaling_rope_parameters`): all frequencies divided by the factor."""
    return Rope(params.default_inv_freq() / params.factor(), 1.0, params.rotary_dim)


def _dynamic(params: _Params) -> Rope:
    """Dynamic NTK scaling (`_compute_dynamic_ntk_parameters`) up to the length from which it changes anything.

    Beyond that the frequencies depend on the current length, so keys already in a cache would need to be turned again.
    """
    params.factor()
    limit = _positive(params.max_position_embeddings, "max_position_embeddings, which dynamic RoPE needs,")
    return Rope(params.default_inv_freq(), 1.0, params.rotary_dim, int(limit))


def _llama3(params: _Params) -> Rope:
    """Llama 3.1 scaling (`_compute_llama3_parameters`): long waves slowed, short ones kept, a ramp between."""
    factor, low, high = params.factor(), params.number("low_freq_factor"), params.number("high_freq_factor")
    if high <= low:
        raise ConfigError(f"high_freq_factor {high} of llama3 RoPE must be above low_freq_factor {low}")
    inv_freq = params.default_inv_freq()
    turns = params.original_length() * inv_freq / (2.0 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Rope((1.0 - kept) * inv_freq / factor + kept * inv_freq, 1.0, params.rotary_dim)


def _yarn(params: _Params) -> Rope:
    """YaRN (`_compute_yarn_parameters`, arXiv:2309.00071): a ramp over dimensions and a factor on cos and sin."""
    original = params.original_length()
    if params.values.get("factor") is None and params.max_position_embeddings is not None:
        factor = max(1.0, params.max_position_embeddings / original)
    else:
        factor = params.factor()
    fast, slow = params.number("beta_fast", 32.0), params.number("beta_slow", 1.0)
    if fast < slow:
        raise ConfigError(f"beta_fast {fast} of yarn RoPE must not be below beta_slow {slow}")
    if params.theta <= 1.0:
        raise ConfigError(f"rope_theta {params.theta} of yarn RoPE must be above 1")
    truncate = params.values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"truncate of yarn RoPE is {truncate!r}; true or false is needed")

    def dimension(rotations: float) -> float:
        return params.rotary_dim * math.log(original / (rotations * 2.0 * math.pi)) / (2.0 * math.log(params.theta))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, params.rotary_dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(params.rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    inv_freq = params.default_inv_freq()
    mixed = inv_freq / factor * interpolated + inv_freq * (1.0 - interpolated)
    return Rope(mixed, _yarn_attention_factor(params, factor), params.rotary_dim)


def _yarn_attention_factor(params: _Params, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if params.values.get("attention_factor") is not None:
        return params.number("attention_factor")
    over, under = (params.values.get(key) for key in ("mscale", "mscale_all_dim"))
    if over and under:
        return magnitude(params.number("mscale")) / magnitude(params.number("mscale_all_dim"))
    return magnitude(1.0)


def _longrope(params: _Params) -> Rope:
    """LongRoPE (`_compute_longrope_parameters`, arXiv:2402.13753): two lists of divisors and a factor on cos and sin.

    Which list counts depends on the length of the context, and all rows of a cache need the same one. The length is
    taken to be the cache's, as vLLM and llama.cpp do: past the original one the long divisors hold from the first
    token on. (transformers goes by the tokens so far, and starts over when they pass that length.)
    """
    for key in ("short_mscale", "long_mscale"):
        if params.values.get(key) is not None:
            raise UnsupportedModelError(f"{key} of longrope RoPE is not supported; only attention_factor is")
    original = params.original_length()
    if original <= 1.0:
        raise ConfigError(f"original_max_position_embeddings {original} of longrope RoPE must be above 1")
    factor = 1.0
    if params.values.get("factor") is not None:
        factor = params.factor()
    elif params.max_position_embeddings is not None:
        factor = params.max_position_embeddings / original
    magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    inv_freq = params.default_inv_freq()
    return Rope(
        inv_freq / _divisors(params, "short_factor"),
        params.number("attention_factor") if params.values.get("attention_factor") is not None else magnitude,
        params.rotary_dim,
        long_inv_freq=inv_freq / _divisors(params, "long_factor"),
        short_positions=int(original),
    )


def _divisors(params: _Params, key: str) -> F64:
    """A list of divisors of the frequencies, one for each rotated pair."""
    given, wanted = params.values.get(key), params.rotary_dim // 2
    if not isinstance(given, list) or len(given) != wanted:
        raise ConfigError(f"{params.kind} RoPE needs a list {key} of {wanted} numbers, one for each rotated pair")
    return np.array([_positive(value, f"a number in {key} of {params.kind} RoPE") for value in given], np.float64)


def _factors(params: _Params) -> Rope:
    """Divisors of the frequencies, which GGUF files carry in place of the llama3 settings (`rope_freqs.weight`)."""
    return Rope(params.default_inv_freq() / _divisors(params, "factors"), 1.0, params.rotary_dim)


_TYPES: Mapping[str, Callable[[_Params], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}


def _read_params(config: Mapping[str, Any], head_dim: int, layer_type: str | None) -> _Params:
    values = dict(_one_dict(config, layer_type))
    kind = _one_spelling(values, ("rope_type", "type")) or "default"
    if not isinstance(kind, str):
        raise ConfigError(f"the RoPE type is {kind!r}; a name is needed")
    if (
        kind == "default"
        and not values.get("rope_type")
        and not values.get("type")
        and values.get("factor") is not None
    ):
        raise ConfigError("rope_scaling has a factor but no rope_type that says how to apply it")
    theta = _inside_or_top(config, values, "rope_theta")
    partial = _inside_or_top(config, values, "partial_rotary_factor")
    original = config.get("original_max_position_embeddings")
    if original is not None:
        values["original_max_position_embeddings"] = original
    share = 1.0 if partial is None else _positive(partial, "partial_rotary_factor")
    if share > 1.0:
        raise ConfigError(f"partial_rotary_factor is {share}; it cannot be above 1")
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"{rotary_dim} of {head_dim} head dimensions are rotated; an even number from 2 on is needed")
    limit = config.get("max_position_embeddings")
    return _Params(
        values,
        kind,
        _DEFAULT_THETA if theta is None else _positive(theta, "rope_theta"),
        rotary_dim,
        None if limit is None else int(_positive(limit, "max_position_embeddings")),
    )


def _one_dict(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """Return the one RoPE dict of a config, whichever name it has; {} where there is none."""
    value = _one_spelling(config, ("rope_parameters", "rope_scaling"))
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"rope_scaling is {value!r}; an object or null is needed")
    if value and all(isinstance(inner, Mapping) for inner in value.values()):
        if layer_type is None or layer_type not in value:
            raise ConfigError(
                f"rope_parameters are given per layer type ({', '.join(value)}), but not for {layer_type!r}"
            )
        picked = value[layer_type]
        assert isinstance(picked, Mapping)
        return picked
    return value


def _one_spelling(values: Mapping[str, Any], keys: tuple[str, str]) -> Any:
    """Return what either of two keys says; `ConfigError` when both are there and differ."""
    first, second = (values.get(key) for key in keys)
    if first and second and first != second:
        raise ConfigError(f"{keys[0]} ({first!r}) and {keys[1]} ({second!r}) contradict each other")
    return second if first is None or (not first and second) else first


def _inside_or_top(config: Mapping[str, Any], values: Mapping[str, Any], key: str) -> Any:
    inside, top = values.get(key), config.get(key)
    if inside is not None and top is not None and inside != top:
        raise ConfigError(f"{key} is {top!r} at the top of the config and {inside!r} among the RoPE parameters")
    return top if inside is None else inside


def _positive(value: Any, what: str) -> float:
    if value is None:
        raise ConfigError(f"{what} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
        raise ConfigError(f"{what} is {value!r}; a positive number is needed")
    return float(value)
