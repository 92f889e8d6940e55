"""SwiftShader is fetched whole or not at all, and one line says why; `apt-get` and `dpkg` are stubs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_swiftshader.py"
LIBRARY, MANIFEST = "libvk_swiftshader.so", "vk_swiftshader_icd.json"
IN_PACKAGE = "usr/lib/chromium"

# Each writes its arguments to calls.log. The package is an empty file, and what is in it lies in the folder "package".
APT_GET = f"""#!{sys.executable}
import os, pathlib, sys
here = pathlib.Path(sys.argv[0]).parent
with (here / "calls.log").open("a") as log:
    log.write("apt-get " + " ".join(sys.argv[1:]) + "\\n")
if sys.argv[-1] == "update":
    sys.exit("W: noise\\nE: no route to the mirror" if (here / "no-network").exists() else 0)
sys.stderr.write("W: Download is performed unsandboxed as root\\n")
own = any("Dir::State::Lists" in word for word in sys.argv)
if (here / "no-network").exists() or (not own and (here / "no-lists").exists()):
    sys.exit("E: Unable to locate package chromium-common")
pathlib.Path("chromium-common_1_all.deb").touch()
"""
DPKG = f"""#!{sys.executable}
import pathlib, shutil, sys
here = pathlib.Path(sys.argv[0]).parent
with (here / "calls.log").open("a") as log:
    log.write("dpkg\\n")
if (here / "killed").exists():
    pathlib.Path(sys.argv[3]).mkdir()
    (pathlib.Path(sys.argv[3]) / "half").touch()
    import os, signal
    os.kill(os.getppid(), signal.SIGKILL)
assert sys.argv[1] == "-x" and pathlib.Path(sys.argv[2]).is_file()
shutil.copytree(here / "package", sys.argv[3])
"""


class Machine:
    """A checkout with the script, and a PATH that holds nothing but the stubs."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.root, self.stubs = folder / "clone", folder / "bin"
        self.script = self.root / "scripts" / SCRIPT.name
        self.script.parent.mkdir(parents=True)
        shutil.copy(SCRIPT, self.script)
        package = self.stubs / "package" / IN_PACKAGE
        package.mkdir(parents=True)
        shutil.copy(library, package / LIBRARY)
        (package / "chromium").write_text("much else")
        self.manifest = package / MANIFEST
        self.manifest.write_text('{"file_format_version": "1.0.0", "ICD": {"library_path": "/usr/lib/elsewhere.so"}}')
        self.library = package / LIBRARY
        for name, text in (("apt-get", APT_GET), ("dpkg", DPKG)):
            (self.stubs / name).write_text(text)
            (self.stubs / name).chmod(0o755)

    @property
    def kept(self) -> Path:
        return self.root / ".cache" / "swiftshader"

    def tell(self, name: str) -> None:
        (self.stubs / name).touch()

    def run(self) -> subprocess.CompletedProcess[str]:
        (self.stubs / "calls.log").write_text("")
        return subprocess.run(
            [sys.executable, str(self.script)],
            env={"PATH": str(self.stubs)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        return [
            line.split()[0] + " " + line.split()[-1] for line in (self.stubs / "calls.log").read_text().splitlines()
        ]

    def refused(self) -> str:
        """The one line that a run ends with, which leaves nothing behind."""
        done = self.run()
        assert done.returncode == 1 and done.stdout == ""
        assert not self.kept.exists() and not list((self.root / ".cache").glob("swiftshader-*"))
        *progress, line = done.stderr.splitlines()
        assert all(one.startswith("set-up: fetching SwiftShader") for one in progress)
        return line


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the one function that is looked for."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text("void *vk_icdGetInstanceProcAddr(void *i, const char *n) { return 0; }\n")
    subprocess.run(["c++", "-x", "c", "-shared", "-fPIC", "-o", "driver.so", "driver.c"], cwd=folder, check=True)
    return folder / "driver.so"


@pytest.fixture
def machine(tmp_path: Path, driver: Path) -> Machine:
    return Machine(tmp_path, driver)


def test_two_files_are_kept_and_a_second_run_does_nothing(machine: Machine) -> None:
    first = machine.run()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{machine.kept / MANIFEST}\n"
    assert sorted(one.name for one in machine.kept.iterdir()) == [LIBRARY, MANIFEST]
    assert sorted(one.name for one in machine.kept.parent.iterdir()) == ["swiftshader", "swiftshader.lock"]
    assert json.loads((machine.kept / MANIFEST).read_text())["ICD"]["library_path"] == f"./{LIBRARY}"
    assert machine.calls == ["apt-get chromium-common", "dpkg dpkg"]
    second = machine.run()
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert machine.calls == []


def test_lists_of_packages_that_are_missing_are_fetched_apart(machine: Machine) -> None:
    machine.tell("no-lists")
    assert machine.run().returncode == 0
    assert machine.calls == ["apt-get chromium-common", "apt-get update", "apt-get chromium-common", "dpkg dpkg"]
    log = (machine.stubs / "calls.log").read_text().splitlines()
    assert all(f"Dir::State::Lists={machine.kept.parent}/" in line for line in log[1:3])


def test_a_killed_run_is_repaired(machine: Machine) -> None:
    machine.tell("killed")
    assert machine.run().returncode == -9
    assert not machine.kept.exists() and list(machine.kept.parent.glob("swiftshader-*"))
    (machine.stubs / "killed").unlink()
    assert machine.run().returncode == 0
    assert not list(machine.kept.parent.glob("swiftshader-*"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: (kept / MANIFEST).unlink(),
        lambda kept: (kept / LIBRARY).unlink(),
        lambda kept: (kept / LIBRARY).write_bytes((kept / LIBRARY).read_bytes()[:999]),
    ],
    ids=["manifest", "library", "cut"],
)
def test_a_driver_that_lost_something_is_fetched_again(machine: Machine, spoil: Callable[[Path], None]) -> None:
    machine.run()
    spoil(machine.kept)
    assert machine.run().returncode == 0
    assert (machine.kept / LIBRARY).read_bytes() == machine.library.read_bytes()
    assert (machine.kept / MANIFEST).is_file()


@pytest.mark.parametrize("tool", ["apt-get", "dpkg"])
def test_a_system_without_debians_tools_is_told_so(machine: Machine, tool: str) -> None:
    (machine.stubs / tool).unlink()
    assert machine.refused() == f"SwiftShader comes from a Debian package, and there is no {tool} here"


def test_without_a_network_the_mirrors_error_is_shown(machine: Machine) -> None:
    machine.tell("no-network")
    assert machine.refused() == "apt-get cannot download chromium-common: no route to the mirror"


@pytest.mark.parametrize("name", [LIBRARY, MANIFEST])
def test_a_package_without_the_driver_is_told(machine: Machine, name: str) -> None:
    (machine.manifest.parent / name).unlink()
    assert "does not hold" in machine.refused()


def test_a_manifest_of_something_else_is_told(machine: Machine) -> None:
    machine.manifest.write_text("[]")
    assert "is not a driver's manifest" in machine.refused()


def test_a_library_that_does_not_load_is_told(machine: Machine) -> None:
    machine.library.write_text("no library")
    assert machine.refused().startswith("SwiftShader does not load: ")


def test_a_library_that_is_no_driver_is_told(machine: Machine) -> None:
    subprocess.run(
        ["c++", "-x", "c", "-shared", "-o", str(machine.library), os.devnull], check=True, capture_output=True
    )
    line = machine.refused()
    assert line.startswith("SwiftShader does not load: ") and "vk_icdGetInstanceProcAddr" in line
