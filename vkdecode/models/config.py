"""Reading numbers and flags from a model's config, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vkdecode.errors import ConfigError

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
