"""The bench measures what it says it does; its figures are nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_llama import TINY

from vkdecode.bench import bench
from vkdecode.errors import InvalidInputError
from vkdecode.models import Model


def test_every_way_is_measured_and_the_model_is_left_as_it_was(llama: Model) -> None:
    before = llama.device.allocated_bytes
    rows = bench(llama, tokens=2, context_len=5)
    assert [(row.group, row.name) for row in rows] == [
        ("prompt", "5 tokens"),
        ("decode", "captured, offset by device"),
        ("decode", "captured, offset by symenv"),
        ("decode", "held, offset by device"),
        ("decode", "held, offset by symenv"),
        ("decode", "rebuild, offset by device"),
        ("decode", "rebuild, offset by symenv"),
        ("next token", "same cache: plan reused"),
        ("next token", "other cache: plan re-bound"),
        ("next token", "other cache: plan built anew"),
    ]
    assert all(row.milliseconds > 0 and row.tokens_per_second == 1000 / row.milliseconds for row in rows)
    assert llama.device.allocated_bytes == before


@pytest.mark.parametrize(("tokens", "context_len"), [(0, 5), (5, 0), (100, 100)])
def test_counts_that_do_not_fit_are_refused(llama: Model, tokens: int, context_len: int) -> None:
    with pytest.raises(InvalidInputError, match="do not fit a context of 1 to 128"):
        bench(llama, tokens, context_len)


def test_the_command_prints_json() -> None:
    command = [
        sys.executable,
        "-m",
        "vkdecode",
        "bench",
        str(TINY / "phi"),
        "--tokens",
        "1",
        "--context",
        "3",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 10
    assert set(rows[0]) == {"group", "name", "milliseconds", "tokens_per_second"}
