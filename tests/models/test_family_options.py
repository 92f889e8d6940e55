"""Options of families that no checkpoint of the references uses, against the formulas in float64 numpy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from stepping import furthest, one_by_one, run, token_ids
from tiny_llama import changed_copy

from vkdecode.decode import InferenceContext
from vkdecode.doctor.references import attention, layer_norm, rotate, silu
from vkdecode.gpu import Device
from vkdecode.graph import FUSIONS
from vkdecode.loading import load

F64 = NDArray[np.float64]
Tensors = dict[str, F64]
TOKENS, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EPSILON = 20, 4, 2, 16, 2, 1e-5


def angles(dims: int) -> tuple[F64, F64]:
    turned = np.arange(TOKENS)[:, None] * 10000.0 ** (-np.arange(0, dims, 2) / dims)
    return np.cos(turned), np.sin(turned)


def interleaved(x: F64) -> F64:
    """Turn the pairs (2i, 2i + 1) of each head."""
    cos, sin = (one[:, None] for one in angles(HEAD_DIM))
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
    return out


def quarter(x: F64) -> F64:
    """Turn the first quarter of each head, halves of it as pairs."""
    return rotate(x, *angles(HEAD_DIM // 4))


def logits(t: Tensors, ids: list[int], turn: Callable[[F64], F64], head_norm: str | None, parallel: bool) -> F64:
    """A decoder with layer norms and gated MLPs; `head_norm` is how the norms of q and k heads are named, if any."""

    def norm(x: F64, name: str) -> F64:
        return layer_norm(x, t[f"{name}.weight"], t.get(f"{name}.bias", np.zeros(1)), EPSILON)

    def heads(x: F64, name: str, which: str) -> F64:
        made = x @ t[f"{name}.{which}_proj.weight"].T + t.get(f"{name}.{which}_proj.bias", np.zeros(1))
        parts = made.reshape(TOKENS, -1, HEAD_DIM)
        if head_norm and which != "v":
            name = f"{name}.{which}_{head_norm}"
            weight = t.get(f"{name}.weight")
            if weight is None:
                weight = np.stack([t[f"{name}.norms.{head}.weight"] for head in range(parts.shape[1])])
            parts = layer_norm(parts, weight, 0.0, EPSILON)
        return parts if which == "v" else turn(parts)

    x = t["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (heads(h, f"{name}.self_attn", which) for which in "qkv")
        mixed = attention(q, k, v, HEAD_DIM**-0.5)
        x = x + mixed.reshape(TOKENS, -1) @ t[f"{name}.self_attn.o_proj.weight"].T
        if not parallel:
            h = norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (t[f"{name}.mlp.{which}_proj.weight"].T for which in ("gate", "up", "down"))
        x = x + (silu(h @ gate) * (h @ up)) @ down
    return norm(x, "model.norm") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T


def check(folder: Path, device: Device, factor: float, **how: Any) -> None:
    tensors = {name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()}
    for fusions in (FUSIONS, ()):
        with (
            load(folder, device=device) as model,
            InferenceContext(device, fusions=fusions) as context,
            closing(model.new_kv_cache(TOKENS)) as kv,
        ):
            ids = list(token_ids(TOKENS, model.vocab_size))
            prompt = run(model, ids[:12], kv, context, logits="all")
            decoded = one_by_one(model, ids[12:], kv, context)
        expected = (logits(tensors, ids, **how) * factor).astype(np.float32)
        assert furthest(np.concatenate([prompt, decoded]), expected) < 1e-4


def weights(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).uniform(0.3, 1.7, shape).astype(np.float32)


def test_cohere_normalizes_heads_before_it_turns_them(tmp_path: Path, device: Device) -> None:
    norms = {
        f"model.layers.{layer}.self_attn.{which}_norm.weight": weights(heads, HEAD_DIM)
        for layer in range(LAYERS)
        for which, heads in (("q", HEADS), ("k", KV_HEADS))
    }
    folder = changed_copy(tmp_path / "m", "cohere", {"use_qk_norm": True}, norms)
    check(folder, device, 0.25, turn=interleaved, head_norm="norm", parallel=True)


def test_cohere_may_have_biases(tmp_path: Path, device: Device) -> None:
    biases = {
        f"model.layers.{layer}.self_attn.{which}_proj.bias": weights(size) - 1
        for layer in range(LAYERS)
        for which, size in (("q", 64), ("k", 32), ("v", 32))
    }
    zeros = {f"model.layers.{layer}.self_attn.o_proj.bias": np.zeros(64, np.float32) for layer in range(LAYERS)}
    folder = changed_copy(tmp_path / "m", "cohere", {"attention_bias": True}, {**biases, **zeros})
    check(folder, device, 0.25, turn=interleaved, head_norm=None, parallel=True)


@pytest.mark.parametrize(("parallel", "normed"), [(True, False), (False, True), (True, True)])
def test_stablelm_by_choice_normalizes_heads_and_runs_blocks_side_by_side(
    tmp_path: Path, device: Device, parallel: bool, normed: bool
) -> None:
    changes: dict[str, Any] = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        if parallel:
            changes |= {f"{name}.post_attention_layernorm.{part}": None for part in ("weight", "bias")}
        for which, heads in (("q", HEADS), ("k", KV_HEADS)) if normed else ():
            for head, values in enumerate(weights(heads, HEAD_DIM)):
                changes[f"{name}.self_attn.{which}_layernorm.norms.{head}.weight"] = values
    config = {"use_parallel_residual": parallel, "qk_layernorm": normed}
    folder = changed_copy(tmp_path / "m", "stablelm", config, changes)
    check(folder, device, 1.0, turn=quarter, head_norm="layernorm" if normed else None, parallel=parallel)
