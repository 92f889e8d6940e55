"""docs/adding-a-model.md adds a family to a copy of the package by what it says, and its examples run there."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from vkdecode.models import ARCHITECTURES, config
from vkdecode.models.architecture import Architecture
from vkdecode.models.step_builder import StepBuilder

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "adding-a-model.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(?:^`(?P<path>[\w/.]+)`:\n\n)?^```(?P<kind>python|diff)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
BLOCKS = list(BLOCK.finditer(TEXT))
FILES = {one["path"]: one["code"] for one in BLOCKS if one["path"] and one["kind"] == "python"}
CHANGES = {one["path"]: one["code"] for one in BLOCKS if one["kind"] == "diff"}
MODEL = "vkdecode/models/olmo.py"


def program() -> str:
    """The examples that are no files, as one program whose line numbers are the document's."""
    lines = [""] * (TEXT.count("\n") + 1)
    for one in BLOCKS:
        if not one["path"]:
            first = TEXT.count("\n", 0, one.start("code"))
            code = one["code"].splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def changed(text: str, diff: str) -> str:
    """The text after the hunks of a diff, each of which must fit in one place."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package to which everything on the page was done."""
    shutil.copytree(ROOT / "vkdecode", tmp_path / "vkdecode", ignore=shutil.ignore_patterns("__pycache__"))
    for path, code in FILES.items():
        assert not (tmp_path / path).exists()
        (tmp_path / path).write_text(code, encoding="utf-8")
    for path, diff in CHANGES.items():
        if path.startswith("vkdecode/"):
            text = (tmp_path / path).read_text(encoding="utf-8")
            (tmp_path / path).write_text(changed(text, diff), encoding="utf-8")
    return tmp_path


def run(package: Path) -> subprocess.CompletedProcess[str]:
    script = package / DOCUMENT.with_suffix(".py").name
    script.write_text(program(), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"},
    )


def test_the_family_of_the_page_runs(package: Path) -> None:
    done = run(package)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("b.rope(q), b.rope(k)", "b.rope(q), k"),
        ("plus_one=True", "plus_one=False"),
        ('positive_float(config, "layer_norm_eps", 1e-5)', 'positive_float(config, "layer_norm_eps", 1e-1)'),
        ('    refuse(config, "olmo", "clip_qkv")\n', ""),
    ],
    ids=["rotation", "norm", "epsilon", "refusal"],
)
def test_the_page_finds_a_mistake_in_the_file(package: Path, right: str, wrong: str) -> None:
    assert FILES[MODEL].count(right) == 1
    (package / MODEL).write_text(FILES[MODEL].replace(right, wrong), encoding="utf-8")
    done = run(package)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_a_family_costs_one_short_file_and_a_line_with_its_import() -> None:
    in_models = [path for path in (*FILES, *CHANGES) if path.startswith("vkdecode/models/")]
    assert in_models == [MODEL, "vkdecode/models/registry.py"]
    assert FILES[MODEL].count("\n") < 200
    added = [line for line in CHANGES["vkdecode/models/registry.py"].splitlines() if line.startswith(("+", "-"))]
    assert added == ["+    olmo,", '+    "olmo": olmo.ARCHITECTURE,']
    for path in (ROOT / "vkdecode" / "models").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "Architecture(parse" in source:
            assert source.count("\n") < 200, path.name


def test_the_page_changes_what_is_there_and_adds_what_is_not() -> None:
    assert set(CHANGES) == {
        "vkdecode/models/registry.py",
        "vkdecode/weights/families/__init__.py",
        "tests/pure/gguf_converter.py",
    }
    for path, diff in CHANGES.items():
        before = (ROOT / path).read_text(encoding="utf-8")
        after = changed(before, diff)
        assert after != before
        compile(after, path, "exec")
    assert "olmo" not in ARCHITECTURES, "the page needs another example, since this family is in the tree now"


def test_every_part_that_a_family_is_made_of_is_named() -> None:
    parts = [f"b.{name}" for name, _ in inspect.getmembers(StepBuilder, inspect.isfunction) if not name.startswith("_")]
    readers = [
        name
        for name, one in inspect.getmembers(config, inspect.isfunction)
        if one.__module__ == config.__name__ and not name.startswith("_")
    ]
    assert len(parts) > 10 and len(readers) > 5
    for name in (*parts, *readers, *(one.name for one in fields(Architecture))):
        assert re.search(rf"\b{re.escape(name)}\b", TEXT), name
