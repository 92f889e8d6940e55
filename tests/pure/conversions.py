"""What the tests of conversions share: reading a result, and comparing it with where it came from."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_files import TINY
from numpy.typing import NDArray

from vkdecode.models.registry import architecture_of
from vkdecode.weights import DType, GgufFile, WeightSource, open_weights
from vkdecode.weights.blocks import ggml_type

LLAMAS = sorted(path.name for path in TINY.glob("llama*"))


def opened_gguf(path: Path) -> GgufFile:
    source = open_weights(path)
    assert isinstance(source, GgufFile)
    return source


def changed_folder(path: Path, name: str = "llama", **config: Any) -> Path:
    """A copy of a tiny folder with other settings; None takes one out."""
    shutil.copytree(TINY / name, path)
    known = json.loads((path / "config.json").read_text())
    settings = {key: value for key, value in {**known, **config}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(settings))
    return path


def settings(source: WeightSource) -> dict[str, Any]:
    """Everything that shapes the model, as its architecture reads it."""
    _, architecture = architecture_of(source.config)
    config = architecture.parse_config(source.config)
    found: dict[str, Any] = {**asdict(config), **asdict(architecture.rope(source.config, config))}
    flat = {key: value for key, value in found.items() if not isinstance(value, dict)}
    nested = {key: value for key, value in found.items() if isinstance(value, dict)}
    return {**flat, **{f"{key}.{inner}": value for key, inside in nested.items() for inner, value in inside.items()}}


def assert_same_settings(found: WeightSource, wanted: WeightSource) -> None:
    one, other = settings(found), settings(wanted)
    assert one.keys() == other.keys()
    for key, value in other.items():
        if isinstance(value, (float, np.ndarray)):
            np.testing.assert_allclose(one[key], value, rtol=1e-6, err_msg=key)
        else:
            assert one[key] == value, key


def as_type(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Rows in another type, by the `gguf` package where it is a block format."""
    if not dtype.is_block:
        return values.astype(dtype.numpy)
    return np.asarray(gguf.quants.quantize(values.astype(np.float32), ggml_type(dtype)))


def as_numbers(source: WeightSource, name: str) -> NDArray[np.float32]:
    info, values = source.info(name), source.read(name)
    if info.dtype.is_block:
        values = gguf.quants.dequantize(values, ggml_type(info.dtype))
    return np.asarray(values, np.float32)
