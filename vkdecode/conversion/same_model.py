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
    name, architecture = architecture_of(original)
    other, _ = architecture_of(rebuilt)
    if name != other:
        raise UnsupportedModelError(f"{where} has the model_type {name!r}, which would become {other!r}")
    first, second = (architecture.parse_config(config) for config in (original, rebuilt))
    ropes = (architecture.rope(original, first), architecture.rope(rebuilt, second))
    settings = [{**asdict(one), **asdict(rope)} for one, rope in zip((first, second), ropes, strict=True)]
    for key, value in settings[0].items():
        if not _equal(value, settings[1][key]):
            raise UnsupportedModelError(
                f"{where} has {key} {_brief(value)}, which a GGUF file cannot say: it would become "
                f"{_brief(settings[1][key])}"
            )


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
