"""The examples of docs/decode-contract.md run in order, and every rule has one."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from vkdecode.decode import Stats, rebind

DOCUMENT = Path(__file__).parents[2] / "docs" / "decode-contract.md"
LLAMA = Path(__file__).parents[1] / "data" / "tiny" / "llama"
TEXT = DOCUMENT.read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program() -> str:
    """All examples as one program whose line numbers are the document's."""
    lines = [""] * (TEXT.count("\n") + 1)
    for found in EXAMPLE.finditer(TEXT):
        first = TEXT.count("\n", 0, found.start(1))
        code = found.group(1).splitlines()
        lines[first : first + len(code)] = code
    lines[0] = "import sys, vkdecode; model = vkdecode.load(sys.argv[1], device=0)"
    return "\n".join(lines)


def test_examples_run_in_order(tmp_path: Path) -> None:
    script = tmp_path / DOCUMENT.with_suffix(".py").name
    script.write_text(program(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(LLAMA)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_rule_has_an_example_that_asserts() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert len(sections) > 10
    for section in sections:
        examples = EXAMPLE.findall(section)
        title = section.splitlines()[0]
        assert examples, f"section '{title}' has no example"
        assert all(re.search(r"\bassert", example) for example in examples), title


def test_every_refusal_and_counter_is_named() -> None:
    kinds = [name for name in vars(rebind) if name.isupper()]
    assert len(kinds) == 5
    for name in [*kinds, *(one.name for one in fields(Stats) if not one.name.startswith("prefill_"))]:
        assert f"`{name}`" in TEXT, name
