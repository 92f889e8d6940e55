"""Bad input end to end: one VkDecodeError, on the command line one line and exit code 1, and the process goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import convert_tiny
from stepping import furthest
from tiny_llama import TINY, changed_copy, golden

from vkdecode.errors import (
    ConfigError,
    ContextLengthError,
    DeviceError,
    InvalidInputError,
    ModelFileError,
    UnsupportedModelError,
    VkDecodeError,
)
from vkdecode.gpu import Device, list_devices
from vkdecode.loading import load
from vkdecode.models import Model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


def nothing_there(folder: Path) -> Path:
    return folder / "absent"


def empty_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def broken_json(folder: Path) -> Path:
    changed_copy(folder)
    (folder / "config.json").write_text('{"model_type": "llama",', encoding="utf-8")
    return folder


def truncated_safetensors(folder: Path) -> Path:
    changed_copy(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def truncated_gguf(folder: Path) -> Path:
    folder.mkdir()
    path = convert_tiny(folder / "model.gguf", TINY / "llama")
    path.write_bytes(path.read_bytes()[:-100])
    return path


def with_config(**values: Any) -> Callable[[Path], Path]:
    return lambda folder: changed_copy(folder, config=values)


def with_tensors(tensors: Mapping[str, Any]) -> Callable[[Path], Path]:
    return lambda folder: changed_copy(folder, tensors=tensors)


BIAS = {"model.layers.1.self_attn.o_proj.bias": np.zeros(64, np.float32)}
FILES: dict[str, tuple[Callable[[Path], Path], type[VkDecodeError], str]] = {
    "absent": (nothing_there, ModelFileError, "absent"),
    "empty folder": (empty_folder, ModelFileError, "config.json"),
    "broken json": (broken_json, ModelFileError, "config.json"),
    "truncated safetensors": (truncated_safetensors, ModelFileError, "model.safetensors"),
    "truncated gguf": (truncated_gguf, ModelFileError, "model.gguf"),
    "unknown architecture": (with_config(model_type="mamba"), UnsupportedModelError, "'mamba'"),
    "unknown rope": (with_config(rope_parameters={"rope_type": "spiral"}), UnsupportedModelError, "'spiral'"),
    "missing tensor": (with_tensors({HEAD: None}), ConfigError, HEAD),
    "mis-shaped tensor": (with_tensors({Q_PROJ: np.zeros((64, 32), np.float32)}), ConfigError, Q_PROJ),
    "integer tensor": (with_tensors({HEAD: np.zeros((160, 64), np.int32)}), VkDecodeError, HEAD),
    "bias that the config denies": (with_tensors(BIAS), ConfigError, "o_proj.bias"),
    "bias that is not there": (with_config(mlp_bias=True), ConfigError, "gate_proj.bias"),
    "heads": (with_config(num_key_value_heads=3), ConfigError, "num_key_value_heads 3"),
    "hidden size": (with_config(hidden_size=32), ConfigError, "[160, 32]"),
    "too many layers": (with_config(num_hidden_layers=3), ConfigError, "layer"),
    "too few layers": (with_config(num_hidden_layers=1), ConfigError, "layer"),
    "absurdly many layers": (with_config(num_hidden_layers=2**30), ConfigError, "layer"),
    "type of a value": (with_config(vocab_size="160"), ConfigError, "vocab_size"),
}
CALLS: dict[str, tuple[list[str], str]] = {
    "ordinal": (["--device", "99", "--token-ids", "1"], "'99'"),
    "token id": (["--token-ids", "1,160"], "160"),
    "no token": (["--token-ids", ","], "empty"),
    "no tokenizer": (["--prompt", "x"], "token ids"),
    "prompt too long": (["--token-ids", "1 2 3 4 5", "--max-seq-len", "4"], "5 tokens"),
    "weights": (["--token-ids", "1", "--weights", "int3"], "int3"),
}


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    held = {**os.environ, **environment}
    held.pop("VKDECODE_DEVICE", None)
    return subprocess.run(
        [sys.executable, "-m", "vkdecode", *args], capture_output=True, text=True, env=held, timeout=120
    )


def check_refused(done: subprocess.CompletedProcess[str], text: str) -> None:
    """One line on standard error, nothing else, exit code 1."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("vkdecode: error: ")
    assert text in line


@pytest.fixture
def still_works(device: Device, llama: Model) -> Callable[[], None]:
    """A check that the device and its models are as good as before, and that nothing was kept."""
    before = device.allocated_bytes

    def check() -> None:
        assert device.allocated_bytes == before
        reference = golden("llama")
        with closing(llama.new_kv_cache(24)) as kv:
            assert furthest(llama.forward(reference.input_ids, kv, "all"), reference.logits) <= 1e-4

    return check


@pytest.mark.parametrize("case", FILES)
def test_bad_files_give_one_error_and_leave_the_process_usable(
    tmp_path: Path, device: Device, still_works: Callable[[], None], case: str
) -> None:
    build, error, text = FILES[case]
    path = build(tmp_path / "model")
    with pytest.raises(error) as caught:
        load(path, device=device)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    still_works()


@pytest.mark.parametrize(
    "case",
    [
        "absent",
        "truncated safetensors",
        "truncated gguf",
        "unknown architecture",
        "missing tensor",
        "mis-shaped tensor",
        "heads",
    ],
)
def test_bad_files_give_one_line_on_the_command_line(tmp_path: Path, case: str) -> None:
    build, _, text = FILES[case]
    check_refused(command("generate", str(build(tmp_path / "model")), "--device", "0", "--prompt", "x"), text)


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls_give_one_line_on_the_command_line(case: str) -> None:
    args, text = CALLS[case]
    chosen = [] if "--device" in args else ["--device", "0"]
    check_refused(command("generate", str(TINY / "llama"), *chosen, *args), text)


def test_a_good_call_works_on_the_command_line() -> None:
    done = command("generate", str(TINY / "llama"), "--device", "0", "--token-ids", "1 2 3", "--max-tokens", "4")
    assert (done.returncode, len(done.stdout.split())) == (0, 4)


@pytest.mark.parametrize("variable", ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"])
def test_no_driver(variable: str) -> None:
    cleared = {"VK_DRIVER_FILES": "", "VK_ICD_FILENAMES": "", variable: "/nonexistent.json"}
    for args in (["generate", str(TINY / "llama"), "--prompt", "x"], ["devices"]):
        check_refused(command(*args, **cleared), "driver")


def test_no_driver_now_does_not_mean_never(monkeypatch: pytest.MonkeyPatch, still_works: Callable[[], None]) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("VK_DRIVER_FILES", "/nonexistent.json")
        for opening in (lambda: Device(0), lambda: load(TINY / "llama")):
            with pytest.raises(DeviceError, match="driver"):
                opening()
    assert list_devices()
    with Device(0):
        pass
    still_works()


def test_no_loader(tmp_path: Path) -> None:
    # A library of this name that is none hides the real one from the dynamic linker.
    (tmp_path / "libvulkan.so.1").write_text("This is not a shared library.\n", encoding="utf-8")
    for args in (["generate", str(TINY / "llama"), "--prompt", "x"], ["devices"]):
        check_refused(command(*args, LD_LIBRARY_PATH=str(tmp_path)), "no Vulkan loader")


@pytest.mark.parametrize("ordinal", [-1, 99, True, "0", 0.0, None])
def test_an_ordinal_out_of_range_is_refused_with_the_devices_there_are(ordinal: Any) -> None:
    with pytest.raises(DeviceError, match=f"ordinal {ordinal}; devices: 0: "):
        Device(ordinal)


@pytest.mark.parametrize(
    "ids", [[], [160], [-1], [1, 2, 160], [1.0], [[1]], 3, ["1"], [None], [2**40], [True], np.zeros((2, 2), int)]
)
def test_bad_token_ids_are_refused_before_anything_runs(llama: Model, ids: Any) -> None:
    with closing(llama.new_kv_cache(8)) as kv:
        with pytest.raises(InvalidInputError, match="token"):
            llama.forward(ids, kv)
        assert kv.cached_len == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_token_ids_of_any_integer_type_are_taken(llama: Model, dtype: Any) -> None:
    ids = golden("llama").input_ids
    with closing(llama.new_kv_cache(24)) as kv:
        assert furthest(llama.forward(ids.astype(dtype), kv, "all"), golden("llama").logits) <= 1e-4


def test_a_prompt_longer_than_the_context_names_both_lengths_and_computes_nothing(llama: Model) -> None:
    with closing(llama.new_kv_cache(10)) as kv:
        llama.forward([1, 2, 3, 4], kv)
        before = llama.device.allocated_bytes
        with pytest.raises(ContextLengthError, match="7 tokens after 4 cached ones exceed the context of 10"):
            llama.forward([1] * 7, kv)
        assert kv.cached_len == 4
        assert llama.device.allocated_bytes == before
        llama.forward([1] * 6, kv)
        with pytest.raises(ContextLengthError, match=r"1 tokens after 10 .* 10"):
            llama.forward([1], kv)


@pytest.mark.parametrize(
    ("length", "dtype"), [(0, "f32"), (-1, "f32"), (True, "f32"), (8.0, "f32"), (8, "bf16"), (8, "")]
)
def test_an_impossible_cache_is_refused(llama: Model, length: Any, dtype: str) -> None:
    before = llama.device.allocated_bytes
    with pytest.raises(InvalidInputError):
        llama.new_kv_cache(length, dtype)
    assert llama.device.allocated_bytes == before


def test_a_cache_larger_than_the_device_allows_is_refused(llama: Model) -> None:
    before = llama.device.allocated_bytes
    with pytest.raises(DeviceError, match="bytes"):
        llama.new_kv_cache(2**40)
    assert llama.device.allocated_bytes == before


@pytest.mark.parametrize("logits", ["first", "", None, "ALL"])
def test_only_known_logits_can_be_asked_for(llama: Model, logits: Any) -> None:
    with closing(llama.new_kv_cache(8)) as kv, pytest.raises(InvalidInputError, match="'last' or 'all'"):
        llama.forward([1], kv, logits)
