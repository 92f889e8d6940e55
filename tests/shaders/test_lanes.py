"""The tests of this folder again, on lavapipe subgroups of the other widths.

The driver reads its vector width when it loads, so that each width takes a process of its own. Mesa's shader cache does
not tell the widths apart, so that each takes a cache of its own too; these stay between runs in `.cache/`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_lab import DISPATCHED_FILE, EXPECTED_LANES, WIDTHS_BITS, device, subgroup

from vkdecode.gpu import registry

FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / ".cache"
IN_CHILD = EXPECTED_LANES in os.environ


@dataclass(frozen=True)
class Run:
    """What one process left."""

    output: str
    status: int
    tests: int
    passed: int
    dispatched: list[str]


def start(lanes: int, folder: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "LP_NATIVE_VECTOR_WIDTH": str(WIDTHS_BITS[lanes]),
        "MESA_SHADER_CACHE_DIR": str(CACHE / f"mesa-{WIDTHS_BITS[lanes]}"),
        EXPECTED_LANES: str(lanes),
        DISPATCHED_FILE: str(folder / f"dispatched-{lanes}"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--color=no"]
    # The tests that a wrong result is noticed are about the comparison, which is the same at each width.
    command += ["-k", "not is_noticed"]
    report = folder / f"report-{lanes}.xml"
    return subprocess.Popen(
        [*command, f"--junit-xml={report}", str(FOLDER)],
        env=environment,
        cwd=FOLDER.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(lanes: int, process: subprocess.Popen[str], folder: Path) -> Run:
    output, _ = process.communicate()
    report = folder / f"report-{lanes}.xml"
    if not report.exists():
        return Run(output, process.returncode, 0, 0, [])
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    counts = [{name: int(suite.get(name, "0")) for name in names} for suite in suites]
    tests = sum(count["tests"] for count in counts)
    lost = sum(count["failures"] + count["errors"] + count["skipped"] for count in counts)
    dispatched = (folder / f"dispatched-{lanes}").read_text().splitlines()
    return Run(output, process.returncode, tests, tests - lost, dispatched)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """The other widths' runs, side by side."""
    folder = tmp_path_factory.mktemp("lanes")
    processes = {lanes: start(lanes, folder) for lanes in WIDTHS_BITS if lanes != subgroup()}
    try:
        return {lanes: finish(lanes, process, folder) for lanes, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()


def test_the_device_has_the_expected_subgroups() -> None:
    assert device().info.subgroup_size == int(os.environ.get(EXPECTED_LANES, subgroup()))
    assert subgroup() in WIDTHS_BITS


if not IN_CHILD:

    def test_every_kernel_passes_at_every_other_width(runs: dict[int, Run]) -> None:
        assert len(runs) >= 2
        for lanes, run in runs.items():
            assert run.status == 0, f"{lanes} lanes:\n{run.output}"
            assert run.passed == run.tests, f"{lanes} lanes:\n{run.output}"
            assert run.tests > len(registry().keys())
            assert run.dispatched == registry().keys()
