"""How each GGUF architecture maps to its Hugging Face counterpart: one table per family.

Names on the GGUF side follow llama.cpp's conversion script and the `gguf` package's `MODEL_TENSORS`; names on the other
side follow the Hugging Face model of the same family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.weights.gguf_meta import Metadata

Names = Mapping[str, tuple[int, ...]]
"""GGUF tensor names with their shapes, rows first."""


@dataclass(frozen=True)
class GgufFamily:
    """One architecture: tensor names, config keys, and what llama.cpp's converter changed in the tensors."""

    model_type: str
    tensors: Mapping[str, str]
    """GGUF module name (no ".weight") to Hugging Face module name; `{i}` is the layer."""
    integers: Mapping[str, str]
    """Config key to metadata key, for positive integers that must be there."""
    config: Callable[[Metadata, Names], dict[str, Any]]
    """The rest of the config."""
    permuted: Mapping[str, str] = field(default_factory=dict)
    """GGUF module names whose rows the converter permuted, with the config key of their head count."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys that change the computation in a way that is not supported, with the name of the feature."""
    consumed: frozenset[str] = frozenset()
    """Tensors that the config absorbs, or that only repeat it."""


_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_SUFFIX = re.compile(r"(.+)\.(weight|bias)")


def family_of(arch: str, where: str) -> GgufFamily:
    """Return the table of an architecture; `UnsupportedModelError` names an unknown one and lists the known."""
    family = FAMILIES.get(arch)
    if family is None:
        raise UnsupportedModelError(
            f"{where} has the GGUF architecture {arch!r}, which is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    return family


def split_name(name: str) -> tuple[str, int | None, str]:
    """Split a GGUF tensor name into (module pattern, layer, "weight" or "bias")."""
    suffix = _SUFFIX.fullmatch(name)
    module, kind = (suffix[1], suffix[2]) if suffix else (name, "")
    block = _BLOCK.fullmatch(module)
    if block:
        return f"blk.{{i}}.{block[2]}", int(block[1]), kind
    return module, None, kind


def hf_name(family: GgufFamily, name: str, layers: int, where: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None for one that the config absorbs.

    A tensor that the family does not know is refused: leaving it out would silently compute something else.
    """
    module, layer, kind = split_name(name)
    if module in family.consumed:
        return None
    target = family.tensors.get(module)
    if target is None or not kind:
        raise UnsupportedModelError(
            f"{where} has the tensor {name!r}, which a {family.model_type} model is not known to have"
        )
    if layer is not None and layer >= layers:
        raise ModelFileError(f"{where} has the tensor {name!r}, but only {layers} layers")
    return f"{target.format(i=layer)}.{kind}"


def hf_config(family: GgufFamily, meta: Metadata, names: Names, where: str) -> dict[str, Any]:
    """Build the Hugging Face style config of a GGUF file (without its tokenizer's token ids)."""
    for key, feature in family.refused.items():
        if meta.is_set(key):
            raise UnsupportedModelError(
                f"{where} uses {feature}, which is not supported for {family.model_type} GGUF files"
            )
    config: dict[str, Any] = {"model_type": family.model_type}
    config.update({key: meta.integer(source) for key, source in family.integers.items()})
    config.update(family.config(meta, names))
    return config


def _llama_config(meta: Metadata, names: Names) -> dict[str, Any]:
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", meta.integer("rope.dimension_count", max(1, hidden // heads)))
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("value heads of another size than key heads are not supported for llama GGUF files")
    rotary = meta.integer("rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": _any_module(names, ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")),
        "mlp_bias": _any_module(names, ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")),
        **rope_config(meta),
    }
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    return config


def _any_module(names: Names, endings: tuple[str, ...]) -> bool:
    return any(name.endswith(tuple(f".{ending}" for ending in endings)) for name in names)


_KNOWN_SCALING = {
    "type",
    "factor",
    "original_context_length",
    "finetuned",
    "attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
}


def rope_config(meta: Metadata) -> dict[str, Any]:
    """Return `rope_theta` and, where the file scales RoPE, a `rope_scaling` dict in Hugging Face terms.

    llama.cpp multiplies `attn_factor` with YaRN's own factor 1 + 0.1 ln(factor); Hugging Face's `attention_factor` is
    the product.
    """
    config: dict[str, Any] = {"rope_theta": meta.number("rope.freq_base", 10000.0)}
    for key in meta.names():
        if (
            key.startswith("rope.scaling.")
            and key.removeprefix("rope.scaling.") not in _KNOWN_SCALING
            and meta.is_set(key)
        ):
            raise UnsupportedModelError(f"the GGUF metadata {key!r} is not supported")
    kind = meta.text("rope.scaling.type", "linear" if meta.has("rope.scale_linear") else "none")
    if kind == "none":
        return config
    scaling: dict[str, Any] = {"rope_type": kind}
    factor_key = "rope.scaling.factor" if meta.has("rope.scaling.factor") else "rope.scale_linear"
    if meta.has(factor_key):
        scaling["factor"] = meta.number(factor_key)
    if kind == "linear" and scaling.get("factor") == 1.0:
        return config
    if meta.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
    for hf_key in ("beta_fast", "beta_slow"):
        if meta.has(f"rope.scaling.yarn_{hf_key}"):
            scaling[hf_key] = meta.number(f"rope.scaling.yarn_{hf_key}")
    if meta.has("rope.scaling.attn_factor"):
        own = meta.number("rope.scaling.attn_factor")
        if kind != "yarn" and own != 1.0:
            raise UnsupportedModelError(
                f"the GGUF metadata 'rope.scaling.attn_factor' with {kind!r} scaling is not supported"
            )
        if kind == "yarn":
            scaling["attention_factor"] = own * (1.0 + 0.1 * math.log(max(1.0, scaling.get("factor", 1.0))))
    config["rope_scaling"] = scaling
    return config


_LLAMA = GgufFamily(
    model_type="llama",
    tensors={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
        "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
        "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
        "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
        "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
        "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
        "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
        "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
        "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
    },
    integers={
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
    },
    config=_llama_config,
    permuted={"blk.{i}.attn_q": "num_attention_heads", "blk.{i}.attn_k": "num_key_value_heads"},
    refused={
        "expert_count": "a mixture of experts",
        "attention.sliding_window": "sliding-window attention",
        "attention.scale": "a custom attention scale",
        "logit_scale": "a logit scale",
        "residual_scale": "a residual scale",
        "embedding_scale": "an embedding scale",
    },
    consumed=frozenset({"rope_freqs", "blk.{i}.attn_rot_embd"}),
)

FAMILIES: Mapping[str, GgufFamily] = {"llama": _LLAMA}
