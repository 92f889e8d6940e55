"""The tests of this folder again, on lavapipe subgroups of the other widths.

The driver reads its vector width when it loads, so that each width takes a process of its own. Mesa's shader cache does
not tell the widths apart, so that each takes a cache of its own too; these stay between runs in `.cache/`. Other
drivers have one width, at which the folder's tests run anyway.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from kernel_lab import DISPATCHED_FILE, EXPECTED_LANES, WIDTHS_BITS, device, subgroup

from vkdecode.gpu import registry

FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / ".cache"
IN_CHILD = EXPECTED_LANES in os.environ


def environment(lanes: int, dispatched: Path) -> dict[str, str]:
    CACHE.mkdir(exist_ok=True)  # Mesa makes the last folder only, and goes without a cache where it cannot
    return {
        **os.environ,
        "LP_NATIVE_VECTOR_WIDTH": str(WIDTHS_BITS[lanes]),
        "MESA_SHADER_CACHE_DIR": str(CACHE / f"mesa-{WIDTHS_BITS[lanes]}"),
        # Optimizing took 40 % of the time, and is the driver's; the tests at its own width have it.
        "GALLIVM_PERF": "nopt",
        EXPECTED_LANES: str(lanes),
        DISPATCHED_FILE: str(dispatched),
    }


def widths() -> list[int]:
    """Lanes that a subgroup of the device can be made to have."""
    return list(WIDTHS_BITS) if "llvmpipe" in device().info.driver else [subgroup()]


def test_the_device_has_the_expected_subgroups() -> None:
    assert subgroup() == int(os.environ.get(EXPECTED_LANES, subgroup()))
    assert subgroup() in widths()


if not IN_CHILD:

    @pytest.mark.parametrize("number", range(len(WIDTHS_BITS) - 1))
    def test_every_kernel_passes_at_every_other_width(number: int, tmp_path: Path) -> None:
        if len(widths()) == 1:
            pytest.skip(f"{device().info.driver} has subgroups of {subgroup()} lanes and no others")
        lanes = [width for width in widths() if width != subgroup()][number]
        report, dispatched = tmp_path / "report.xml", tmp_path / "dispatched"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--color=no"]
        # The tests that a wrong result is noticed are about the comparison, which is the same at each width.
        command += ["-k", "not is_noticed", f"--junit-xml={report}", str(FOLDER)]
        done = subprocess.run(
            command, env=environment(lanes, dispatched), cwd=FOLDER.parents[1], capture_output=True, text=True
        )
        output = f"{lanes} lanes:\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, output
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
        counts = {
            name: sum(int(suite.get(name, "0")) for suite in suites)
            for name in ("tests", "failures", "errors", "skipped")
        }
        tests = counts.pop("tests")
        assert not any(counts.values()), output
        assert tests > len(registry().keys())
        assert dispatched.read_text().splitlines() == registry().keys()
