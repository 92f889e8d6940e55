"""Closing a device, model, cache or context while a plan holds it: errors and clean exits, never a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from closing_scenarios import SCENARIOS

SCRIPT = Path(__file__).with_name("closing_scenarios.py")


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_ends_cleanly(name: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), name], capture_output=True, text=True, timeout=120, check=False)
    # Some builds of lavapipe say that they are no conformant driver.
    complaints = [line for line in done.stderr.splitlines() if "lavapipe is not a conformant" not in line]
    assert (done.returncode, done.stdout, complaints) == (0, "", [])
