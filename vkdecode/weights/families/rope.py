"""RoPE settings of GGUF files in Hugging Face terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.weights.families.table import GgufContents
from vkdecode.weights.gguf_meta import Metadata

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short", "blk.{i}.attn_rot_embd"})
"""Tensors that say how to rotate; the config takes them in."""


def rope_config(contents: GgufContents, head_dim: int, base: float = 10000.0) -> dict[str, Any]:
    """Return `rope_theta` (`base` where a file has none), and where they apply the share rotated and `rope_scaling`."""
    meta = contents.meta
    config: dict[str, Any] = {"rope_theta": meta.number("rope.freq_base", base)}
    rotary = meta.integer("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    scaling = _rope_scaling(contents)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(contents: GgufContents) -> dict[str, Any] | None:
    """The `rope_scaling` of a file, or None where it scales nothing."""
    scaling = _from_metadata(contents.meta)
    kind = scaling["rope_type"] if scaling else "none"
    if FREQUENCIES in contents.names:
        if scaling is not None:
            raise UnsupportedModelError(
                f"{contents.meta.where} combines {FREQUENCIES} with RoPE scaling {kind!r}, which is not supported"
            )
        return {"rope_type": "factors", "factors": contents.vector(FREQUENCIES)}
    if LONG in contents.names or SHORT in contents.names or kind == "longrope":
        return _longrope(contents, kind)
    return scaling


def _longrope(contents: GgufContents, kind: str) -> dict[str, Any]:
    """Two lists of divisors; transformers takes the long ones beyond the length of pretraining."""
    meta = contents.meta
    if kind not in ("none", "longrope"):
        raise UnsupportedModelError(f"{meta.where} combines {LONG} with RoPE scaling {kind!r}, which is not supported")
    for name in (LONG, SHORT):
        if name not in contents.names:
            raise ModelFileError(f"{meta.where} has no {name}, which its RoPE scaling longrope needs")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": contents.vector(LONG),
        "short_factor": contents.vector(SHORT),
    }
    if meta.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = meta.number("rope.scaling.attn_factor")
    if meta.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
    return scaling


def _from_metadata(meta: Metadata) -> dict[str, Any] | None:
    """What the keys alone say.

    llama.cpp multiplies `attn_factor` with YaRN's own factor 1 + 0.1 ln(factor); Hugging Face's `attention_factor` is
    the product.
    """
    factor_key = "rope.scaling.factor" if meta.has("rope.scaling.factor") else "rope.scale_linear"
    kind = meta.text("rope.scaling.type", "linear" if meta.has(factor_key) else "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "longrope":
        return scaling
    if meta.has(factor_key):
        scaling["factor"] = meta.number(factor_key)
    if kind == "linear" and scaling.get("factor") == 1.0:
        return None
    if meta.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
    for hf_key in ("beta_fast", "beta_slow"):
        if meta.has(f"rope.scaling.yarn_{hf_key}"):
            scaling[hf_key] = meta.number(f"rope.scaling.yarn_{hf_key}")
    extrapolation = meta.number("rope.scaling.yarn_ext_factor", 1.0)
    own = meta.number("rope.scaling.attn_factor", 1.0)
    if extrapolation != 1.0 or (own != 1.0 and kind != "yarn"):
        key = "yarn_ext_factor" if extrapolation != 1.0 else "attn_factor"
        raise UnsupportedModelError(
            f"the GGUF metadata 'rope.scaling.{key}' of {meta.where} with {kind!r} scaling is not supported"
        )
    if own != 1.0:
        scaling["attention_factor"] = own * (1.0 + 0.1 * math.log(max(1.0, scaling.get("factor", 1.0))))
    return scaling


def head_dim(contents: GgufContents, config: Mapping[str, Any]) -> int:
    """The size of a head; values as large as keys, or it is refused."""
    meta = contents.meta
    size = meta.integer("attention.key_length", max(1, config["hidden_size"] // config["num_attention_heads"]))
    if meta.integer("attention.value_length", size) != size:
        raise UnsupportedModelError(f"{meta.where} has value heads of another size than key heads; not supported")
    return size


def divided_head_dim(contents: GgufContents, config: Mapping[str, Any]) -> int:
    """The size of a head where the family has no say in it: hidden_size over heads, or it is refused."""
    size: int = config["hidden_size"] // config["num_attention_heads"]
    given = head_dim(contents, config)
    if given != size:
        raise UnsupportedModelError(
            f"{contents.meta.where} has heads of size {given}; this architecture has hidden_size / heads, {size}"
        )
    return size
