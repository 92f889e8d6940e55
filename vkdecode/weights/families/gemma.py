"""Gemma 2 and the text part of Gemma 3: norms kept with one added, windows in a pattern of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkdecode.weights.families.rope import ROPE_TENSORS, head_dim, rope_config
from vkdecode.weights.families.table import (
    LLAMA_TENSORS,
    PLUS_ONE,
    QK_NORMS,
    RMS_EPS,
    SIZES,
    GgufContents,
    GgufFamily,
    attention_scalar,
)

_TENSORS: Mapping[str, str] = {
    **LLAMA_TENSORS,
    "blk.{i}.ffn_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm",
}


def layer_types(contents: GgufContents, layers: int, pattern: int) -> list[str]:
    """Which layers slide: all but every `pattern`-th, or what the file says by a number or layer by layer."""
    slides = contents.meta.window_layers(layers, pattern)
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _common(contents: GgufContents, partial: Mapping[str, Any], architecture: str, largest: int) -> dict[str, Any]:
    """What both say; the 27B models, told by their number of layers, divide scores by another number than others."""
    size = head_dim(contents, partial)
    per_head = partial["hidden_size"] // partial["num_attention_heads"]
    return {
        "architectures": [architecture],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": size,
        "attention_bias": False,
        "tie_word_embeddings": contents.tied,
        "query_pre_attn_scalar": attention_scalar(
            contents, per_head if partial["num_hidden_layers"] == largest else size
        ),
    }


def _gemma2(contents: GgufContents, partial: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults are llama.cpp's, which are those of the released models."""
    meta = contents.meta
    config = _common(contents, partial, "Gemma2ForCausalLM", largest=46)
    return {
        **config,
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "sliding_window": meta.integer("attention.sliding_window", 4096),
        "layer_types": layer_types(contents, partial["num_hidden_layers"], pattern=2),
        **rope_config(contents, config["head_dim"]),
    }


def _gemma3(contents: GgufContents, partial: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that slide rotate by a base of their own, and without the scaling of the others."""
    meta = contents.meta
    layers = partial["num_hidden_layers"]
    window = meta.integer("attention.sliding_window") if meta.is_set("attention.sliding_window") else None
    cap = meta.number("final_logit_softcapping", 0.0)
    rope = rope_config(contents, head_dim(contents, partial), base=1000000.0)
    every = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    return {
        **_common(contents, partial, "Gemma3ForCausalLM", largest=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": cap or None,
        "sliding_window": window,
        "layer_types": ["full_attention"] * layers if window is None else layer_types(contents, layers, pattern=6),
        "use_bidirectional_attention": False,
        "rope_parameters": {
            "full_attention": {
                "rope_theta": rope["rope_theta"],
                **every,
                **rope.get("rope_scaling", {"rope_type": "default"}),
            },
            "sliding_attention": {
                "rope_theta": meta.number("rope.freq_base_swa", 10000.0),
                **every,
                "rope_type": "default",
            },
        },
    }


_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")
_SHIFTED = {"output_norm": PLUS_ONE, **{f"blk.{{i}}.{norm}": PLUS_ONE for norm in _NORMS}}

GEMMA2 = GgufFamily(
    arch="gemma2",
    model_type="gemma2",
    tensors=_TENSORS,
    keys=(*SIZES, RMS_EPS),
    config=_gemma2,
    layouts=_SHIFTED,
    consumed=ROPE_TENSORS,
)
GEMMA3 = GgufFamily(
    arch="gemma3",
    model_type="gemma3_text",
    tensors={**_TENSORS, **QK_NORMS},
    keys=(*SIZES, RMS_EPS),
    config=_gemma3,
    layouts=_SHIFTED,
    consumed=ROPE_TENSORS,
)
GEMMAS = (GEMMA2, GEMMA3)
