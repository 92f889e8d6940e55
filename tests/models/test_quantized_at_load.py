"""Models quantized while they are loaded: the logits of the quantized weights, and those of the file converted so."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from stepping import Logits, furthest
from tiny_llama import TINY, changed_copy, golden

from vkdecode.conversion import convert
from vkdecode.errors import ConfigError
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.weights import DType

DOWN = "model.layers.1.mlp.down_proj.weight"
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def prompt_logits(model: Model, name: str) -> Logits:
    with closing(model.new_kv_cache(24)) as kv:
        return model.forward(golden(name).input_ids, kv, "all")


def quantized(name: str, array: NDArray[np.float32], weights: str) -> NDArray[np.float32]:
    """What a tensor's numbers become, by the `gguf` package; the vocabulary's never less than 8 bits."""
    if array.ndim != 2:
        return array
    kind = gguf.GGMLQuantizationType["Q8_0" if name in VOCABULARY else weights.upper()]
    return np.asarray(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind), np.float32)


@pytest.mark.parametrize(
    ("name", "weights", "lanes"),
    [
        ("llama", "q8_0", "subgroup"),
        ("llama", "q4_0", "shared"),
        ("llama-tied-mqa", "q4_0", "subgroup"),
        ("llama-tied-mqa", "q8_0", "shared"),
    ],
)
def test_logits_are_those_of_the_quantized_weights(
    tmp_path: Path, device: Device, shared_device: Device, name: str, weights: str, lanes: str
) -> None:
    where = shared_device if lanes == "shared" else device
    tensors = load_file(TINY / name / "model.safetensors")
    rounded = {key: quantized(key, array, weights) for key, array in tensors.items()}
    with load(TINY / name, device=where, weights=weights) as model:
        held = {spec.dtype for spec in model.weight_specs() if not spec.vector}
        assert held == {DType.Q8_0, DType(weights)}
        assert {spec.dtype for spec in model.weight_specs() if spec.vector} == {DType.F32}
        found = prompt_logits(model, name)
    with load(changed_copy(tmp_path / "rounded", name, tensors=rounded), device=where) as wide:
        assert furthest(found, prompt_logits(wide, name)) <= 1e-4
    # Rounding must show, or the weights were not quantized at all.
    assert furthest(found, golden(name).logits) > 1e-3


@pytest.mark.parametrize(("name", "weights"), [("llama-bias-headdim", "q4_0"), ("phi", "q8_0")])
def test_a_converted_file_holds_the_same_bytes(tmp_path: Path, device: Device, name: str, weights: str) -> None:
    convert(TINY / name, tmp_path / "m.gguf", weights)
    with load(tmp_path / "m.gguf", device=device) as model:
        wanted = prompt_logits(model, name)
        sizes = {spec.names: model.weight_store.nbytes(spec) for spec in model.weight_specs()}
    for path in (TINY / name, tmp_path / "m.gguf"):
        with load(path, device=device, weights=weights) as model:
            assert {spec.names: model.weight_store.nbytes(spec) for spec in model.weight_specs()} == sizes
            np.testing.assert_allclose(prompt_logits(model, name), wanted, rtol=0, atol=1e-5)


def test_rows_that_are_no_whole_blocks_stay_at_16_bits(tmp_path: Path, device: Device) -> None:
    tensors = load_file(TINY / "llama" / "model.safetensors")
    size = 80
    narrow = {
        name: np.ascontiguousarray(array[:, :size] if "down_proj" in name else array[:size])
        if ".mlp." in name
        else array
        for name, array in tensors.items()
    }
    folder = changed_copy(tmp_path / "m", tensors=narrow, config={"intermediate_size": size})
    rounded = {
        name: array.astype(np.float16).astype(np.float32) if "down_proj" in name else quantized(name, array, "q8_0")
        for name, array in narrow.items()
    }
    with load(
        changed_copy(tmp_path / "r", tensors=rounded, config={"intermediate_size": size}), device=device
    ) as model:
        wanted = prompt_logits(model, "llama")
    with load(folder, device=device, weights="q8_0") as model:
        held = {name: spec.dtype for spec in model.weight_specs() for name in spec.names if name is not None}
        assert held[DOWN] is DType.F16
        assert held[DOWN.replace("down", "up")] is DType.Q8_0
        assert furthest(prompt_logits(model, "llama"), wanted) <= 1e-4


def test_a_value_that_no_block_can_hold_is_refused_and_the_memory_given_back(tmp_path: Path, device: Device) -> None:
    tensors = load_file(TINY / "llama" / "model.safetensors")
    for value, words in ((1e8, "beyond the range of q8_0"), (np.nan, "not finite")):
        tensors[DOWN][3, 5] = value
        folder = changed_copy(tmp_path / str(value), tensors=tensors)
        before = device.allocated_bytes
        with pytest.raises(ConfigError, match=f"{DOWN} has values .*{words}"):
            load(folder, device=device, weights="q8_0")
        assert device.allocated_bytes == before
