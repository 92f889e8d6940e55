"""Whether two configs, and what was written and what was read, are the same model.

A conversion to another format reads its own result the way a user will, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import UnsupportedModelError
from vkdecode.models.registry import architecture_of
from vkdecode.weights import WeightSource
from vkdecode.weights.recode import recode_rows

# A GGUF file holds numbers as float32.
_TOLERANCE = 1e-6


def check_same_config(original: Mapping[str, Any], rebuilt: Mapping[str, Any], where: str) -> None:
    """Raise `UnsupportedModelError` naming the first setting that got lost on the way."""
    before, after = _settings(original), _settings(rebuilt)
    for key in {**before, **after}:
        first, second = before.get(key), after.get(key)
        # Of two families, one may have a setting that the other lacks: Mistral without windows is Llama without biases.
        both = key in before and key in after
        if not (_equal(first, second) if both else not np.any(first) and not np.any(second)):
            raise UnsupportedModelError(
                f"{where} has {key} {_brief(first)}, which a GGUF file cannot say: it would become {_brief(second)}"
            )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """All that shapes the model, as its architecture reads it."""
    _, architecture = architecture_of(config)
    parsed = architecture.parse_config(config)
    return {**asdict(parsed), **asdict(architecture.rope(config, parsed))}


def check_written(source: WeightSource, written: WeightSource) -> None:
    """Hold a few rows of every tensor that was written against the source's.

    Raises:
        UnsupportedModelError: they differ, so that this kind of model is not converted right.

    """
    for name in written.names():
        info, held = source.info(name), written.info(name)
        count = info.shape[0] if info.shape else 0
        if info.shape != held.shape:
            raise UnsupportedModelError(f"{name} of {source.path} would change its shape; it cannot be converted")
        if not count or any(one.stored_as != one.dtype.name for one in (info, held)):
            continue  # Dequantized while it is read, which does not show what is stored.
        # Not only rows at the edges of heads, which stay where they are when a head's rows are re-ordered.
        rows = np.unique(np.array([0, 1, count // 3, count - 1]).clip(0, count - 1))
        values = source.read(name, rows).reshape(rows.size, -1)
        wanted = recode_rows(values, info.dtype, held.dtype, name)
        found = written.read(name, rows)
        if wanted.tobytes() != found.tobytes() and not _is_close(wanted, found):
            raise UnsupportedModelError(f"{name} of {source.path} would change its values; it cannot be converted")


def _is_close(wanted: NDArray[Any], found: NDArray[Any]) -> bool:
    """Whether float32 numbers differ by rounding only, as where a file keeps them with one added."""
    if wanted.dtype != np.float32 or found.dtype != np.float32:
        return False
    return bool(np.allclose(wanted.reshape(-1), found.reshape(-1), rtol=0.0, atol=1e-6))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.shape == np.shape(b) and bool(np.allclose(a, b, rtol=_TOLERANCE, atol=0.0))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=_TOLERANCE)
    return bool(a == b)


def _brief(value: Any) -> str:
    return "frequencies" if isinstance(value, np.ndarray) else repr(value)
