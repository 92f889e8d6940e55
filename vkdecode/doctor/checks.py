"""All checks in order, on one device."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vkdecode.doctor import expert_cases, kv_cases, linear_cases, other_cases, top_k_cases
from vkdecode.doctor.dispatch import Wrong
from vkdecode.doctor.engine import check_own, check_tiny
from vkdecode.doctor.memory import check_allocations, check_transfer, measure_bandwidth
from vkdecode.doctor.report import FAULT, NOTE, OK, Finding, Report
from vkdecode.gpu import Device, Lanes, SelfCheck, lanes_of, registry, run_self_check, shared_lanes, subgroup_lanes

KernelCheck = Callable[[Device, Lanes, str], float]
_PACKAGES = ("vkdecode", "kp", "vulkan", "numpy")


def examine(device: Device, model: str | None = None, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Run every check on an open device; nothing that goes wrong ends it early.

    Args:
        device: the device.
        model: a Hugging Face folder or a `.gguf` file to try as well.
        progress: called with what comes next.

    """
    report = Report(facts=facts_of(device))
    progress("limits and self-check")
    report.run("device", "limits", lambda: _limits(device))
    check = _self_checks(report, device)
    report.run("device", "lanes", lambda: _lanes(report, device))
    report.run("kernels", "manifest", lambda: _manifest(report))
    for lanes in _forms(device, check):
        for family, keys, one in _families(lanes):
            progress(f"kernels: {family}, {lanes.form}")
            report.run(
                "kernels",
                f"{family}, {lanes.form}",
                _family_check(report, device, lanes, keys, one),
            )
    progress("kernels without lanes of their own")
    plain = _forms(device, check)[0]
    for family, keys, one in _plain_families():
        report.run("kernels", family, _family_check(report, device, plain, keys, one))
    progress("memory")
    report.run("memory", "transfer", lambda: check_transfer(device))
    report.run("memory", "allocation", lambda: check_allocations(device))
    report.run("memory", "bandwidth", lambda: measure_bandwidth(device))
    progress("golden model")
    check_tiny(report, device)
    if model is not None:
        progress("model")
        check_own(report, device, model)
    return report


def facts_of(device: Device) -> dict[str, Any]:
    """Versions, platform and device, as JSON values."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"versions": versions, "platform": f"{sys.platform} {platform.machine()}", "device": asdict(device.info)}


def _limits(device: Device) -> Finding:
    """The limits that plans are held to, against the least that Vulkan allows."""
    limits = device.info.limits
    least = {
        "max_storage_buffer_range_bytes": 1 << 27,
        "max_compute_work_group_invocations": 128,
        "max_compute_shared_memory_bytes": 16384,
        "max_push_constants_bytes": 128,
        "max_storage_buffers_per_stage": 4,
        "max_memory_allocation_count": 4096,
    }
    low = [f"{name} is {getattr(limits, name)}" for name, value in least.items() if getattr(limits, name) < value]
    low += [f"work group count is {count}" for count in limits.max_compute_work_group_count if count < 65535]
    if low:
        return Finding(FAULT, f"below what Vulkan allows: {'; '.join(low)}")
    return Finding(
        OK,
        f"storage range {limits.max_storage_buffer_range_bytes >> 20} MiB, "
        f"{limits.max_compute_work_group_invocations} invocations, "
        f"{limits.max_compute_shared_memory_bytes >> 10} KiB shared, subgroups of {device.info.subgroup_size}; memory",
        device.info.heap_bytes / 2**30,
        "GiB",
    )


def _self_checks(report: Report, device: Device) -> SelfCheck:
    """The start-up check, a line for each of its parts."""
    results = [SelfCheck(False, False, False, ("the self-check did not run",))]

    def run() -> Finding:
        results.append(run_self_check(device, shared_lanes(device.info).workgroup))
        return Finding(OK, "ran")

    report.run("self-check", "run", run)
    check = results[-1]
    report.facts["self_check"] = asdict(check)
    if len(results) > 1:
        for name, good, bad in (
            # Without subgroups the shared form serves, so that this is no fault.
            ("subgroup", check.subgroup, NOTE),
            ("shared", check.shared, FAULT),
            ("numbers", check.numbers, FAULT),
        ):
            lines = [line for line in check.details if line.startswith(name)]
            finding = Finding(OK, "as the kernels rely on") if good else Finding(bad, "; ".join(lines))
            report.run("self-check", name, lambda found=finding: found)  # type: ignore[misc] # mypy does not infer a lambda's default
    return check


def _lanes(report: Report, device: Device) -> Finding:
    lanes = lanes_of(device)
    report.facts["lanes"] = asdict(lanes)
    return Finding(OK, f"models use the {lanes.form} form, {lanes.workgroup} invocations, tiles of {lanes.tile} rows")


def _manifest(report: Report) -> Finding:
    """Every compiled kernel is there and undamaged."""
    keys = registry().keys()
    report.kernels_known = len(keys)
    for key in keys:
        name, *terms = key.split()
        registry().get(name, **dict(term.split("=", 1) for term in terms))
    return Finding(OK, "every compiled kernel is there and undamaged", len(keys))


def _forms(device: Device, check: SelfCheck) -> list[Lanes]:
    """The device's own form first, then the other one where it is possible."""
    forms = [shared_lanes(device.info)]
    if check.subgroup:
        forms.insert(0 if device.info.kind == "cpu" else 1, subgroup_lanes(device.info))
    return forms


def _families(lanes: Lanes) -> list[tuple[str, Sequence[str], KernelCheck]]:
    form = lanes.form
    return [
        ("linear", linear_cases.linear_keys(lanes), linear_cases.check_linear),
        ("norm", linear_cases.norm_keys(form), linear_cases.check_norm),
        ("attention", kv_cases.attention_keys(form), kv_cases.check_attention),
        ("top-k", top_k_cases.top_k_keys(form), top_k_cases.check_top_k),
    ]


def _plain_families() -> list[tuple[str, Sequence[str], KernelCheck]]:
    return [
        ("embed", linear_cases.EMBED_KEYS, linear_cases.check_embed),
        ("KV cache", kv_cases.KV_KEYS, kv_cases.check_kv),
        ("elementwise", other_cases.ELEMENTWISE_KEYS, other_cases.check_elementwise),
        ("rope and moves", other_cases.MOVE_KEYS, other_cases.check_move),
        ("experts", expert_cases.EXPERT_KEYS, expert_cases.check_experts),
        ("group maxima", top_k_cases.GROUP_MAX_KEYS, top_k_cases.check_group_max),
    ]


def _family_check(
    report: Report, device: Device, lanes: Lanes, keys: Sequence[str], check: KernelCheck
) -> Callable[[], Finding]:
    """A check of several kernels; its fault names each that is wrong."""

    def run() -> Finding:
        worst = 0.0
        wrong: dict[str, str] = {}
        for key in keys:
            report.kernels_run.append(key)
            try:
                worst = max(worst, check(device, lanes, key))
            except Wrong as error:
                wrong[key] = str(error)
            except Exception as error:
                wrong[key] = f"{type(error).__name__}: {error}"
        if wrong:
            text = "; ".join(f"'{key}' {' '.join(line.split())}" for key, line in wrong.items())
            return Finding(FAULT, text, len(wrong), "kernels", tuple(wrong))
        return Finding(OK, f"{len(keys)} kernels against numpy; largest relative error", worst)

    return run
