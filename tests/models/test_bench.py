"""The bench measures what it says it does; its figures are nobody's business here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import TINY
from typer.testing import CliRunner

from vkdecode import cli
from vkdecode.bench import BenchOptions, SyntheticSource, run_bench
from vkdecode.bench.copy_speed import copy_seconds
from vkdecode.bench.speed import decode_speeds, fill
from vkdecode.bench.traffic import decode_traffic
from vkdecode.decode import KV_OFFSETS, RUNGS, InferenceContext, KvCache
from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model, load_model
from vkdecode.weights import DType

SPEED = {
    "name": str,
    "tokens": int,
    "context": int,
    "calls": int,
    "milliseconds": float,
    "best_milliseconds": float,
    "worst_milliseconds": float,
    "host_milliseconds": float,
    "tokens_per_second": float,
}
SCHEMA: dict[str, Any] = {
    "schema": int,
    "vkdecode": str,
    "model": {"name": str, "model_type": str, "synthetic": bool, "weights": (str, type(None)), "held_bytes": dict},
    "device": {
        "ordinal": int,
        "name": str,
        "vendor": str,
        "kind": str,
        "driver": str,
        "lanes": str,
        "cpu_count": int,
    },
    "options": {"contexts": [int], "prefills": [int], "tokens": int, "quick": bool},
    "load": {
        "load_seconds": float,
        "plans_seconds": float,
        "prompt_tokens": int,
        "prompt_seconds": float,
        "held_first_token_seconds": float,
        "to_first_token_seconds": float,
    },
    "prefill": [SPEED],
    "decode": [{**SPEED, "bytes_per_token": int, "gigabytes_per_second": float, "of_copy_bandwidth": float}],
    "rungs": [{**SPEED, "rung": str, "kv_offset": str}],
    "cache_changes": [SPEED],
    "ratios": {
        "captured_over_rebuild_device": float,
        "captured_over_rebuild_symenv": float,
        "longest_over_shortest_context": float,
    },
    "memory": {
        "file": int,
        "weights": int,
        "kv_cache": int,
        "kv_rows": int,
        "activations": int,
        "staging": int,
        "device": int,
        "bare_import": int,
        "rss_after_load": int,
        "host_after_load": int,
        "rss_with_plans": int,
        "host_with_plans": int,
        "peak_rss": int,
        "device_of_file_and_kv": float,
    },
    "copy_bandwidth": {
        "buffer_bytes": int,
        "gigabytes_per_second": {"copy_words": float, "vkCmdCopyBuffer": float},
        "best_way": str,
        "best_gigabytes_per_second": float,
    },
}
TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def differences(found: Any, schema: Any, where: str = "") -> list[str]:
    """Where a JSON value is not of the schema's shape; keys must be just those of the schema."""
    if isinstance(schema, dict):
        if set(found) != set(schema):
            return [f"{where}: keys {set(found) ^ set(schema)}"]
        return [one for key in schema for one in differences(found[key], schema[key], f"{where}.{key}")]
    if isinstance(schema, list):
        if not found:
            return [f"{where} is empty"]
        return [one for at, value in enumerate(found) for one in differences(value, schema[0], f"{where}[{at}]")]
    return [] if isinstance(found, schema) else [f"{where}: {found!r} is no {schema}"]


def command(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *args])


def test_a_quick_run_of_the_command_gives_every_figure_as_json() -> None:
    run = command(str(TINY / "llama"), "--quick", "--json", "-")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert differences(found, SCHEMA) == []
    assert [(one["rung"], one["kv_offset"]) for one in found["rungs"]] == [(r, o) for r in RUNGS for o in KV_OFFSETS]
    assert [one["name"].partition(":")[2] for one in found["cache_changes"]] == [
        " plan reused",
        " plan re-bound",
        " plan built anew",
    ]
    for speed in (*found["prefill"], *found["decode"], *found["rungs"], *found["cache_changes"]):
        assert 0 < speed["best_milliseconds"] <= speed["milliseconds"] <= speed["worst_milliseconds"]
        assert speed["tokens_per_second"] == pytest.approx(1000 * speed["tokens"] / speed["milliseconds"])
        assert 0 < speed["host_milliseconds"] < speed["worst_milliseconds"]
    assert found["options"] == {"contexts": [50], "prefills": [16], "tokens": 4, "quick": True}
    memory = found["memory"]
    assert memory["file"] == (TINY / "llama" / "model.safetensors").stat().st_size
    parts = memory["weights"] + memory["kv_cache"] + memory["activations"] + memory["staging"]
    # The prompts that were measured need no fewer plans than the report's one prompt that fills the cache.
    assert memory["weights"] + memory["kv_cache"] < memory["device"] <= 2 * parts


def test_a_table_a_json_file_and_a_picture_can_be_had_at_once(tmp_path: Path) -> None:
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    args = ("--context", "9,3", "--prefill", "5", "-n", "2", "--json", str(figures), "--plot", str(picture))
    run = command(str(TINY / "phi"), "--quick", *args)
    assert run.exit_code == 0, run.output
    for words in ("phi, f32", "tok/s", "of copy bandwidth", "captured, offset by symenv", "model file"):
        assert words in run.stdout
    found = json.loads(figures.read_text())
    assert [one["context"] for one in found["decode"]] == [3, 9]
    assert [one["tokens"] for one in found["prefill"]] == [5]
    assert {one["context"] for one in found["rungs"]} == {3}
    assert found["memory"]["kv_rows"] == 11
    assert picture.read_text().startswith("<?xml")


def test_a_synthetic_model_is_measured_without_a_file(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA))
    run = command("--synthetic", str(config), "--weights", "bf16", "--quick", "--json", "-")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert differences(found, SCHEMA) == []
    assert found["model"]["synthetic"] is True
    assert found["model"]["weights"] == "bf16"
    assert set(found["model"]["held_bytes"]) == {"bf16", "f32"}
    assert found["memory"]["file"] == SyntheticSource("x", TINY_LLAMA, DType.BF16).nbytes


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_a_synthetic_model_gives_finite_and_repeatable_logits(device: Device, dtype: str) -> None:
    rows = []
    for _ in range(2):
        source = SyntheticSource("x", TINY_LLAMA, DType(dtype))
        with (
            load_model(source, device, open_source=lambda source=source: source) as model,  # type: ignore[misc]  # a closure
            closing(model.new_kv_cache(16)) as kv,
        ):
            rows.append(model.forward([3, 4, 5], kv))
    assert np.isfinite(rows[0]).all() and rows[0].std() > 0
    np.testing.assert_array_equal(rows[0], rows[1])


def test_the_comparison_with_llama_cpp_runs_as_a_script(tmp_path: Path, device: Device) -> None:
    root = Path(__file__).resolve().parents[2]
    program, file = tmp_path / "server", tmp_path / "figures.json"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {root / "tests/pure/stub_llama_server.py"} "$@"\n')
    program.chmod(0o755)
    args = ("--server", str(program), "--llama-model", str(program), "--rounds", "2", "--tokens", "3")
    done = subprocess.run(
        [
            sys.executable,
            str(root / "bench" / "compare_llama_cpp.py"),
            str(TINY / "llama"),
            *args,
            "--prefill",
            "40",
            "--json",
            str(file),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(root), "STUB_DEVICE": device.info.name},
    )
    assert done.returncode == 0, done.stderr
    assert "prefill of 40 tokens" in done.stdout
    found = json.loads(file.read_text())
    assert found["decode"]["llama_cpp"]["median"] == pytest.approx(2.0)
    assert found["prefill"]["llama_cpp"]["median"] == pytest.approx(10.0)
    assert len(found["by_round"]["vkdecode"]) == 2
    assert found["decode"]["ratio"] > 0


def test_a_run_leaves_a_given_device_as_it_was(device: Device) -> None:
    before = device.allocated_bytes
    result = run_bench(TINY / "llama-tied-mqa", device=device, options=BenchOptions(quick=True, tokens=1))
    assert device.allocated_bytes == before
    assert result.decode[0].speed.calls == 1


def test_decode_steps_run_at_their_context_lengths(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BenchOptions(contexts=(3, 20), prefills=(4,), tokens=2).within(128)
    lengths: list[int] = []
    step = Model.top_candidates

    def noted(model: Model, ids: Sequence[int], kv: KvCache, *rest: Any) -> Any:
        lengths.append(kv.cached_len)
        return step(model, ids, kv, *rest)

    with closing(llama.new_kv_cache(plan.rows)) as kv, InferenceContext(llama.device) as context:
        fill(llama, kv, context, 20)
        monkeypatch.setattr(Model, "top_candidates", noted)
        speeds = decode_speeds(llama, kv, context, plan)
    assert lengths == [3, 20] * 3
    assert [(one.context, one.calls) for one in speeds] == [(3, 2), (20, 2)]


def test_a_step_reads_every_weight_once_and_one_row_of_the_embedding(llama: Model) -> None:
    with closing(llama.new_kv_cache(20)) as kv:
        traffic = decode_traffic(llama, kv.geometry)
        held = {spec.names: llama.weight_store.nbytes(spec) for spec in llama.weight_specs()}
        embedding = held[("model.embed_tokens.weight",)]
        row = embedding // llama.vocab_size
        assert traffic.weights == pytest.approx(sum(held.values()) - embedding + row, abs=row)
        config = llama.config
        assert traffic.at(7) - traffic.at(6) == (
            2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
        )


def test_of_experts_only_those_of_one_token_are_read(device: Device) -> None:
    with load(TINY / "mixtral", device=device) as model, closing(model.new_kv_cache(20)) as kv:
        held = {spec: model.weight_store.nbytes(spec) for spec in model.weight_specs()}
        embedding = next(nbytes for spec, nbytes in held.items() if spec.names == ("model.embed_tokens.weight",))
        stacks = sum(nbytes for spec, nbytes in held.items() if spec.experts)
        assert sum(spec.experts == 4 for spec in held) == 2 * model.config.num_hidden_layers
        rest = sum(held.values()) - stacks - embedding + embedding // model.vocab_size
        norms = 2 * 64 * 4  # of each layer one is read by the router and again by the experts
        assert decode_traffic(model, kv.geometry).weights == rest + stacks * 2 // 4 + norms


def test_submissions_are_timed_whoever_makes_them(llama: Model) -> None:
    with closing(llama.new_kv_cache(8)) as kv:
        before = llama.device.submission_seconds
        llama.forward([1, 2], kv)
        between = llama.device.submission_seconds
        llama.forward([3], kv)
    assert before < between < llama.device.submission_seconds


def test_copying_takes_time_and_gives_its_memory_back(device: Device) -> None:
    before = device.allocated_bytes
    nbytes, seconds = copy_seconds(device, 1 << 20, repeats=1)
    assert nbytes == 1 << 20
    assert set(seconds) == {"copy_words", "vkCmdCopyBuffer"}
    assert min(seconds.values()) > 0
    assert device.allocated_bytes == before


@pytest.mark.parametrize(
    "args",
    [(), ("m", "--synthetic", "llama-3.2-1b"), ("m", "--tokens", "0"), ("m", "--context"), ("m", "--quick", "extra")],
)
def test_wrong_usage_is_exit_code_2(args: Sequence[str]) -> None:
    run = command(*args)
    assert run.exit_code == 2
    assert "Error: " in run.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("m", "--context", "0"), "--context '0' is not a list"),
        (("m", "--prefill", "a"), "--prefill 'a' is not a list"),
        (("m", "--plot", "x.gif"), "must end with .png or .svg"),
        (("m", "--json", "no/such/folder/x.json"), "--json: cannot write"),
        (("--synthetic", "nothing"), "neither a built-in shape nor"),
        (("--synthetic", "llama-3.2-1b", "--weights", "q9"), "synthetic weights must be one of"),
        ((str(TINY / "llama"), "--context", "127"), "a context of 127 tokens does not fit"),
        ((str(TINY / "llama"), "--prefill", "129"), "a prompt of 129 tokens does not fit"),
    ],
)
def test_values_out_of_range_are_named_before_anything_is_loaded(args: Sequence[str], words: str) -> None:
    run = command(*args)
    assert isinstance(run.exception, InvalidInputError)
    assert words in str(run.exception)
