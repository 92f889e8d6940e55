#!/usr/bin/env python3
"""Fetch SwiftShader, a second Vulkan driver for the CPU, out of Debian's package chromium-common; print its ICD file.

Nothing is installed: two files of the package are kept in `.cache/swiftshader`. Needs `apt-get` and `dpkg`, and the
network the first time.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "chromium-common"
CACHE = Path(__file__).resolve().parents[1] / ".cache"
KEPT = CACHE / "swiftshader"
LIBRARY, MANIFEST = "libvk_swiftshader.so", "vk_swiftshader_icd.json"


class FetchError(Exception):
    """The driver cannot be had; one line to print."""


def fetch() -> Path:
    """The path of the driver's ICD file; the driver is fetched where it is not here, or does not load.

    Raises:
        FetchError: a tool is missing, the package cannot be had, or what it holds is no driver.

    """
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "swiftshader.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in CACHE.glob("swiftshader-*"):  # by a run that was killed
            shutil.rmtree(left)
        if not (KEPT / MANIFEST).is_file() or _why_not_loaded(KEPT / LIBRARY):
            shutil.rmtree(KEPT, ignore_errors=True)
            for tool in ("apt-get", "dpkg"):
                if not shutil.which(tool):
                    raise FetchError(f"SwiftShader comes from a Debian package, and there is no {tool} here")
            print(f"set-up: fetching SwiftShader out of {PACKAGE}, 31 MB", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="swiftshader-", dir=CACHE) as folder:
                _fetch_into(Path(folder)).rename(KEPT)  # at once, so that it is whole or not there
    return KEPT / MANIFEST


def _fetch_into(folder: Path) -> Path:
    """Unpack the package; the folder with the two files."""
    _download(folder)
    (package,) = folder.glob("*.deb")
    if line := _error_of(["dpkg", "-x", str(package), str(folder / "unpacked")], folder):
        raise FetchError(f"dpkg cannot unpack {package.name}: {line}")
    made = folder / "driver"
    made.mkdir()
    for name in (LIBRARY, MANIFEST):
        found = next((folder / "unpacked").rglob(name), None)
        if found is None:
            raise FetchError(f"{PACKAGE} does not hold {name}")
        found.rename(made / name)
    try:
        described = json.loads((made / MANIFEST).read_text())
        described["ICD"]["library_path"] = f"./{LIBRARY}"
    except (ValueError, KeyError, TypeError):
        raise FetchError(f"{MANIFEST} of {PACKAGE} is not a driver's manifest") from None
    (made / MANIFEST).write_text(json.dumps(described))
    if why := _why_not_loaded(made / LIBRARY):
        raise FetchError(f"SwiftShader does not load: {why}")
    return made


def _download(folder: Path) -> None:
    """Download the package; where the system's lists do not name it, with lists that are fetched for this alone."""
    if not _error_of(["apt-get", "download", PACKAGE], folder):
        return
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    own = ["apt-get", f"-oDir::State::Lists={lists}"]
    line = _error_of([*own, "update"], folder) or _error_of([*own, "download", PACKAGE], folder)
    if line:
        raise FetchError(f"apt-get cannot download {PACKAGE}: {line}")


def _error_of(command: list[str], folder: Path) -> str:
    """Run a command; the last error that it shows where it fails, else nothing."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    errors = [line for line in lines if line.startswith("E: ")]
    return (errors or lines)[-1].removeprefix("E: ")


def _why_not_loaded(library: Path) -> str:
    """Why a library cannot be a driver; nothing where it can."""
    # In a process of its own: a file that was cut short can end the one that loads it.
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).vk_icdGetInstanceProcAddr"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


def main() -> int:
    """Fetch and print; an error is one line and exit status 1."""
    try:
        print(fetch())
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
