"""Reading numbers and flags from a model's config, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """`silu`, `gelu` or `gelu_tanh`, by any of its names in Hugging Face configs; raises like `known`."""
    return _ACTIVATIONS[known(config, key, default, tuple(_ACTIVATIONS))]


def refuse(config: Mapping[str, Any], family: str, *keys: str) -> None:
    """Raise `UnsupportedModelError` where one of these keys is set to anything but false."""
    for key in keys:
        if config.get(key) not in (None, False):
            raise UnsupportedModelError(f"{key} {config[key]!r} is not supported for {family}; only false or none is")


def size_or_none(config: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """A positive integer or, where it is null, None; `default` where the key is absent."""
    return None if config.get(key, default) is None else positive_int(config, key, default)


def number_or_none(config: Mapping[str, Any], key: str) -> float | None:
    """A positive number or, where it is null or absent, None."""
    return None if config.get(key) is None else positive_float(config, key, 1.0)


def layer_windows(
    config: Mapping[str, Any], layers: int, window: int | None, windowed: Callable[[int], bool]
) -> tuple[int, ...]:
    """How many positions a token sees in each layer, its own included; 0 for all.

    Args:
        config: `layer_types` in it says which layers have a window.
        layers: how many there are.
        window: its size; None where the config has none.
        windowed: which layers have it where the config does not list them.

    Raises:
        ConfigError: the list does not fit the layers, or there is no window for those that it gives one.
        UnsupportedModelError: it has another type of layer.

    """
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple((window or 0) if windowed(layer) else 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"layer_types must list a type for each of {layers} layers, not {kinds!r}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer_types {kind!r} is not supported; supported: full_attention, sliding_attention"
            )
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("layer_types asks for sliding_attention, but the config gives no sliding_window to use")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)


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
