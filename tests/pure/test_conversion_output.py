"""A conversion's target appears whole or not at all, and nothing is replaced that was not meant."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_files import TINY

from vkdecode.conversion import convert
from vkdecode.errors import OutputError
from vkdecode.weights import open_weights

TARGETS = ("m.gguf", "folder")


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(target: Path, source: Path = TINY / "llama", overwrite: bool = False) -> str:
    with pytest.raises(OutputError) as caught:
        convert(source, target, overwrite=overwrite)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_is_there_stays_unless_asked(tmp_path: Path, name: str) -> None:
    convert(TINY / "llama", tmp_path / name)
    before = listing(tmp_path)
    assert "exists already" in refusal(tmp_path / name, TINY / "llama-tied-mqa")
    assert listing(tmp_path) == before
    if name == "folder":
        (tmp_path / name / "extra.txt").write_text("of the old model")
    convert(TINY / "llama-tied-mqa", tmp_path / name, overwrite=True)
    assert open_weights(tmp_path / name).config["tie_word_embeddings"] is True
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert not (tmp_path / name / "extra.txt").exists()


def test_what_is_no_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letters.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir.gguf").mkdir()
    (tmp_path / "real.gguf").write_text("x")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.gguf")
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "nothing")
    before = listing(tmp_path)
    for name, words in {
        "folder": "without a config.json",
        "file": "is a file or a link",
        "dir.gguf": "is a folder or a link",
        "link.gguf": "is a folder or a link",
        "dangling.gguf": "is a folder or a link",
    }.items():
        assert words in refusal(tmp_path / name, overwrite=True)
    assert listing(tmp_path) == before


def test_the_source_is_not_its_own_target(tmp_path: Path) -> None:
    source = tmp_path / "models" / "llama"
    shutil.copytree(TINY / "llama", source)
    before = listing(tmp_path)
    for target in (source, tmp_path / "models", source / ".." / "llama"):
        assert "is or holds the model that is read" in refusal(target, source, overwrite=True)
    assert listing(tmp_path) == before
    convert(source, source / "m.gguf")
    assert "is or holds" in refusal(source / "m.gguf", source / "m.gguf", overwrite=True)


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "none" / "m.gguf")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("progress"), OSError(errno.ENOSPC, "x")])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_an_interruption_leaves_everything_as_it_was(
    tmp_path: Path, name: str, there: bool, error: BaseException
) -> None:
    if there:
        convert(TINY / "llama-tied-mqa", tmp_path / name)
    before = listing(tmp_path)
    calls = 0

    def interrupt(_done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            assert any(path.name.endswith(".part") for path in tmp_path.iterdir())
            raise error

    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        convert(TINY / "llama", tmp_path / name, overwrite=True, progress=interrupt)
    assert calls == 5
    assert listing(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ([name] if there else [])


@pytest.mark.parametrize("name", TARGETS)
def test_a_full_disk_is_one_line(tmp_path: Path, name: str) -> None:
    """A limit on the size of files stands for the disk; unlike a made-up error it also fails while closing."""
    code = (
        "import resource, signal, sys; from vkdecode.cli import main; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)); main()"
    )
    command = [sys.executable, "-c", code, "convert", str(TINY / "llama"), str(tmp_path / name)]
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert ended.returncode == 1
    assert ended.stderr == f"vkdecode: error: cannot write {tmp_path / name}: the disk is full; nothing was changed\n"
    assert list(tmp_path.iterdir()) == []


def test_names_that_the_system_refuses(tmp_path: Path) -> None:
    assert "File name too long" in refusal(tmp_path / f"{'n' * 300}.gguf")
    assert "null byte" in refusal(tmp_path / "a\0b.gguf")
    convert(TINY / "llama", tmp_path / f"{'n' * 250}.gguf")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_appears_meanwhile_stays(tmp_path: Path, name: str) -> None:
    def appear(done: int, total: int) -> None:
        if done == total and not (tmp_path / name).exists():
            shutil.copytree(TINY / "phi", tmp_path / name)

    with pytest.raises(OutputError, match="come into being meanwhile"):
        convert(TINY / "llama", tmp_path / name, progress=appear)
    assert listing(tmp_path / name) == listing(TINY / "phi")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_too_little_room_is_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    assert "bytes, but its disk has 1000 free" in refusal(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Path, _target: Path) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    assert refusal(tmp_path / "m.gguf").endswith("Permission denied; nothing was changed")
    assert list(tmp_path.iterdir()) == []


def test_an_old_folder_comes_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(TINY / "llama", tmp_path / "m")
    before = listing(tmp_path)
    rename: Callable[[Path, Path], Path] = Path.rename

    def fail_second(self: Path, target: Path) -> Path:
        if self.name.endswith(".part"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    assert "Input/output error" in refusal(tmp_path / "m", TINY / "llama-tied-mqa", overwrite=True)
    assert listing(tmp_path) == before
