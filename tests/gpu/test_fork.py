"""A child that was forked after a device was opened: the driver's threads stay with the parent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
SCRIPT = """
import os, sys
import vkdecode as vk

model = vk.load(sys.argv[1])
before = vk.generate(model, [1, 2], max_tokens=3).token_ids
child = os.fork()
if not child:
    try:
        vk.generate(model, [1, 2], max_tokens=3)
    except vk.DeviceError as error:
        assert "spawn method" in str(error)
    try:
        vk.load(sys.argv[1])
    except vk.DeviceError as error:
        assert "spawn method" in str(error)
        model.close()
        sys.exit(7)
    sys.exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert vk.generate(model, [1, 2], max_tokens=3).token_ids == before
print("done")
"""


def test_a_forked_child_gets_an_error_and_exits() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
