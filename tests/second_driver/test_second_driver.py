"""Parts of the suite on SwiftShader, another Vulkan driver: what one hides another may show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("norm", "rope", "elementwise", "moves", "kv_write", "kv_move", "embed")
PARTS = ["tests/second_driver/model_cases.py", *(f"tests/shaders/test_kernel_{name}.py" for name in KERNELS)]


@pytest.fixture(scope="module")
def icd() -> str:
    """SwiftShader's ICD file; skips, saying why, where it cannot be had."""
    script = [sys.executable, "scripts/fetch_swiftshader.py"]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    return found.stdout.strip()


@pytest.mark.parametrize("part", PARTS)
def test_on_swiftshader(icd: str, part: str) -> None:
    # What tells a worker of this run that it is one must not reach the other.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", part],
        cwd=ROOT,
        env={**environment, "VK_DRIVER_FILES": icd, "VK_ICD_FILENAMES": icd},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]
