"""What llama.cpp's converters write for the tiny checkpoints, spelled out by family.

This follows the conversion scripts, not the tables under test: names are written out anew, and tensors are changed with
reshapes where the package computes row numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[Any]
Config = Mapping[str, Any]
Converted = dict[str, Array]

LLAMA_NAMES = {
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
QK_NORM_NAMES = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA_NAMES = {
    **LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PHI_NAMES = {
    **LLAMA_NAMES,
    "model.final_layernorm": "output_norm",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
PHI3_NAMES = {**LLAMA_NAMES, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
OLMO2_NAMES = {
    **LLAMA_NAMES,
    **QK_NORM_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MIXTRAL_NAMES = {
    **LLAMA_NAMES,
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
QWEN_MOE_NAMES = {
    **LLAMA_NAMES,
    **QK_NORM_NAMES,
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
GPT_OSS_NAMES = {
    **LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
NEOX_NAMES = {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "input_layernorm": "attn_norm",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
STARCODER2_NAMES = {**LLAMA_NAMES, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
_LAYER = re.compile(r"(?:model\.layers|gpt_neox\.layers|transformer\.h)\.(\d+)\.(.+)")


def converted(folder: Path) -> tuple[str, dict[str, Any], Converted]:
    """Architecture, metadata and tensors of the GGUF file that a converter makes of a folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: array.astype(np.float32) for file in files for name, array in load_file(file).items()}
    arch, names, change, meta = FAMILIES[config["model_type"]]
    changed: Converted = {}
    for name, array in stacked(tensors).items():
        changed.update(change(name, array, config))
    prefixed = {f"{arch}.{key}": value for key, value in {**base_meta(config), **meta(config)}.items()}
    extra = rope_factors(config)
    wanted = {key: value for key, value in prefixed.items() if value is not None}
    return arch, wanted, {**{gguf_name(name, names): array for name, array in changed.items()}, **extra}


def rope_factors(config: Config) -> Converted:
    """LlamaModel.generate_extra_tensors: what llama3 scaling divides each frequency by."""
    rope: Config = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for pair in range(size // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / size)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(module)
    return f"blk.{layer[1]}.{names[layer[2]]}.{kind}" if layer else f"{names[module]}.{kind}"


def stacked(tensors: Converted) -> Converted:
    """Tensors whose names differ in an expert's number become one, under the name without it."""
    found: dict[str, list[tuple[int, Array]]] = {}
    for name, array in tensors.items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        found.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(
            (int(expert[1]) if expert else -1, array)
        )
    return {
        name: arrays[0][1] if arrays[0][0] < 0 else np.stack([array for _, array in sorted(arrays, key=lambda e: e[0])])
        for name, arrays in found.items()
    }


def same(name: str, array: Array, config: Config) -> Converted:
    return {name: array}


def permuted(name: str, array: Array, config: Config) -> Converted:
    """LlamaModel: the halves of each head's rows become neighbours."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return {name: array}
    count = int(config[heads])
    split = array.reshape(count, 2, array.shape[0] // count // 2, *array.shape[1:])
    return {name: np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)}


def one_added(name: str, array: Array, config: Config) -> Converted:
    """Gemma: norms multiply by 1 + w."""
    return {name: array + np.float32(1) if name.endswith("norm.weight") else array}


def neox(name: str, array: Array, config: Config) -> Converted:
    if "query_key_value" not in name:
        return {name: array}
    heads = int(config["num_attention_heads"])
    by_head = array.reshape(heads, 3, -1, *array.shape[1:])
    return {name: np.concatenate([by_head[:, part].reshape(-1, *array.shape[1:]) for part in range(3)])}


def conv1d(name: str, array: Array, config: Config) -> Converted:
    is_matrix = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return {name: np.ascontiguousarray(array.T) if is_matrix else array}


def gpt_oss(name: str, array: Array, config: Config) -> Converted:
    """Gate and up are every other column; a parameter without a suffix gets one."""
    if name.endswith("sinks"):
        return {f"{name}.weight": array}
    if ".experts." not in name:
        return {name: array}
    base, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    kept = array if kind == "bias" else array.swapaxes(-1, -2)
    if "down_proj" in base:
        return {f"{base}.{kind}": np.ascontiguousarray(kept)}
    halves = (array[..., ::2], array[..., 1::2]) if kind == "bias" else (kept[:, ::2], kept[:, 1::2])
    gate, up = (base.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj"))
    return {f"{gate}.{kind}": np.ascontiguousarray(halves[0]), f"{up}.{kind}": np.ascontiguousarray(halves[1])}


def base_meta(config: Config) -> dict[str, Any]:
    """TextModel.set_gguf_parameters."""
    rope: Config = config.get("rope_parameters") or {}
    whole: Config = rope.get("full_attention", rope)
    meta = {
        "block_count": config.get("num_hidden_layers"),
        "context_length": config.get("max_position_embeddings"),
        "embedding_length": config.get("hidden_size"),
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config.get("num_attention_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps") or config.get("norm_epsilon"),
        "rope.freq_base": whole.get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "vocab_size": config["vocab_size"],
    }
    if whole.get("rope_type") in ("linear", "yarn"):
        meta["rope.scaling.type"] = whole["rope_type"]
        meta["rope.scaling.factor"] = whole["factor"]
        meta["rope.scaling.original_context_length"] = whole.get("original_max_position_embeddings")
    return meta


def rotary(config: Config) -> dict[str, Any]:
    share = config.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    return {"rope.dimension_count": int(share * (config["hidden_size"] // config["num_attention_heads"]))}


def llama_meta(config: Config) -> dict[str, Any]:
    """The window, which llama.cpp's converter leaves out, is written as other tools do."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope.dimension_count": head_dim, "attention.sliding_window": config.get("sliding_window")}


def granite_meta(config: Config) -> dict[str, Any]:
    return {
        **llama_meta(config),
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def gemma_meta(config: Config) -> dict[str, Any]:
    """The pattern and the scale are written where the released models' would not be understood of themselves."""
    return {
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.scale": config["query_pre_attn_scalar"] ** -0.5,
    }


def phi3_meta(config: Config) -> dict[str, Any]:
    return {
        **rotary(config),
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
    }


def moe_meta(config: Config) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def gpt_oss_meta(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def gpt2_meta(config: Config) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def neox_meta(config: Config) -> dict[str, Any]:
    return {**rotary(config), "use_parallel_residual": config["use_parallel_residual"], "rope.freq_base": None}


def stablelm_meta(config: Config) -> dict[str, Any]:
    return {**rotary(config), "use_parallel_residual": config["use_parallel_residual"]}


def starcoder2_meta(config: Config) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"]}


def cohere_meta(config: Config) -> dict[str, Any]:
    return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}


def no_meta(config: Config) -> dict[str, Any]:
    return {}


Change = Callable[[str, Array, Config], Converted]
FAMILIES: Mapping[str, tuple[str, Mapping[str, str], Change, Callable[[Config], dict[str, Any]]]] = {
    "llama": ("llama", LLAMA_NAMES, permuted, llama_meta),
    "mistral": ("llama", LLAMA_NAMES, permuted, llama_meta),
    "mixtral": ("llama", MIXTRAL_NAMES, permuted, llama_meta),
    "smollm3": ("smollm3", LLAMA_NAMES, permuted, llama_meta),
    "granite": ("granite", LLAMA_NAMES, permuted, granite_meta),
    "qwen2": ("qwen2", LLAMA_NAMES, same, no_meta),
    "qwen3": ("qwen3", {**LLAMA_NAMES, **QK_NORM_NAMES}, same, no_meta),
    "olmo2": ("olmo2", OLMO2_NAMES, same, no_meta),
    "gemma2": ("gemma2", GEMMA_NAMES, one_added, gemma_meta),
    "gemma3_text": ("gemma3", {**GEMMA_NAMES, **QK_NORM_NAMES}, one_added, gemma_meta),
    "phi": ("phi2", PHI_NAMES, same, rotary),
    "phi3": ("phi3", PHI3_NAMES, same, phi3_meta),
    "qwen2_moe": ("qwen2moe", QWEN_MOE_NAMES, same, moe_meta),
    "qwen3_moe": ("qwen3moe", QWEN_MOE_NAMES, same, moe_meta),
    "gpt_oss": ("gpt-oss", GPT_OSS_NAMES, gpt_oss, gpt_oss_meta),
    "gpt2": ("gpt2", GPT2_NAMES, conv1d, gpt2_meta),
    "gpt_neox": ("gptneox", NEOX_NAMES, neox, neox_meta),
    "starcoder2": ("starcoder2", STARCODER2_NAMES, same, starcoder2_meta),
    "stablelm": ("stablelm", LLAMA_NAMES, same, stablelm_meta),
    "cohere": ("command-r", LLAMA_NAMES, same, cohere_meta),
}


def model_type(folder: Path) -> str:
    """What the config of a checkpoint says that it is."""
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])


TINY = Path(__file__).parents[1] / "data" / "tiny"
NAMES = tuple(sorted(folder.name for folder in TINY.iterdir() if model_type(folder) in FAMILIES))
"""The tiny checkpoints of families that have a GGUF form."""
