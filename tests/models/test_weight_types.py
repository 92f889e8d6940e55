"""How weights are held: as the file has them or as asked, refused where they do not fit, and given back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from model_files import convert_tiny
from numpy.typing import DTypeLike
from safetensors import safe_open
from safetensors.numpy import load_file
from stepping import Logits, furthest
from tiny_llama import NAMES, TINY, changed_copy, golden

from vkdecode.errors import ConfigError, InvalidInputError, VkDecodeWarning
from vkdecode.gpu import Device, list_devices
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.weights import DType

TinyModels = Callable[..., Model]
NUMPY: dict[str, DTypeLike] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def prompt_logits(model: Model, name: str) -> Logits:
    with closing(model.new_kv_cache(24)) as kv:
        return model.forward(golden(name).input_ids, kv, "all")


@pytest.mark.parametrize("lanes", ["subgroup", "shared"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_weights_held_at_16_bits_are_the_rounded_ones(
    tmp_path: Path, tiny_models: TinyModels, device: Device, shared_device: Device, dtype: str, lanes: str
) -> None:
    where = shared_device if lanes == "shared" else device
    tensors = load_file(TINY / "llama" / "model.safetensors")
    rounded = {
        name: array.astype(NUMPY[dtype]).astype(np.float32) if array.ndim == 2 else array
        for name, array in tensors.items()
    }
    narrow = tiny_models("llama", where, dtype)
    with load(changed_copy(tmp_path / "rounded", tensors=rounded), device=where) as wide:
        assert furthest(prompt_logits(narrow, "llama"), prompt_logits(wide, "llama")) <= 1e-4
    # Rounding must show, or the weights were not held at 16 bits at all.
    assert furthest(prompt_logits(narrow, "llama"), golden("llama").logits) > 1e-3


def test_weights_take_the_memory_of_their_type(device: Device) -> None:
    sizes = {}
    for dtype in ("f32", "f16", "bf16", None):
        before = device.allocated_bytes
        with load(TINY / "llama", device=device, weights=dtype):
            sizes[dtype] = device.allocated_bytes - before
    vectors = 5 * 64 * 4
    assert sizes["f16"] == sizes["bf16"]
    assert sizes[None] == sizes["f32"]
    assert sizes["f32"] - vectors == pytest.approx(2 * (sizes["f16"] - vectors), rel=0.02)


@pytest.mark.parametrize(("name", "held"), [("llama", DType.F32), ("llama-rope-llama3", DType.BF16)])
def test_weights_are_held_as_the_file_has_them(tiny_models: TinyModels, device: Device, name: str, held: DType) -> None:
    specs = tiny_models(name, device).weight_specs()
    assert {spec.dtype for spec in specs if not spec.vector} == {held}
    assert {spec.dtype for spec in specs if spec.vector} == {DType.F32}


def test_bf16_weights_widened_to_f32_stay_the_same(tiny_models: TinyModels, device: Device) -> None:
    name = "llama-rope-llama3"
    wide, narrow = (prompt_logits(tiny_models(name, device, dtype), name) for dtype in ("f32", None))
    assert furthest(wide, narrow) <= 1e-4


def test_a_value_beyond_the_asked_type_is_refused_and_the_memory_given_back(tmp_path: Path, device: Device) -> None:
    tensors = load_file(TINY / "llama" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = 70000.0
    folder = changed_copy(tmp_path / "large", tensors=tensors)
    before = device.allocated_bytes
    with pytest.raises(ConfigError, match=f"{name} holds values beyond the range of f16.*bf16") as caught:
        load(folder, device=device, weights="f16")
    # While the error is still held, and with it everything that its traceback reaches.
    assert caught.tb is not None
    assert device.allocated_bytes == before
    for dtype in ("bf16", "f32", None):
        with load(folder, device=device, weights=dtype) as model:
            assert np.isfinite(prompt_logits(model, "llama")).all()


@pytest.mark.parametrize("weights", ["int3", "F16", "", "u32"])
def test_an_unknown_type_is_refused_with_those_there_are(device: Device, weights: str) -> None:
    before = device.allocated_bytes
    with pytest.raises(InvalidInputError, match=r"weights must be one of .*'bf16'.*'f16'.*'f32'"):
        load(TINY / "llama", device=device, weights=weights)
    assert device.allocated_bytes == before


@pytest.mark.parametrize("name", ["llama", "llama-tied-mqa"])
def test_a_gguf_file_is_the_folder_it_was_made_from(
    tmp_path: Path, tiny_models: TinyModels, device: Device, name: str
) -> None:
    with load(convert_tiny(tmp_path / f"{name}.gguf", TINY / name), device=device) as model:
        # A GGUF file holds the epsilon as float32.
        config, original = asdict(model.config), asdict(tiny_models(name, device).config)
        assert config.pop("rms_norm_eps") == pytest.approx(original.pop("rms_norm_eps"))
        assert config == original
        assert furthest(prompt_logits(model, name), golden(name).logits) <= 1e-4


def test_progress_ends_with_all_bytes(device: Device) -> None:
    seen: list[tuple[int, int]] = []
    before = device.allocated_bytes
    with load(TINY / "llama", device=device, progress=lambda done, total: seen.append((done, total))):
        taken = device.allocated_bytes - before
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {taken}
    assert seen[-1][0] == taken


def test_a_device_opened_for_a_model_is_closed_with_it() -> None:
    with load(TINY / "llama", device=0) as model:
        assert not model.device.closed
    assert model.device.closed


def test_the_best_device_is_taken_and_a_cpu_driver_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VKDECODE_DEVICE", raising=False)
    with warnings.catch_warnings(record=True) as caught, load(TINY / "llama") as model:
        kind = model.device.info.kind
    assert model.device.closed
    texts = [str(one.message) for one in caught if issubclass(one.category, VkDecodeWarning)]
    assert len(texts) == (kind == "cpu")
    assert all(f"using the CPU driver {model.device.info.name}" in text for text in texts)
    assert (kind == "cpu") is all(one.kind == "cpu" for one in list_devices())


def test_a_device_opened_for_a_model_that_fails_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed_copy(tmp_path / "incomplete", tensors={"lm_head.weight": None})
    opened: list[Device] = []
    open_it = Device.__init__

    def recording(self: Device, ordinal: int, lanes: str = "auto") -> None:
        opened.append(self)
        open_it(self, ordinal, lanes)

    monkeypatch.setattr(Device, "__init__", recording)
    with pytest.raises(ConfigError):
        load(folder, device=0)
    (one,) = opened
    assert one.closed


def test_a_device_that_was_given_stays_open(device: Device) -> None:
    with load(TINY / "llama", device=device):
        pass
    assert not device.closed


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_of_a_checkpoint_is_left_out(tiny_models: TinyModels, device: Device, name: str) -> None:
    stored: set[str] = set()
    for file in (TINY / name).glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            stored |= set(opened.keys())
    model = tiny_models(name, device)
    used = {part for spec in model.weight_specs() for part in spec.names if part}
    assert used == stored
