"""The comparison with llama.cpp: same prompts, turns, ratios, and a server that is told what it did wrong."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeContext, FakeModel

from vkdecode.errors import VkDecodeError

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("stub_llama_server.py")


def script() -> Any:
    """The script as a module; it lies in no package."""
    spec = importlib.util.spec_from_file_location("compare_llama_cpp", ROOT / "bench" / "compare_llama_cpp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compare = script()


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The stub as an executable file."""
    path = tmp_path / "llama-server-vulkan"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_the_server_is_timed_by_passes(program: str) -> None:
    with compare.LlamaServer([program], 0, compare.free_port()) as server:
        rates = server.rates(list(range(256)), [1, 2, 3], 8)
    # 100 ms for each prompt token; 8 passes of 500 ms give 9 tokens, the first of which is the prompt's.
    assert (rates.prefill, rates.decode) == pytest.approx((10.0, 2.0))


def test_a_prompt_that_was_not_computed_whole_is_an_error(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", "cached")
    with (
        compare.LlamaServer([program], 0, compare.free_port()) as server,
        pytest.raises(VkDecodeError, match=r"asked for 4 and 1 tokens, it computed \(3, 1\)"),
    ):
        server.rates([1, 2, 3, 4], [1], 1)


def test_a_server_that_ends_says_why(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", "ends")
    with pytest.raises(VkDecodeError, match="ended while it started; its last line: no such model"):
        compare.LlamaServer([program], 0, compare.free_port()).__enter__()


def test_the_device_must_be_the_same(program: str) -> None:
    compare.check_same_device(program, 3, "Fake GPU")
    with pytest.raises(VkDecodeError, match=r"does not find Other as Vulkan device 3; .*visible: 3"):
        compare.check_same_device(program, 3, "Other")


def test_a_missing_server_names_the_extra(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    assert compare.find_server(program) == program
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(VkDecodeError, match=r"vkdecode\[compare\]"):
        compare.find_server(None)


def test_prompts_have_the_lengths_that_were_asked_for() -> None:
    with_text, without = FakeModel(), FakeModel()
    without.tokenizer = None
    without.vocab_size = 260  # type: ignore[attr-defined]  # only models without a tokenizer are asked
    for model in (with_text, without):
        prefill, prompt = compare.prompts(model, 256)
        assert (len(prefill), len(prompt)) == (256, 16)
        assert prefill[:16] == prompt
        assert len(compare.prompts(model, 3)[0]) == 3


def test_our_round_feeds_the_same_prompts_and_as_many_passes() -> None:
    model = FakeModel("x" * 100)
    rates = compare.our_rates(model, FakeContext(), [5] * 20, [6, 7], 4)
    assert model.fed[:2] == [[5] * 20, [6, 7]]
    assert [len(ids) for ids in model.fed[2:]] == [1] * 4
    assert rates.prefill > 0 and rates.decode > 0
    assert all(kv.closed for kv in model.caches)


def test_rounds_alternate_and_warming_up_does_not_count() -> None:
    turns: list[str] = []

    def side(name: str, speeds: Sequence[float]) -> Any:
        left = iter(speeds)

        def run(prefill: Sequence[int], prompt: Sequence[int], tokens: int) -> Any:
            if tokens == 9:
                turns.append(name)
                speed = next(left)
                return compare.Rates(speed * 100, speed)
            return compare.Rates(1e9, 1e9)

        return run

    found = compare.alternate(side("ours", [20.0, 30.0, 60.0]), side("theirs", [2.0, 4.0, 3.0]), [1] * 4, [1], 9, 3)
    assert turns == ["theirs", "ours"] * 3
    decode = found.figures("decode")
    assert decode["vkdecode"] == {"median": 30.0, "lowest": 20.0, "highest": 60.0}
    assert decode["llama_cpp"]["median"] == 3.0
    assert (decode["ratio"], decode["lowest_ratio"], decode["highest_ratio"]) == (10.0, 7.5, 20.0)
    assert found.figures("prefill")["vkdecode"]["median"] == 3000.0
    made = compare.table(found, 256, 32)
    assert [column.header for column in made.columns][1:] == ["vkdecode", "llama.cpp", "ratio"]
    assert list(made.columns[3].cells) == ["10.0 (7.5 to 20.0)"] * 2
