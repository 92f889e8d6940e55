"""Families with layer norms: GPT-2, GPT-NeoX, StarCoder 2, StableLM 2 and Cohere (`command-r`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkdecode.weights.families.llama_like import common
from vkdecode.weights.families.rope import ROPE_TENSORS, divided_head_dim, rope_config
from vkdecode.weights.families.table import (
    CONTEXT,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    LAYERS,
    LLAMA_TENSORS,
    NORM_EPS,
    QKV,
    SIZES,
    GgufContents,
    GgufFamily,
    Key,
    Layout,
    without,
)

Config = dict[str, Any]
Partial = Mapping[str, Any]
_NORMS = frozenset({"output_norm", "blk.{i}.attn_norm", "blk.{i}.ffn_norm"})
_WINDOW = "attention.sliding_window"


def _gpt2(contents: GgufContents, partial: Partial) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "tie_word_embeddings": contents.tied,
    }


def _gpt_neox(contents: GgufContents, partial: Partial) -> Config:
    size = divided_head_dim(contents, partial)
    rope = rope_config(contents, size)
    share = rope.setdefault("partial_rotary_factor", 1.0)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": contents.meta.flag("use_parallel_residual", True),
        "tie_word_embeddings": contents.tied,
        "rotary_pct": share,
        "rotary_emb_base": rope["rope_theta"],
        **rope,
    }


def _starcoder2(contents: GgufContents, partial: Partial) -> Config:
    window = contents.meta.integer(_WINDOW) if contents.meta.is_set(_WINDOW) else None
    config = common(contents, partial, "Starcoder2ForCausalLM")
    return {**config, "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": window}


def _stablelm(contents: GgufContents, partial: Partial) -> Config:
    rope = rope_config(contents, divided_head_dim(contents, partial))
    rope.setdefault("partial_rotary_factor", 1.0)
    return {
        "architectures": ["StableLmForCausalLM"],
        "hidden_act": "silu",
        "use_qkv_bias": contents.has_module("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "qk_layernorm": contents.has_module("attn_q_norm.weight"),
        "use_parallel_residual": contents.meta.flag("use_parallel_residual", True),
        "tie_word_embeddings": contents.tied,
        **rope,
    }


def _cohere(contents: GgufContents, partial: Partial) -> Config:
    config = common(contents, partial, "CohereForCausalLM")
    return {**config, "attention_bias": False, "use_qk_norm": contents.has_module("attn_q_norm.weight")}


_BLOCK = "transformer.h.{i}"
GPT2 = GgufFamily(
    arch="gpt2",
    model_type="gpt2",
    tensors={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.{i}.attn_norm": f"{_BLOCK}.ln_1",
        "blk.{i}.attn_qkv": f"{_BLOCK}.attn.c_attn",
        "blk.{i}.attn_output": f"{_BLOCK}.attn.c_proj",
        "blk.{i}.ffn_norm": f"{_BLOCK}.ln_2",
        "blk.{i}.ffn_up": f"{_BLOCK}.mlp.c_fc",
        "blk.{i}.ffn_down": f"{_BLOCK}.mlp.c_proj",
    },
    keys=(
        Key("n_embd", HIDDEN.metadata),
        Key("n_inner", FEED_FORWARD.metadata),
        Key("n_layer", LAYERS.metadata),
        Key("n_head", HEADS.metadata),
        Key("n_positions", CONTEXT.metadata),
        Key("layer_norm_epsilon", NORM_EPS.metadata, float),
    ),
    config=_gpt2,
    layouts={
        f"blk.{{i}}.{module}.weight": Layout(transposed=True)
        for module in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    },
    biased=_NORMS | {"blk.{i}.attn_qkv", "blk.{i}.attn_output", "blk.{i}.ffn_up", "blk.{i}.ffn_down"},
)
_NEOX = "gpt_neox.layers.{i}"
GPT_NEOX = GgufFamily(
    arch="gptneox",
    model_type="gpt_neox",
    tensors={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "blk.{i}.attn_norm": f"{_NEOX}.input_layernorm",
        "blk.{i}.attn_qkv": f"{_NEOX}.attention.query_key_value",
        "blk.{i}.attn_output": f"{_NEOX}.attention.dense",
        "blk.{i}.ffn_norm": f"{_NEOX}.post_attention_layernorm",
        "blk.{i}.ffn_up": f"{_NEOX}.mlp.dense_h_to_4h",
        "blk.{i}.ffn_down": f"{_NEOX}.mlp.dense_4h_to_h",
    },
    keys=(HIDDEN, FEED_FORWARD, LAYERS, CONTEXT, HEADS, NORM_EPS),
    config=_gpt_neox,
    layouts={"blk.{i}.attn_qkv": Layout(grouped="num_attention_heads")},
    biased=_NORMS | {"blk.{i}.attn_qkv", "blk.{i}.attn_output", "blk.{i}.ffn_up", "blk.{i}.ffn_down"},
    consumed=ROPE_TENSORS,
)
STARCODER2 = GgufFamily(
    arch="starcoder2",
    model_type="starcoder2",
    tensors={
        **without(LLAMA_TENSORS, "blk.{i}.ffn_gate"),
        "blk.{i}.ffn_up": "model.layers.{i}.mlp.c_fc",
        "blk.{i}.ffn_down": "model.layers.{i}.mlp.c_proj",
    },
    keys=(*SIZES, Key("norm_epsilon", NORM_EPS.metadata, float)),
    config=_starcoder2,
    biased=QKV | _NORMS | {"blk.{i}.attn_output", "blk.{i}.ffn_up", "blk.{i}.ffn_down"},
    consumed=ROPE_TENSORS,
)
STABLELM = GgufFamily(
    arch="stablelm",
    model_type="stablelm",
    tensors={
        **LLAMA_TENSORS,
        "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_layernorm.norms.{e}",
        "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_layernorm.norms.{e}",
    },
    keys=(*SIZES, NORM_EPS),
    config=_stablelm,
    layouts={
        "blk.{i}.attn_q_norm": Layout(stacked="num_attention_heads"),
        "blk.{i}.attn_k_norm": Layout(stacked="num_key_value_heads"),
    },
    biased=QKV | _NORMS,
    consumed=ROPE_TENSORS,
)
COHERE = GgufFamily(
    arch="command-r",
    model_type="cohere",
    tensors={
        **without(LLAMA_TENSORS, "blk.{i}.ffn_norm", "output"),
        "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
        "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    },
    keys=(*SIZES, NORM_EPS, Key("logit_scale", "logit_scale", float)),
    config=_cohere,
    consumed=ROPE_TENSORS,
)
LAYER_NORMED = (GPT2, GPT_NEOX, STARCODER2, STABLELM, COHERE)
