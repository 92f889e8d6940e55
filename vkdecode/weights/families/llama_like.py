"""Llama and the families that differ from it in little: Mistral, Mixtral, SmolLM3, Granite, Qwen 2 and 3, OLMo 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkdecode.errors import UnsupportedModelError
from vkdecode.weights.families.rope import ROPE_TENSORS, head_dim, rope_config
from vkdecode.weights.families.table import (
    LLAMA_TENSORS,
    PERMUTED_QK,
    QK_NORMS,
    QKV,
    RMS_EPS,
    SIZES,
    GgufContents,
    GgufFamily,
    Key,
    Layout,
    without,
)
from vkdecode.weights.gguf_meta import Metadata

Config = dict[str, Any]
Partial = Mapping[str, Any]

_PROJECTIONS = frozenset(QKV | {"blk.{i}.attn_output", "blk.{i}.ffn_gate", "blk.{i}.ffn_up", "blk.{i}.ffn_down"})
_WINDOW = "attention.sliding_window"
_EXPERTS = "expert_count"


def common(contents: GgufContents, partial: Partial, architecture: str) -> Config:
    """What all of them say: activation, head size, tied output, RoPE."""
    size = head_dim(contents, partial)
    return {
        "architectures": [architecture],
        "hidden_act": "silu",
        "head_dim": size,
        "tie_word_embeddings": contents.tied,
        **rope_config(contents, size),
    }


def check_gating(contents: GgufContents, expected: int) -> None:
    """Refuse routers that weigh experts otherwise than the family does; 1 is softmax, 3 softmax of the chosen ones."""
    given = contents.meta.integer("expert_gating_func", expected)
    if given != expected:
        raise UnsupportedModelError(
            f"{contents.meta.where} has expert_gating_func {given}, which is not supported; {expected} is"
        )


def _biases(contents: GgufContents) -> Config:
    return {
        "attention_bias": contents.has_module("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
        "mlp_bias": contents.has_module("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
    }


def _llama(contents: GgufContents, partial: Partial) -> Config:
    return {**common(contents, partial, "LlamaForCausalLM"), **_biases(contents)}


def _mistral(contents: GgufContents, partial: Partial) -> Config:
    return {
        **common(contents, partial, "MistralForCausalLM"),
        "sliding_window": contents.meta.integer(_WINDOW),
    }


def _mixtral(contents: GgufContents, partial: Partial) -> Config:
    check_gating(contents, expected=1)
    window = contents.meta.integer(_WINDOW) if contents.meta.is_set(_WINDOW) else None
    return {**common(contents, partial, "MixtralForCausalLM"), "sliding_window": window}


def _smollm3(contents: GgufContents, partial: Partial) -> Config:
    """Every fourth layer has no RoPE; files do not say so."""
    interval = 4
    return {
        **common(contents, partial, "SmolLM3ForCausalLM"),
        **_biases(contents),
        "no_rope_layer_interval": interval,
        "no_rope_layers": [int((layer + 1) % interval != 0) for layer in range(partial["num_hidden_layers"])],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _granite(contents: GgufContents, partial: Partial) -> Config:
    meta = contents.meta
    if meta.has("rope.scaling.finetuned") and not meta.flag("rope.scaling.finetuned", True):
        raise UnsupportedModelError(f"{meta.where} is a granite model without RoPE, which is not supported")
    config = common(contents, partial, "GraniteForCausalLM")
    return {
        **config,
        **_biases(contents),
        "attention_multiplier": meta.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": meta.number("embedding_scale", 1.0),
        "residual_multiplier": meta.number("residual_scale", 1.0),
    }


def _qwen2(contents: GgufContents, partial: Partial) -> Config:
    return {
        **common(contents, partial, "Qwen2ForCausalLM"),
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen3(contents: GgufContents, partial: Partial) -> Config:
    return {
        **common(contents, partial, "Qwen3ForCausalLM"),
        "attention_bias": contents.has_module("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _olmo2(contents: GgufContents, partial: Partial) -> Config:
    if contents.meta.is_set(_WINDOW):
        raise UnsupportedModelError(f"{contents.meta.where} has sliding windows (OLMo 3), which are not supported")
    return {**common(contents, partial, "Olmo2ForCausalLM"), "attention_bias": False}


def _has_experts(meta: Metadata) -> bool:
    return meta.is_set(_EXPERTS)


def _has_window(meta: Metadata) -> bool:
    return meta.is_set(_WINDOW)


LLAMA = GgufFamily(
    arch="llama",
    model_type="llama",
    tensors=LLAMA_TENSORS,
    keys=(*SIZES, RMS_EPS),
    config=_llama,
    layouts=PERMUTED_QK,
    biased=_PROJECTIONS,
    consumed=ROPE_TENSORS,
)
MISTRAL = GgufFamily(
    arch="llama",
    model_type="mistral",
    tensors=LLAMA_TENSORS,
    keys=(*SIZES, RMS_EPS),
    config=_mistral,
    layouts=PERMUTED_QK,
    consumed=ROPE_TENSORS,
    is_it=_has_window,
)
_EXPERT = "model.layers.{i}.block_sparse_moe.experts.{e}"
MIXTRAL = GgufFamily(
    arch="llama",
    model_type="mixtral",
    tensors={
        **without(LLAMA_TENSORS, "blk.{i}.ffn_gate", "blk.{i}.ffn_up", "blk.{i}.ffn_down"),
        "blk.{i}.ffn_gate_inp": "model.layers.{i}.block_sparse_moe.gate",
        "blk.{i}.ffn_gate_exps": f"{_EXPERT}.w1",
        "blk.{i}.ffn_down_exps": f"{_EXPERT}.w2",
        "blk.{i}.ffn_up_exps": f"{_EXPERT}.w3",
    },
    keys=(*SIZES, RMS_EPS, Key("num_local_experts", _EXPERTS), Key("num_experts_per_tok", "expert_used_count")),
    config=_mixtral,
    layouts={
        **PERMUTED_QK,
        **{f"blk.{{i}}.ffn_{part}_exps": Layout(stacked="num_local_experts") for part in ("gate", "down", "up")},
    },
    consumed=ROPE_TENSORS,
    is_it=_has_experts,
)
SMOLLM3 = GgufFamily(
    arch="smollm3",
    model_type="smollm3",
    tensors=LLAMA_TENSORS,
    keys=(*SIZES, RMS_EPS),
    config=_smollm3,
    layouts=PERMUTED_QK,
    biased=_PROJECTIONS,
    consumed=ROPE_TENSORS,
)
GRANITE = GgufFamily(
    arch="granite",
    model_type="granite",
    tensors=LLAMA_TENSORS,
    keys=(*SIZES, RMS_EPS, Key("logits_scaling", "logit_scale", float)),
    config=_granite,
    layouts=PERMUTED_QK,
    biased=_PROJECTIONS,
    consumed=ROPE_TENSORS,
)
QWEN2 = GgufFamily(
    arch="qwen2",
    model_type="qwen2",
    tensors=LLAMA_TENSORS,
    keys=(*SIZES, RMS_EPS),
    config=_qwen2,
    biased=QKV,
    consumed=ROPE_TENSORS,
)
QWEN3 = GgufFamily(
    arch="qwen3",
    model_type="qwen3",
    tensors={**LLAMA_TENSORS, **QK_NORMS},
    keys=(*SIZES, RMS_EPS),
    config=_qwen3,
    biased=QKV | {"blk.{i}.attn_output"},
    consumed=ROPE_TENSORS,
)
OLMO2 = GgufFamily(
    arch="olmo2",
    model_type="olmo2",
    tensors={
        **without(LLAMA_TENSORS, "blk.{i}.attn_norm", "blk.{i}.ffn_norm"),
        **QK_NORMS,
        "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
        "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
    keys=(*SIZES, RMS_EPS),
    config=_olmo2,
    consumed=ROPE_TENSORS,
)
LLAMA_LIKE = (MIXTRAL, MISTRAL, LLAMA, SMOLLM3, GRANITE, QWEN2, QWEN3, OLMO2)
"""Those of one architecture that are told apart by `is_it` come before the one that takes what is left."""
