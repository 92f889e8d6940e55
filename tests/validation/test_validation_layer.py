"""Decode, prefill, upload and read-back under the Khronos validation layer: no message.

Once with synchronization validation, once with GPU-assisted validation, which sees a shader reach past the end of a
buffer. The controls leave one ordering step out, or reach one word too far, and must be reported, so a layer that is
missing or blind fails the test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tiny_llama import LANES, LOCATION, PATHS, TINY, changed_copy, step_graph

from vkdecode.decode import StepOptions
from vkdecode.decode.candidates import candidates_node, host_copies, left_out, with_candidates
from vkdecode.graph import optimize_graph, splice_host_copy
from vkdecode.runtime import lower, steps_for

SCRIPT = Path(__file__).with_name("work_under_validation.py")
SETTINGS = {
    "debug_action": "VK_DBG_LAYER_ACTION_LOG_MSG",
    "report_flags": "error,warn",
    "log_filename": "stdout",
    # Without these two, newer layers say nothing about what shaders access; older ones do not know them.
    "validate_sync": "true",
    "syncval_shader_accesses_heuristic": "true",
}
SYNCHRONIZATION = "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT"
GPU_ASSISTED = "VK_VALIDATION_FEATURE_ENABLE_GPU_ASSISTED_EXT"


def under_validation(
    folder: Path, lanes: str, what: str, model: Path = TINY / "llama", feature: str = SYNCHRONIZATION
) -> list[str]:
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
        [sys.executable, str(SCRIPT), lanes, str(model), what],
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


# Windows, norms that turn heads and add residuals, positions and experts are not in the first one.
@pytest.mark.parametrize(
    ("lanes", "name", "what"),
    [
        ("subgroup", "llama", "whole"),
        ("shared", "llama", "whole"),
        ("subgroup", "gemma3-text", "both-offsets"),
        ("shared", "gpt2", "both-offsets"),
        ("subgroup", "qwen2_moe", "both-offsets"),
    ],
)
def test_nothing_that_is_recorded_draws_a_message(tmp_path: Path, lanes: str, name: str, what: str) -> None:
    rungs = ("captured", "held", "rebuild")
    paths = PATHS if what == "whole" else PATHS[:3:2]
    ran = [f"ran {lanes} {kv_offset} {arm} {rung}" for kv_offset, arm in paths for rung in rungs]
    assert under_validation(tmp_path, lanes, what, TINY / name) == [*ran, "ran without fusions", "done"]


def test_the_checks_of_a_device_draw_no_message(tmp_path: Path) -> None:
    assert under_validation(tmp_path, "subgroup", "doctor") == ["ran the doctor", "done"]


# One behind the embedding, one behind each of a layer's five dispatches, one behind the head and one behind the group
# maxima; the one behind the list of candidates is its read-back.
SYNCS = 1 + 5 * 2 + 2


def test_the_controls_leave_out_every_step_that_orders_two_dispatches() -> None:
    options = StepOptions(1, "last", "device", "bounded")
    step = with_candidates(step_graph("llama", options), options)
    roots = (splice_host_copy(step.graph, step.logits), *step.effects, *host_copies(step))
    plan = lower(step.graph, optimize_graph(step.graph, roots, LOCATION), LANES["subgroup"])
    node = candidates_node(step, 40)
    assert node is not None
    out = left_out(step, node)
    (steps,) = steps_for(plan, lambda dispatch: dispatch.node not in out)
    assert [step.kind for step in steps].count("sync") == SYNCS + 1
    assert steps[-1].kind == "sync"


@pytest.mark.parametrize("number", range(SYNCS))
def test_an_ordering_step_left_out_is_reported(tmp_path: Path, number: int) -> None:
    output = under_validation(tmp_path, "subgroup", str(number))
    assert any("SYNC-HAZARD-READ-AFTER-WRITE" in line for line in output)


def test_the_layer_sees_the_shared_form_too(tmp_path: Path) -> None:
    assert any("SYNC-HAZARD" in line for line in under_validation(tmp_path, "shared", "2"))


def first_layer(folder: Path, name: str) -> Path:
    """A copy of a tiny checkpoint without its other layers."""
    config = json.loads((TINY / name / "config.json").read_text(encoding="utf-8"))
    changes = {key: 1 for key in ("num_hidden_layers", "n_layer") if key in config}
    if "layer_types" in config:
        changes["layer_types"] = config["layer_types"][:1]
    names = load_file(TINY / name / "model.safetensors")
    return changed_copy(folder, name, changes, {key: None for key in names if re.search(r"(layers|h)\.[1-9]", key)})


# Each kernel takes seconds to instrument, so each model takes one path and one layer: where layers differ, the first
# one has a window.
@pytest.mark.parametrize(
    ("lanes", "path", "name"),
    [
        ("subgroup", "device-bounded-prompt", "llama"),
        ("shared", "symenv-masked", "llama"),
        ("shared", "device-bounded", "gemma3-text"),
        ("subgroup", "symenv-masked", "gpt2"),
        ("subgroup", "device-bounded-prompt", "gpt_oss"),
        ("shared", "symenv-masked", "qwen2_moe"),
    ],
)
def test_no_shader_reaches_past_the_end_of_a_buffer(tmp_path: Path, lanes: str, path: str, name: str) -> None:
    output = under_validation(tmp_path, lanes, f"reach-{path}", first_layer(tmp_path / "model", name), GPU_ASSISTED)
    # Newer layers also warn of their own set-up; what a shader does wrong is an error.
    assert not [line for line in output if "Validation Error" in line or "VUID-" in line]
    kv_offset, arm = path.split("-")[:2]
    assert [line for line in output if line.startswith("ran ")] == [f"ran {lanes} {kv_offset} {arm} captured"]


def test_one_word_too_far_is_reported(tmp_path: Path) -> None:
    """Newer layers lose a report now and then, so one of several runs must have it."""
    for _ in range(5):
        output = "\n".join(under_validation(tmp_path, "subgroup", "too-far", feature=GPU_ASSISTED))
        if "Validation Error" in output and "out of bounds" in output:
            return
    pytest.fail("no run was reported")
