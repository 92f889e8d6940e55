"""Building Kompute, with a small archive in the release's place and a pip that only writes down how it was called."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vkdecode.errors import DeviceError
from vkdecode.gpu import build_kompute
from vkdecode.gpu.build_kompute import EDITS, RELEASE, VERSION, BuildError, apply_edits, main
from vkdecode.gpu.kompute import PATCH, load_kompute

WHEEL = f"kp-{VERSION}-cp311-cp311-linux_x86_64.whl"


def release() -> dict[str, str]:
    """Files that hold every text to replace once."""
    files: dict[str, str] = {}
    for name, anchor, _ in EDITS:
        files[name] = files.get(name, "") + f"before\n{anchor}\nafter\n"
    return files


def unpacked(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_every_edit_is_made(tmp_path: Path) -> None:
    apply_edits(unpacked(tmp_path, release()))
    for name, _, replacement in EDITS:
        assert replacement in (tmp_path / name).read_text()
    assert f"version='{VERSION}'" in (tmp_path / "setup.py").read_text()
    assert "numpy<2" not in (tmp_path / "setup.py").read_text()
    assert "pybind11==" in (tmp_path / "pyproject.toml").read_text()


def test_the_patch_level_is_the_one_that_is_looked_for() -> None:
    assert build_kompute.PATCH == PATCH and f"{RELEASE}+vkdecode{PATCH}" == VERSION


@pytest.mark.parametrize("edit", range(len(EDITS)))
@pytest.mark.parametrize("count", [0, 2])
def test_a_text_that_is_not_there_once_is_named(tmp_path: Path, edit: int, count: int) -> None:
    name, anchor, _ = EDITS[edit]
    files = release()
    files[name] = files[name].replace(anchor, anchor * count)
    with pytest.raises(BuildError) as caught:
        apply_edits(unpacked(tmp_path, files))
    line = str(caught.value)
    assert line.startswith(f"{name} of Kompute should hold ") and "\n" not in line
    assert repr(anchor.strip().splitlines()[0]) in line and f" {count} times" in line


def test_a_lost_file_is_named(tmp_path: Path) -> None:
    files = release()
    del files["src/OpAlgoDispatch.cpp"]
    with pytest.raises(BuildError, match=r"OpAlgoDispatch\.cpp of Kompute should hold .* 0 times"):
        apply_edits(unpacked(tmp_path, files))


class Pip:
    """Takes the place of every program that the script starts."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status: dict[str, int] = {}
        self.import_problems: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[1] == "-c":
            problem = self.import_problems.pop(0) if self.import_problems else ""
            return subprocess.CompletedProcess(command, bool(problem), "", problem)
        assert command[:3] == [sys.executable, "-m", "pip"]
        words = [word for word in command[3:] if not word.startswith("-")]
        self.calls.append(words[0])
        status = self.status.get(words[0], 0)
        if not status and words[0] == "download":
            files = release()
            with tarfile.open(Path(words[-2]) / f"kp-{RELEASE}.tar.gz", "w:gz") as archive:
                for name, text in files.items():
                    member = tarfile.TarInfo(f"kp-{RELEASE}/{name}")
                    member.size = len(text.encode())
                    archive.addfile(member, io.BytesIO(text.encode()))
        if not status and words[0] == "wheel":
            assert VERSION in (Path(words[-1]) / "setup.py").read_text()
            Path(words[-2]).mkdir()
            (Path(words[-2]) / WHEEL).write_text("wheel")
        return subprocess.CompletedProcess(command, status)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    fake = Pip()
    monkeypatch.setattr("subprocess.run", fake)
    monkeypatch.setattr("shutil.which", lambda name: f"bin/{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


@pytest.fixture
def run(pip: Pip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["build_kompute", *arguments])
        pip.calls.clear()
        status = main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_a_second_run_builds_nothing(pip: Pip, run: Run, tmp_path: Path) -> None:
    status, out, _ = run("--output", str(tmp_path / "dist"))
    assert (status, out) == (0, f"{tmp_path / 'dist' / WHEEL}\n")
    assert pip.calls == ["download", "wheel"] and (tmp_path / "dist" / WHEEL).read_text() == "wheel"
    assert run("--install")[0] == 0 and pip.calls == ["install"]
    assert run("--again")[0] == 0 and pip.calls == ["wheel"]
    assert not list((tmp_path / "cache/vkdecode/kompute").glob("tmp*"))


def test_a_change_of_the_script_or_of_python_builds_again(pip: Pip, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: "cpython-399-x")
    assert run()[0] == 0 and pip.calls == ["wheel"]
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"changed")
    assert run()[0] == 0 and pip.calls == ["wheel"]


def test_a_kept_wheel_that_does_not_load_is_built_again(pip: Pip, run: Run) -> None:
    run()
    pip.import_problems = ["Traceback\nImportError: no such library"]
    assert run("--install")[0] == 0
    assert pip.calls == ["install", "wheel", "install"]
    pip.import_problems = ["ImportError: no such library"] * 2
    status, out, error = run("--install")
    assert (status, out) == (1, "")
    assert error.endswith("error: Kompute was built and installed but does not load: ImportError: no such library\n")


@pytest.mark.parametrize("step", ["download", "wheel", "install"])
@pytest.mark.parametrize(("status", "told"), [(1, 1), (-9, 137), (130, 130)])
def test_a_failing_step_is_one_line_and_a_signal_is_passed_on(
    pip: Pip, run: Run, step: str, status: int, told: int
) -> None:
    pip.status[step] = status
    result, out, error = run("--install")
    assert (result, out) == (told, "")
    assert error.startswith(f"build_kompute: error: pip {step} failed") and len(error.splitlines()) == 1
    pip.status.clear()
    assert run("--install")[0] == 0


@pytest.mark.parametrize(("tool", "package"), [("cmake", "cmake"), ("c++", "g++")])
def test_a_missing_tool_is_named(pip: Pip, run: Run, monkeypatch: pytest.MonkeyPatch, tool: str, package: str) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == tool else f"bin/{name}")
    status, _, error = run()
    assert status == 1 and not pip.calls
    assert error == (
        f"build_kompute: error: Kompute cannot be built without {tool}; install it (Debian package {package})\n"
    )


def test_another_build_of_kompute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "run `make setup` in a clone, else `python -m vkdecode.gpu.build_kompute --install`"
    module: Any = types.ModuleType("kp")
    module.__version__ = RELEASE
    for patch in (None, PATCH - 1, PATCH + 1):
        module.vkdecode_patch = patch
        module.OpMemoryBarrier = object
        monkeypatch.setitem(sys.modules, "kp", module)
        with pytest.raises(DeviceError) as caught:
            load_kompute()
        assert str(caught.value) == f"the Kompute here (kp {RELEASE}) is not vkdecode's build of it; {remedy}"
    monkeypatch.setitem(sys.modules, "kp", None)
    with pytest.raises(DeviceError) as caught:
        load_kompute()
    assert str(caught.value).endswith(remedy) and "\n" not in str(caught.value)
