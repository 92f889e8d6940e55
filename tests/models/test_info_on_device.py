"""`vkdecode info` on a device: the numbers are those of the loaded model, and no weight is read for them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from model_files import smollm2_path
from tiny_llama import TINY

from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Device
from vkdecode.info.inspect_model import inspect_model
from vkdecode.loading import load
from vkdecode.models import ModelPlan
from vkdecode.runtime import WeightStore
from vkdecode.weights import open_weights


def test_numbers_are_those_of_the_loaded_model(device: Device) -> None:
    with load(TINY / "llama", device=device) as model:
        expected = model.memory_report(100, "f16")
    found = inspect_model(str(TINY / "llama"), device.info.ordinal, None, 100, "f16")
    assert found.runs and found.problems == ()
    assert found.memory == expected
    assert found.device == str(device.info)
    assert found.sizes["head_dim"] == 16
    assert found.tokenizer_problem is not None and found.chat_template is None
    narrow = inspect_model(str(TINY / "llama"), device.info.ordinal, "f16", 100, "f16")
    assert narrow.memory is not None and narrow.memory.weights < expected.weights


def test_no_weight_is_read(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(WeightStore, "load", refuse)
    found = inspect_model(str(smollm2_path()), device.info.ordinal)
    assert found.runs
    assert found.parameters == 134_515_008
    assert found.chat_template is True
    assert found.ends == {0: "<|endoftext|>", 2: "<|im_end|>"}
    assert found.memory is not None and found.memory.max_seq_len == 4096


def test_what_is_too_large_is_said_with_numbers(device: Device) -> None:
    asked = 1 << 30
    found = inspect_model(str(TINY / "llama"), device.info.ordinal, None, asked)
    assert not found.runs
    assert any(str(asked) in problem or "largest storage buffer" in problem for problem in found.problems)
    assert any("128 positions" in problem for problem in found.problems)
    assert found.memory is not None and found.memory.total > found.memory.heap
    with pytest.raises(InvalidInputError, match="f64"):
        inspect_model(str(TINY / "llama"), device.info.ordinal, None, 10, "f64")


def test_no_such_device_is_a_problem() -> None:
    found = inspect_model(str(TINY / "llama"), "no such device")
    assert not found.runs and found.memory is None
    assert "no such device" in found.problems[0]


def test_a_plan_of_a_model_takes_nothing_of_a_device_and_asks_nothing_of_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(TINY / "llama", device=device) as model:
        expected, weights = model.memory_report(100), model.weight_specs()
    monkeypatch.setattr(device, "info", replace(device.info, heap_bytes=1 << 10))
    before = device.allocated_bytes
    with closing(open_weights(TINY / "llama")) as source:
        planned = ModelPlan(source, device)
    assert planned.memory_report(100) == replace(expected, heap=1 << 10)
    assert not planned.memory_report(100).fits
    assert planned.weight_specs() == weights
    assert device.allocated_bytes == before
