"""Phi 1.5 and 2 (`phi2` in GGUF files), and Phi 3, 3.5 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkdecode.weights.families.rope import ROPE_TENSORS, divided_head_dim, rope_config
from vkdecode.weights.families.table import (
    LLAMA_TENSORS,
    NORM_EPS,
    QKV,
    RMS_EPS,
    SIZES,
    GgufContents,
    GgufFamily,
    without,
)


def _phi(contents: GgufContents, partial: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["PhiForCausalLM"],
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
        "tie_word_embeddings": contents.tied,
        "partial_rotary_factor": 1.0,
        **rope_config(contents, divided_head_dim(contents, partial)),
    }


def _phi3(contents: GgufContents, partial: Mapping[str, Any]) -> dict[str, Any]:
    """A window of 0 stands for none."""
    meta = contents.meta
    config = rope_config(contents, divided_head_dim(contents, partial))
    original = meta.integer("rope.scaling.original_context_length", partial["max_position_embeddings"])
    return {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "original_max_position_embeddings": original,
        "sliding_window": meta.integer("attention.sliding_window") if meta.is_set("attention.sliding_window") else None,
        "tie_word_embeddings": contents.tied,
        **config,
    }


_ATTENTION = "model.layers.{i}.self_attn"
PHI = GgufFamily(
    arch="phi2",
    model_type="phi",
    tensors={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.final_layernorm",
        "output": "lm_head",
        "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
        "blk.{i}.attn_q": f"{_ATTENTION}.q_proj",
        "blk.{i}.attn_k": f"{_ATTENTION}.k_proj",
        "blk.{i}.attn_v": f"{_ATTENTION}.v_proj",
        "blk.{i}.attn_output": f"{_ATTENTION}.dense",
        "blk.{i}.ffn_up": "model.layers.{i}.mlp.fc1",
        "blk.{i}.ffn_down": "model.layers.{i}.mlp.fc2",
    },
    keys=(*SIZES, NORM_EPS),
    config=_phi,
    biased=QKV
    | {"output_norm", "output", "blk.{i}.attn_norm", "blk.{i}.attn_output", "blk.{i}.ffn_up", "blk.{i}.ffn_down"},
    consumed=ROPE_TENSORS,
)
PHI3 = GgufFamily(
    arch="phi3",
    model_type="phi3",
    tensors={
        **without(LLAMA_TENSORS, *QKV, "blk.{i}.ffn_gate"),
        "blk.{i}.attn_qkv": f"{_ATTENTION}.qkv_proj",
        "blk.{i}.ffn_up": "model.layers.{i}.mlp.gate_up_proj",
    },
    keys=(*SIZES, RMS_EPS),
    config=_phi3,
    consumed=ROPE_TENSORS,
)
PHIS = (PHI, PHI3)
