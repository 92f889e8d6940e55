"""How a GGUF file says what a Hugging Face config says of RoPE, and the other way round where there is no one word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ConfigError
from vkdecode.models.rope import Rope, rope_from_config
from vkdecode.weights.families.rope import FREQUENCIES, LONG, SHORT

_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeWords:
    """Metadata by key without the architecture, and the vectors that are tensors of the file."""

    metadata: Mapping[str, Any]
    vectors: Mapping[str, NDArray[np.float32]]


def gguf_rope(config: Mapping[str, Any], rope: Rope) -> RopeWords:
    """What llama.cpp's converters write; `rope` is the rotation that the config means.

    Scaling that GGUF files have no word for is left out; reading the result and comparing shows it.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layered = bool(given) and all(isinstance(one, Mapping) for one in given.values())
    settings: Mapping[str, Any] = given.get("full_attention", {}) if layered else given
    theta = float(_first(settings.get("rope_theta"), config.get("rope_theta"), config.get("rotary_emb_base")))
    words: dict[str, Any] = {"rope.dimension_count": rope.rotary_dim, "rope.freq_base": theta}
    local = _first(given.get("sliding_attention", {}).get("rope_theta") if layered else None,
                   config.get("rope_local_base_freq"), default=None)  # fmt: skip
    if local is not None:
        words["rope.freq_base_swa"] = float(local)
    vectors: dict[str, NDArray[np.float32]] = {}
    kind = settings.get("rope_type") or settings.get("type")
    if kind in ("linear", "yarn"):
        words.update(_scaling(kind, settings, config))
    elif kind in ("llama3", "factors"):
        plain = theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
        vectors[FREQUENCIES] = np.asarray(plain / rope.inv_freq, np.float32)
    elif kind in ("longrope", "su"):
        words["rope.scaling.attn_factor"] = float(rope.attention_factor)
        words["rope.scaling.original_context_length"] = _original(settings, config)
        vectors[LONG] = np.asarray(settings.get("long_factor"), np.float32)
        vectors[SHORT] = np.asarray(settings.get("short_factor"), np.float32)
    return RopeWords(words, vectors)


def folder_rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The llama3 settings behind GGUF frequency factors, which other programs have no name for; None if there are none.

    All published models share the low and high factor; the original length follows from any frequency on the ramp
    between the two, or is a usual one where none lies there.
    """
    factors: list[float] = config["rope_scaling"]["factors"]
    low, high, factor = 1.0, 4.0, max(factors)
    theta, head_dim = float(config["rope_theta"]), int(config["head_dim"])
    ramp = next((index for index, value in enumerate(factors) if 1.0 < value < factor), None)
    lengths = [8192, 4096, 2048]
    if ramp is not None:
        kept = (1.0 / factors[ramp] - 1.0 / factor) / (1.0 - 1.0 / factor)
        inv_freq = theta ** (-ramp / len(factors))
        lengths.insert(0, round((low + kept * (high - low)) * 2.0 * math.pi / inv_freq))
    wanted = rope_from_config(config, head_dim)
    for length in lengths:
        settings = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        try:
            made = rope_from_config({**config, "rope_scaling": settings}, head_dim)
        except ConfigError:
            continue
        if np.allclose(made.inv_freq, wanted.inv_freq, rtol=1e-5, atol=0.0):
            return settings
    return None


def _scaling(kind: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Linear and YaRN; a YaRN config without a factor means how much longer the context has become."""
    longest = config.get("max_position_embeddings")
    factor = settings.get("factor") or max(1.0, float(longest or 1) / float(_original(settings, config) or 1))
    words: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": float(factor)}
    if kind == "linear":
        return words
    words["rope.scaling.original_context_length"] = _original(settings, config)
    for key in ("beta_fast", "beta_slow"):
        if settings.get(key) is not None:
            words[f"rope.scaling.yarn_{key}"] = float(settings[key])
    if settings.get("attention_factor") is not None:
        # The metadata multiplies YaRN's usual factor, the config replaces it.
        usual = 1.0 + 0.1 * math.log(max(1.0, float(factor)))
        words["rope.scaling.attn_factor"] = float(settings["attention_factor"]) / usual
    return words


def _original(settings: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    places = (config, settings)
    found = _first(*(one.get("original_max_position_embeddings") for one in places), default=None)
    value = config.get("max_position_embeddings") if found is None else found
    return None if value is None else int(value)


def _first(*values: Any, default: Any = _DEFAULT_THETA) -> Any:
    return next((value for value in values if value is not None), default)
