"""The contract with two physical devices that only their ordinals tell apart, in a process that has them."""

from __future__ import annotations

import ast
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from two_icds import two_device_environment

CASES = Path(__file__).with_name("two_device_cases.py")
NAMES = [
    node.name
    for node in ast.parse(CASES.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each case, all runs of it together; empty where nothing did."""
    folder = tmp_path_factory.mktemp("two_devices")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(CASES)]
    done = subprocess.run(
        command, env=two_device_environment(folder), capture_output=True, text=True, timeout=300, check=False
    )
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").split("[")[0]
        trouble = [
            f"{case.get('name')}: {child.text}" for child in case if child.tag in ("failure", "error", "skipped")
        ]
        found[name] = found.get(name, "") + "\n".join(trouble)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("name", NAMES)
def test_with_two_devices(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, "it did not run") == ""
