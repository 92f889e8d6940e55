"""Typed look-ups in GGUF metadata, each with an error that names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vkdecode.errors import ModelFileError, UnsupportedModelError


class Metadata:
    """GGUF metadata of one architecture; keys are given without the architecture's prefix.

    It remembers which keys were looked at, so that those that nobody understood can be refused. `where` names the file.
    """

    def __init__(self, values: Mapping[str, Any], arch: str, where: str) -> None:
        self._values = values
        self._arch = arch
        self._read: set[str] = set()
        self.where = where

    def names(self) -> list[str]:
        """Keys of this architecture, without the prefix."""
        prefix = f"{self._arch}."
        return [key[len(prefix) :] for key in self._values if key.startswith(prefix)]

    def unread(self) -> list[str]:
        """Keys of this architecture that nothing has looked at, without the prefix."""
        return [key for key in self.names() if key not in self._read]

    def has(self, key: str) -> bool:
        """Whether the architecture's key is there."""
        return f"{self._arch}.{key}" in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array of equal integers counts as one."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if np.any(value != value[0]):
                raise UnsupportedModelError(f"{self._name(key)} differs between layers, which is not supported")
            value = int(value[0])
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelFileError(f"{self._name(key)} is {value!r}; a positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelFileError(f"{self._name(key)} is {value!r}; a finite number is needed")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{self._name(key)} is {value!r}; a string is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A true or false value."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{self._name(key)} is {value!r}; true or false is needed")
        return value

    def window_layers(self, layers: int, pattern: int) -> list[bool]:
        """Which layers have a sliding window: all but every `pattern`-th, unless the file says otherwise.

        Files say it by a number, or by a flag for each layer.
        """
        key = "attention.sliding_window_pattern"
        value = self._get(key, pattern)
        if isinstance(value, np.ndarray):
            if len(value) != layers or value.dtype.kind not in "biu":
                raise ModelFileError(f"{self._name(key)} does not give a flag for each of {layers} layers")
            return [bool(flag) for flag in value]
        number = self.integer(key, pattern)
        return [(layer + 1) % number != 0 for layer in range(layers)]

    def is_set(self, key: str) -> bool:
        """Whether the key is there with a value other than zero, false or empty."""
        value = self._values.get(f"{self._arch}.{key}")
        return bool(np.any(value)) if isinstance(value, np.ndarray) else bool(value)

    def _name(self, key: str) -> str:
        return f"metadata {self._arch}.{key} of {self.where}"

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(f"{self._arch}.{key}", default)
        if value is None:
            raise ModelFileError(f"{self._name(key)} is missing")
        return value
