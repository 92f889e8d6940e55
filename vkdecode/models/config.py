"""Reading numbers and flags from a model's config, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkdecode.errors import ConfigError, UnsupportedModelError

_LARGEST = 1 << 31


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer below 2^31; `default` where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"the config has no {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
        raise ConfigError(f"{key} must be a positive integer, not {value!r}")
    return value


def positive_float(config: Mapping[str, Any], key: str, default: float) -> float:
    """A positive finite number; `default` where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{key} must be a positive number, not {value!r}")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean; `default` where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, not {value!r}")
    return value


def known(config: Mapping[str, Any], key: str, default: str, supported: Sequence[str]) -> str:
    """A word that must be one of those supported; `default` where the key is absent.

    Raises:
        UnsupportedModelError: it is another one; ignoring it would change the result.

    """
    value = config.get(key, default)
    if value not in supported:
        raise UnsupportedModelError(f"{key} {value!r} is not supported; supported: {', '.join(supported)}")
    return str(value)


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes that every decoder has; names as in Hugging Face configs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


def decoder_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The fields of `DecoderConfig`.

    Raises:
        ConfigError: one is missing or impossible, or they contradict one another.
        UnsupportedModelError: no kernel has the head's size.

    """
    hidden_size = positive_int(config, "hidden_size")
    heads = positive_int(config, "num_attention_heads")
    kv_heads = positive_int(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and hidden_size % heads:
        raise ConfigError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and head_dim is not given"
        )
    head_dim = positive_int(config, "head_dim", max(hidden_size // heads, 1))
    if head_dim % 4:
        raise UnsupportedModelError(f"head_dim {head_dim} is not supported; it must be a multiple of 4")
    return {
        "vocab_size": positive_int(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(config, "intermediate_size"),
        "num_hidden_layers": positive_int(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positive_int(config, "max_position_embeddings", 2048),
    }
