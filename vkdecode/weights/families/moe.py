"""Routed experts: Qwen 2 and 3 MoE, and gpt-oss; Mixtral shares Llama's architecture and is in `llama_like`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkdecode.weights.families.gemma import layer_types
from vkdecode.weights.families.llama_like import check_gating, common
from vkdecode.weights.families.rope import ROPE_TENSORS
from vkdecode.weights.families.table import (
    LLAMA_TENSORS,
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

_DENSE = ("blk.{i}.ffn_gate", "blk.{i}.ffn_up", "blk.{i}.ffn_down")
_MLP = "model.layers.{i}.mlp"
_EXPERTS: Mapping[str, str] = {
    "blk.{i}.ffn_gate_inp": f"{_MLP}.gate",
    "blk.{i}.ffn_gate_exps": f"{_MLP}.experts.{{e}}.gate_proj",
    "blk.{i}.ffn_up_exps": f"{_MLP}.experts.{{e}}.up_proj",
    "blk.{i}.ffn_down_exps": f"{_MLP}.experts.{{e}}.down_proj",
}
_STACKS = {f"blk.{{i}}.ffn_{part}_exps": Layout(stacked="num_experts") for part in ("gate", "up", "down")}
_PER_TOKEN = Key("num_experts_per_tok", "expert_used_count")
_QWEN_KEYS = (
    *SIZES,
    RMS_EPS,
    Key("num_experts", "expert_count"),
    _PER_TOKEN,
    Key("moe_intermediate_size", "expert_feed_forward_length"),
)


def _qwen(contents: GgufContents, partial: Mapping[str, Any], architecture: str, normalizes: bool) -> dict[str, Any]:
    """Every layer has experts; whether the chosen weights are made to sum to 1 files rarely say."""
    check_gating(contents, expected=1)
    return {
        **common(contents, partial, architecture),
        "norm_topk_prob": contents.meta.flag("expert_weights_norm", normalizes),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen2_moe(contents: GgufContents, partial: Mapping[str, Any]) -> dict[str, Any]:
    return {**_qwen(contents, partial, "Qwen2MoeForCausalLM", normalizes=False), "qkv_bias": True}


def _qwen3_moe(contents: GgufContents, partial: Mapping[str, Any]) -> dict[str, Any]:
    bias = contents.has_module("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
    return {
        **_qwen(contents, partial, "Qwen3MoeForCausalLM", normalizes=True),
        "attention_bias": bias,
        "num_local_experts": partial["num_experts"],  # newer configs say it so
    }


def _gpt_oss(contents: GgufContents, partial: Mapping[str, Any]) -> dict[str, Any]:
    """The clamp of its activation, and YaRN's corners without rounding, are the released models'; files have no key."""
    check_gating(contents, expected=3)
    config = common(contents, partial, "GptOssForCausalLM")
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"]["truncate"] = False
    return {
        **config,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": contents.meta.integer("attention.sliding_window"),
        "layer_types": layer_types(contents, partial["num_hidden_layers"], pattern=2),
    }


QWEN2_MOE = GgufFamily(
    arch="qwen2moe",
    model_type="qwen2_moe",
    tensors={
        **without(LLAMA_TENSORS, *_DENSE),
        **_EXPERTS,
        "blk.{i}.ffn_gate_inp_shexp": f"{_MLP}.shared_expert_gate",
        "blk.{i}.ffn_gate_shexp": f"{_MLP}.shared_expert.gate_proj",
        "blk.{i}.ffn_up_shexp": f"{_MLP}.shared_expert.up_proj",
        "blk.{i}.ffn_down_shexp": f"{_MLP}.shared_expert.down_proj",
    },
    keys=(*_QWEN_KEYS, Key("shared_expert_intermediate_size", "expert_shared_feed_forward_length")),
    config=_qwen2_moe,
    layouts={**_STACKS, "blk.{i}.ffn_gate_inp_shexp": Layout(row_vector=True)},
    biased=QKV,
    consumed=ROPE_TENSORS,
)
QWEN3_MOE = GgufFamily(
    arch="qwen3moe",
    model_type="qwen3_moe",
    tensors={**without(LLAMA_TENSORS, *_DENSE), **_EXPERTS, **QK_NORMS},
    keys=_QWEN_KEYS,
    config=_qwen3_moe,
    layouts=_STACKS,
    biased=QKV | {"blk.{i}.attn_output"},
    consumed=ROPE_TENSORS,
)
_GATE_UP = f"{_MLP}.experts.gate_up_proj"
_DOWN = f"{_MLP}.experts.down_proj"
GPT_OSS = GgufFamily(
    arch="gpt-oss",
    model_type="gpt_oss",
    tensors={
        **without(LLAMA_TENSORS, *_DENSE, "blk.{i}.ffn_norm"),
        "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
        "blk.{i}.attn_sinks.weight": "model.layers.{i}.self_attn.sinks",
        "blk.{i}.ffn_gate_inp": f"{_MLP}.router",
        "blk.{i}.ffn_gate_exps.weight": _GATE_UP,
        "blk.{i}.ffn_up_exps.weight": _GATE_UP,
        "blk.{i}.ffn_down_exps.weight": _DOWN,
        "blk.{i}.ffn_gate_exps.bias": f"{_GATE_UP}_bias",
        "blk.{i}.ffn_up_exps.bias": f"{_GATE_UP}_bias",
        "blk.{i}.ffn_down_exps.bias": f"{_DOWN}_bias",
    },
    keys=(*SIZES, RMS_EPS, Key("num_local_experts", "expert_count"), _PER_TOKEN),
    config=_gpt_oss,
    layouts={
        "blk.{i}.ffn_gate_exps.weight": Layout(transposed=True, part=0, parts=2),
        "blk.{i}.ffn_up_exps.weight": Layout(transposed=True, part=1, parts=2),
        "blk.{i}.ffn_down_exps.weight": Layout(transposed=True),
        "blk.{i}.ffn_gate_exps.bias": Layout(part=0, parts=2),
        "blk.{i}.ffn_up_exps.bias": Layout(part=1, parts=2),
    },
    biased=QKV | {"blk.{i}.attn_output", "blk.{i}.ffn_gate_inp"},
    consumed=ROPE_TENSORS,
)
MIXTURES = (QWEN2_MOE, QWEN3_MOE, GPT_OSS)
