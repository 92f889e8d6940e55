"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vkdecode.weights.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])
_NAMED = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|comp|glsl|sh|toml)\b")
_BUILT_OR_GIVEN = re.compile(r"model\.(?:gguf|safetensors)|/olmo\.py$")  # the last is what docs/adding-a-model.md adds


def named_files(text: str) -> list[str]:
    """Paths with a folder in them, as the documents write them: from the root, or from the package."""
    return [one for one in _NAMED.findall(text) if not _BUILT_OR_GIVEN.search(one)]


def missing(text: str) -> list[str]:
    return [one for one in named_files(text) if not (ROOT / one).is_file() and not (ROOT / "vkdecode" / one).is_file()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_documents_exist(path: Path) -> None:
    assert missing(path.read_text(encoding="utf-8")) == []


def test_a_file_that_is_not_there_is_found() -> None:
    text = "see `gpu/device.py`, [x](docs/architecture.md), `tests/pure/test_docs.py`, but `tests/pure/test_none.py`"
    assert len(named_files(text)) == 4
    assert missing(text) == ["tests/pure/test_none.py"]


def test_the_readme_lists_the_gguf_architectures_that_are_read() -> None:
    (row,) = re.findall(
        r"^\| GGUF architectures read \| (.*) \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    listed = re.sub(r" \([^)]*\)", "", row).split(", ")
    assert sorted(listed) == sorted({family.arch for family in FAMILIES})


def test_each_row_on_portability_names_a_test() -> None:
    text = (ROOT / "docs" / "portability.md").read_text(encoding="utf-8")
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| Assumption"))
    ]
    assert len(rows) >= 20
    for row in rows:
        cells = row.strip("|").split(" | ")
        assert len(cells) == 3, row
        assert "tests/" in cells[2], row
