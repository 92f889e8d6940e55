"""The doctor on a sound device, on one with something broken, and from the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vkdecode import cli
from vkdecode.doctor import Report, checks, engine, examine, memory, tiny_model
from vkdecode.doctor.report import FAULT, NOTE, OK, Finding
from vkdecode.errors import DeviceError
from vkdecode.gpu import Device, SelfCheck, list_devices, read_words, registry

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
BROKEN = "elementwise OP=add"


@pytest.fixture(scope="module")
def sound(device: Device) -> Report:
    return examine(device, str(TINY))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the checks of kernels without lanes, and those that are no kernels."""
    monkeypatch.setattr(checks, "_families", lambda form: [])
    monkeypatch.setattr(checks, "check_tiny", lambda report, device: None)


@pytest.fixture
def broken_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A sum whose compiled code multiplies."""
    kernels = registry()
    add, mul = kernels.get("elementwise", OP="add"), kernels.get("elementwise", OP="mul")
    monkeypatch.setitem(kernels._kernels, add.key, dataclasses.replace(add, code=mul.code))
    yield add.key


def named(report: Report, group: str, name: str) -> tuple[str, str]:
    (check,) = (check for check in report.checks if (check.group, check.name) == (group, name))
    return check.status, check.text


def test_a_sound_device_has_no_fault(sound: Report) -> None:
    assert sound.faults == []
    assert {check.group for check in sound.checks} == {
        "device",
        "self-check",
        "kernels",
        "memory",
        "golden model",
        "model",
    }
    kernels = f"{len(sound.kernels_run)} of {len(registry().keys())} kernels were run"
    assert sound.verdict() == f"no fault in {len(sound.checks)} checks ({kernels})"


def test_every_family_of_the_manifest_is_run_in_every_form(sound: Report, device: Device) -> None:
    run, known = sound.kernels_run, registry().keys()
    assert len(run) == len(set(run)) and set(run) <= set(known)
    self_checks = {"subgroup_check", "self_check"}
    assert {key.split()[0] for key in run} | self_checks == {key.split()[0] for key in known}
    for family in ("linear", "norm", "attention", "top_k"):
        assert {form for key in run for form in key.split()[1:2] if key.startswith(family + " ")} == {
            "LANES=subgroup",
            "LANES=shared",
        }
    for axis in ("DTYPE", "NORM", "EPILOGUE", "TOKENS", "QUERIES", "KV"):
        there = {term for key in known for term in key.split() if term.startswith(axis + "=")}
        assert there == {term for key in run for term in key.split() if term.startswith(axis + "=")}


def test_nothing_stays_taken(device: Device) -> None:
    before = device.allocated_bytes
    memory.check_transfer(device, 4100)
    memory.check_allocations(device, (1 << 16,))
    memory.measure_bandwidth(device, 1 << 16, 1)
    assert device.allocated_bytes == before


def test_the_report_is_json_with_all_that_a_bug_report_needs(sound: Report, device: Device) -> None:
    held: dict[str, Any] = json.loads(json.dumps(sound.as_json()))
    assert held["schema"] == 1 and held["ok"] is True and held["verdict"] == sound.verdict()
    assert set(held) == {
        "schema", "ok", "verdict", "versions", "platform", "device", "self_check", "lanes", "kernels", "checks",
    }  # fmt: skip
    assert set(held["versions"]) == {"python", "vkdecode", "kp", "vulkan", "numpy"}
    assert held["versions"]["kp"].startswith("0.9.0+vkdecode")
    assert held["device"]["name"] == device.info.name and held["device"]["driver"] == device.info.driver
    assert held["device"]["limits"]["max_push_constants_bytes"] >= 128
    assert held["self_check"] == {"subgroup": True, "shared": True, "numbers": True, "details": []}
    assert held["kernels"] == {"run": sound.kernels_run, "known": sound.kernels_known}
    fields = {"group", "name", "status", "text", "number", "unit", "subjects", "milliseconds"}
    assert held["checks"] and all(set(check) == fields for check in held["checks"])
    assert {check["status"] for check in held["checks"]} <= {OK, FAULT, NOTE}


@pytest.mark.usefixtures("quick")
def test_a_broken_kernel_is_named(device: Device, broken_kernel: str) -> None:
    report = examine(device)
    (fault,) = report.faults
    assert (fault.group, fault.name, fault.subjects) == ("kernels", "elementwise", (BROKEN,))
    assert f"'{BROKEN}'" in fault.text and "values are wrong" in fault.text
    assert f"kernels elementwise ({BROKEN})" in report.verdict()


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("linear LANES=shared DTYPE=f16 TOKENS=1 EPILOGUE=rope KV=f16", "KV=f32"),
        ("linear LANES=subgroup DTYPE=bf16 TOKENS=16 EPILOGUE=rope KV=f32", "DTYPE=f16"),
        ("linear LANES=subgroup DTYPE=bf16 TOKENS=16 EPILOGUE=plain KV=none", "DTYPE=f16"),
        ("norm LANES=shared NORM=rms", "LANES=subgroup"),
        ("attention LANES=subgroup KV=f16 QUERIES=4", "KV=f32"),
        ("attention LANES=shared KV=f16 QUERIES=3", "KV=f32"),
        ("embed DTYPE=f16 PART=0", "DTYPE=bf16"),
        ("kv_write KV=f16", "KV=f32"),
        ("kv_move KV=f16", "KV=f32"),
    ],
)
def test_the_code_of_another_variant_is_noticed(
    device: Device, monkeypatch: pytest.MonkeyPatch, key: str, other: str
) -> None:
    name, *terms = key.split()
    axes = dict(term.split("=") for term in terms)
    axis, value = other.split("=")
    kernels = registry()
    wrong = kernels.get(name, **{**axes, axis: value})
    monkeypatch.setitem(kernels._kernels, key, dataclasses.replace(kernels.get(name, **axes), code=wrong.code))
    report = Report()
    wanted = axes.get("LANES", "shared")
    (form,) = (one for one in checks._forms(device, SelfCheck(True, True, True)) if one.form == wanted)
    families = [*checks._families(form), *checks._plain_families()]
    ((_, _, check),) = (one for one in families if key in one[1])
    found = checks._family_check(report, device, form, [key], check)()
    assert (found.status, found.subjects) == (FAULT, (key,))


@pytest.mark.usefixtures("quick")
def test_an_exception_in_a_check_is_a_fault_of_it_and_the_others_still_run(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Finding:
        raise RuntimeError("no\nluck")

    for name in ("check_transfer", "run_self_check"):
        monkeypatch.setattr(checks, name, fail)
    report = examine(device)
    assert [(check.name, check.text) for check in report.faults] == [
        ("run", "RuntimeError: no luck"),
        ("transfer", "RuntimeError: no luck"),
    ]
    assert named(report, "memory", "allocation")[0] == OK
    assert "2 of " in report.verdict() and "self-check run; memory transfer" in report.verdict()


@pytest.mark.usefixtures("quick")
def test_what_the_self_check_finds_is_reported(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SelfCheck(False, True, False, ("subgroup: half full", "numbers: exp is wrong for case 5 of 8"))
    monkeypatch.setattr(checks, "run_self_check", lambda *_: found)
    report = examine(device)
    assert named(report, "self-check", "subgroup") == (NOTE, "subgroup: half full")
    assert named(report, "self-check", "shared")[0] == OK
    assert named(report, "self-check", "numbers") == (FAULT, "numbers: exp is wrong for case 5 of 8")


def test_wrong_logits_are_a_fault(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny_model.make_weights()

    def changed() -> dict[str, Any]:
        return {**weights, "model.norm.weight": weights["model.norm.weight"] * np.float32(1.01)}

    reference = tiny_model.logits_of(tiny_model.TOKEN_IDS)
    monkeypatch.setattr(tiny_model, "make_weights", changed)
    monkeypatch.setattr(tiny_model, "logits_of", lambda ids: reference)
    report = Report()
    engine.check_tiny(report, device)
    assert [check.status for check in report.checks] == [FAULT, FAULT]
    assert "logits differ by" in report.checks[0].text


def test_logits_that_are_no_numbers_are_a_fault() -> None:
    found = engine.compared(np.full((1, 4), np.nan, np.float32), np.zeros((1, 4)), 2e-3, "x")
    assert found.status == FAULT


def test_bytes_that_change_on_the_way_are_a_fault(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_words
    monkeypatch.setattr(memory, "read_words", lambda *args: read(*args) ^ np.uint32(1))
    assert memory.check_transfer(device, 4100).status == FAULT
    assert memory.check_allocations(device, (1 << 16,)).status == FAULT


def test_limits_below_what_vulkan_allows_are_a_fault(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(device.info.limits, max_push_constants_bytes=64)
    monkeypatch.setattr(device, "info", dataclasses.replace(device.info, limits=limits))
    found = checks._limits(device)
    assert found.status == FAULT and "max_push_constants_bytes is 64" in found.text


def test_a_model_that_does_not_load_is_a_fault(device: Device, tmp_path: Path) -> None:
    report = Report()
    engine.check_own(report, device, str(tmp_path / "missing"))
    (check,) = report.checks
    assert (check.status, check.name) == (FAULT, "load") and "missing" in check.text


def invoke(*args: str) -> tuple[int, str, str, BaseException | None]:
    result = CliRunner().invoke(cli.app, ["doctor", *args])
    error = None if isinstance(result.exception, SystemExit) else result.exception
    return result.exit_code, result.stdout, result.stderr, error


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:no GPU found")
def test_the_command_prints_a_table_and_ends_with_0() -> None:
    code, out, err, error = invoke()
    assert (code, err, error) == (0, "", None)
    assert "elementwise" in out and "bandwidth" in out and "GB/s" in out
    assert out.splitlines()[-1].startswith("no fault in ")


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:no GPU found")
def test_a_fault_ends_the_command_with_1_and_one_line_that_names_it(broken_kernel: str) -> None:
    code, out, err, error = invoke()
    assert (code, error) == (1, None)
    assert "fault" in out
    (line,) = err.splitlines()
    assert line.startswith("vkdecode: 1 of ") and broken_kernel in line
    code, out, err, _ = invoke("--json", "--device", str(list_devices()[0].ordinal))
    assert (code, len(err.splitlines())) == (1, 1)
    assert json.loads(out)["ok"] is False


def test_a_device_that_is_not_there_is_one_error() -> None:
    for device in ("99", "no such device"):
        code, out, _, error = invoke("--device", device)
        assert (code, out) == (1, "")
        assert isinstance(error, DeviceError) and device in str(error)


def test_wrong_usage_is_exit_code_2() -> None:
    for args in (["--nonsense"], ["argument"], ["--device"]):
        assert invoke(*args)[0] == 2
