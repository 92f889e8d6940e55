"""Decode, prefill, upload and read-back under the Khronos validation layer: no message.

Once with synchronization validation, once with GPU-assisted validation, which sees a shader reach past the end of a
buffer. The controls leave one barrier out, or reach one word too far, and must be reported, so a layer that is missing
or blind fails the test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tiny_llama import PATHS, TINY, changed_copy
from work_under_validation import Work

SCRIPT = Path(__file__).with_name("work_under_validation.py")
SETTINGS = {
    "debug_action": "VK_DBG_LAYER_ACTION_LOG_MSG",
    "report_flags": "error,warn",
    "log_filename": "stdout",
    # Every message counts, not the first ten of a kind.
    "enable_message_limit": "false",
    # Without these two, newer layers say nothing about what shaders access; older ones do not know them.
    "validate_sync": "true",
    "syncval_shader_accesses_heuristic": "true",
}
SYNCHRONIZATION = "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT"
GPU_ASSISTED = "VK_VALIDATION_FEATURE_ENABLE_GPU_ASSISTED_EXT"
RUNGS = ("captured", "held", "rebuild")
# One line in older layers, several in newer ones.
HAZARD = re.compile(r"\[ SYNC-HAZARD-([A-Z-]+) \].*?binding #?(\d+)", re.DOTALL)


def under_validation(folder: Path, work: Work, feature: str = SYNCHRONIZATION) -> list[str]:
    """Lines of the script's output: its own and the layer's."""
    settings = {**SETTINGS, "enables": feature}
    if feature == GPU_ASSISTED:
        settings = {name: value for name, value in settings.items() if "sync" not in name}
    lines = [f"khronos_validation.{name} = {value}\n" for name, value in settings.items()]
    (folder / "vk_layer_settings.txt").write_text("".join(lines), encoding="utf-8")
    environment = {
        **os.environ,
        "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation",
        "VK_LAYER_SETTINGS_PATH": str(folder),
    }
    if feature == GPU_ASSISTED:
        # What an instrumented shader reports goes astray where Mesa takes it from its cache.
        environment["MESA_SHADER_CACHE_DISABLE"] = "true"
        # Where a shader reads and writes is not what the driver's optimization changes, and it takes a quarter longer.
        environment["GALLIVM_PERF"] = "nopt"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(asdict(work))],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    output = done.stdout.splitlines()
    assert output[-1] == "done"
    return output


def ran(work: Work, rungs: tuple[str, ...] = RUNGS) -> list[str]:
    """What the script says that it ran."""
    return [f"ran {work.lanes} {kv_offset} {arm} {rung}" for kv_offset, arm in work.paths for rung in rungs]


# The first four are chains, in which each dispatch needs the one before. Experts run beside one another, as do the
# attention and the MLP of Phi, the parts of a split weight, and much of what is not fused.
@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("llama", Work("run", "subgroup", paths=PATHS)),
        ("llama", Work("run", "shared", kv_dtype="f16", paths=PATHS[1:3])),
        ("gemma3-text", Work("run", "subgroup", kv_dtype="f16")),
        ("gpt2", Work("run", "shared", paths=PATHS[2:])),
        ("qwen2_moe", Work("run", "subgroup", placement="reuse")),
        ("phi", Work("run", "shared", placement="reuse", paths=PATHS[2:3])),
        ("llama", Work("run", "subgroup", placement="reuse", paths=PATHS[2:3], buffer_bytes=32768)),
        ("gemma3-text", Work("run", "subgroup", placement="reuse", paths=PATHS[:1], fused=False)),
    ],
    ids=str,
)
def test_nothing_that_is_recorded_draws_a_message(tmp_path: Path, name: str, work: Work) -> None:
    assert under_validation(tmp_path, replace(work, folder=str(TINY / name))) == [*ran(work), "done"]


def test_the_checks_of_a_device_draw_no_message(tmp_path: Path) -> None:
    assert under_validation(tmp_path, Work("doctor", "subgroup")) == ["ran the doctor", "done"]


# The second one has norms of heads, behind which a dispatch of its own fills the cache.
@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("llama", Work("controls", "subgroup", placement="reuse")),
        ("gemma3-text", Work("controls", "shared", placement="reuse", kv_dtype="f16")),
        ("llama", Work("controls", "shared", paths=PATHS[:1])),
    ],
    ids=str,
)
def test_each_barrier_left_out_is_reported(tmp_path: Path, name: str, work: Work) -> None:
    sections = controls(under_validation(tmp_path, replace(work, folder=str(TINY / name))))
    steps = 2 * len(work.paths)  # a chunk of a prompt and a token, on each path
    layers = json.loads((TINY / name / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    pairs = len(work.paths) if work.placement == "reuse" else 0
    said = Counter(left_out for left_out, _ in sections)
    assert said["nothing"] == steps + pairs
    assert said["the barrier before attention"] == steps * layers
    assert said["the barrier behind the upload"] == steps
    assert said["a barrier before what overwrites"] == pairs
    for left_out, hazards in sections:
        kinds = {kind for kind, _ in hazards}
        if left_out == "nothing":
            assert not hazards
        elif left_out == "a barrier before what overwrites":
            assert kinds == {"WRITE-AFTER-READ"}
        else:
            assert "READ-AFTER-WRITE" in kinds, left_out
        if left_out == "the barrier before attention":
            assert {("READ-AFTER-WRITE", binding) for binding in (1, 2)} <= set(hazards)  # K and V of the cache


def controls(output: list[str]) -> list[tuple[str, list[tuple[str, int]]]]:
    """What was left out each time, and the hazards that were reported of it, with the binding's number."""
    sections: list[tuple[str, list[tuple[str, int]]]] = []
    for section in "\n".join(output).split("left out: ")[1:]:
        left_out, _, messages = section.partition("\n")
        sections.append((left_out, [(kind, int(binding)) for kind, binding in HAZARD.findall(messages)]))
    return sections


def first_layer(folder: Path, name: str) -> Path:
    """A copy of a tiny checkpoint without its other layers."""
    config = json.loads((TINY / name / "config.json").read_text(encoding="utf-8"))
    changes = {key: 1 for key in ("num_hidden_layers", "n_layer") if key in config}
    if "layer_types" in config:
        changes["layer_types"] = config["layer_types"][:1]
    names = load_file(TINY / name / "model.safetensors")
    return changed_copy(folder, name, changes, {key: None for key in names if re.search(r"(layers|h)\.[1-9]", key)})


# Each kernel takes seconds to instrument, so each model takes one path and one layer: where layers differ, the first
# one has a window. The kernels of prompts take the longest by far, those of the subgroup form twice as long again.
@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("llama", Work("reach", "shared", placement="alone", paths=PATHS[:1], prompts=True)),
        ("llama", Work("reach", "subgroup", placement="alone", paths=PATHS[:1])),
        ("gemma3-text", Work("reach", "subgroup", placement="alone", kv_dtype="f16", paths=PATHS[2:3])),
        ("gpt2", Work("reach", "subgroup", placement="alone", paths=PATHS[1:2])),
        ("gpt_oss", Work("reach", "shared", placement="alone", kv_dtype="f16", paths=PATHS[3:])),
    ],
    ids=str,
)
def test_no_shader_reaches_past_the_end_of_a_buffer(tmp_path: Path, name: str, work: Work) -> None:
    folder = first_layer(tmp_path / "model", name)
    output = under_validation(tmp_path, replace(work, folder=str(folder)), GPU_ASSISTED)
    # Newer layers also warn of their own set-up; what a shader does wrong is an error.
    assert not [line for line in output if "Validation Error" in line or "VUID-" in line]
    assert [line for line in output if line.startswith("ran ")] == ran(work, ("captured",))


def test_one_word_too_far_is_reported(tmp_path: Path) -> None:
    """Newer layers lose a report now and then, so one of several runs must have it."""
    for _ in range(5):
        output = "\n".join(under_validation(tmp_path, Work("too-far", "subgroup"), feature=GPU_ASSISTED))
        if "Validation Error" in output and "out of bounds" in output:
            return
    pytest.fail("no run was reported")
