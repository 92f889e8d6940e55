"""Head sizes that models have, with f32 and f16 caches, and activations far above what half precision could hold."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from stepping import Logits, furthest, one_by_one, run, token_ids
from tiny_llama import TINY, changed_copy, golden

from vkdecode.decode import InferenceContext
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

F16_KV = 2e-2
POSITIONS = 48


def with_head_dim(folder: Path, head_dim: int) -> Path:
    """Tiny Llama with random attention weights for heads of this size; q and k so large that attention is peaked."""
    rng = np.random.default_rng(head_dim)
    tensors: dict[str, NDArray[np.float32] | None] = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        for name, rows, columns, scale in (
            ("q_proj", 4 * head_dim, 64, 2.0),
            ("k_proj", 2 * head_dim, 64, 2.0),
            ("v_proj", 2 * head_dim, 64, 0.8),
            ("o_proj", 64, 4 * head_dim, 0.8),
        ):
            weight = rng.standard_normal((rows, columns), np.float32) * scale / columns**0.5
            tensors[f"{prefix}.{name}.weight"] = weight.astype(np.float32)
    return changed_copy(folder, config={"head_dim": head_dim}, tensors=tensors)


def decoded(model: Model, kv_dtype: str) -> tuple[Logits, int]:
    """Logits of 48 positions, half of them as a prompt, and the bytes of the cache."""
    ids = token_ids(POSITIONS, model.vocab_size)
    with closing(model.new_kv_cache(POSITIONS, kv_dtype)) as kv, InferenceContext(model.device) as context:
        prompt = run(model, ids[:24], kv, context, logits="all")
        rest = one_by_one(model, ids[24:], kv, context)
        nbytes = sum(layer.k.nbytes + layer.v.nbytes for layer in kv.layers)
    return np.concatenate([prompt, rest]), nbytes


# The shared form reads a head's rows in one way, whatever its size.
@pytest.mark.parametrize(
    ("lanes", "head_dim"),
    [*(("subgroup", size) for size in (32, 64, 80, 96, 128, 256)), ("shared", 80), ("shared", 128)],
)
def test_an_f16_cache_takes_half_and_stays_close(tmp_path: Path, head_dim: int, lanes: str) -> None:
    with Device(0, lanes=lanes) as device, load(with_head_dim(tmp_path / "m", head_dim), device=device) as model:
        whole, nbytes = decoded(model, "f32")
        half, half_bytes = decoded(model, "f16")
    assert half_bytes * 2 == nbytes
    assert 0 < furthest(whole, half) < F16_KV


def test_both_kernel_forms_agree_on_every_head_size(tmp_path: Path, device: Device, shared_device: Device) -> None:
    for head_dim in (32, 80, 256):
        folder = with_head_dim(tmp_path / str(head_dim), head_dim)
        with load(folder, device=device) as one, load(folder, device=shared_device) as other:
            assert furthest(decoded(one, "f32")[0], decoded(other, "f32")[0]) < 1e-4


@pytest.mark.parametrize("lanes", ["subgroup", "shared"])
@pytest.mark.parametrize("factor", [3e5, 1e6])
def test_activations_of_a_hundred_thousand_stay_exact(tmp_path: Path, factor: float, lanes: str) -> None:
    """A model whose residual stream is scaled, by its embedding and what is added to it, has the same logits."""
    held = load_file(TINY / "llama" / "model.safetensors")
    scaled: dict[str, NDArray[np.float32] | None] = {
        name: value * np.float32(factor)
        for name, value in held.items()
        if "embed_tokens" in name or "o_proj" in name or "down_proj" in name
    }
    embedding = scaled["model.embed_tokens.weight"]
    assert embedding is not None
    assert np.abs(embedding).max() > 7e4
    expected = golden("llama")
    # The norm's epsilon is added to the mean square, which is scaled by the factor squared.
    folder = changed_copy(tmp_path / "m", config={"rms_norm_eps": 1e-5 * factor**2}, tensors=scaled)
    with (
        Device(0, lanes=lanes) as device,
        load(folder, device=device) as model,
        closing(model.new_kv_cache(POSITIONS)) as kv,
        InferenceContext(device) as context,
    ):
        prompt = run(model, expected.input_ids, kv, context, logits="all")
        rest = one_by_one(model, expected.decode_ids[:4], kv, context)
    assert furthest(prompt, expected.logits) < 2e-3
    assert furthest(rest, expected.decode_logits[:4]) < 2e-3
