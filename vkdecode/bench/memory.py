"""Bytes of this process, of a bare import, and of a model's files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_BARE_IMPORT = f"import vkdecode; print(open({str(_STATUS)!r}).read())"
_WEIGHT_ENDINGS = (".safetensors", ".gguf")
_READ_BYTES = 8 << 20


def rss_bytes() -> int | None:
    """Bytes of physical memory that this process holds now; None where the system does not say."""
    return field_bytes(_STATUS.read_text(), "VmRSS") if _STATUS.exists() else None


def peak_rss_bytes() -> int:
    """The most bytes of physical memory that this process ever held."""
    found = field_bytes(_STATUS.read_text(), "VmHWM") if _STATUS.exists() else None
    return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def bare_import_bytes() -> int | None:
    """Physical memory of a new process that has imported this package and nothing more; None where it cannot be had."""
    if not _STATUS.exists():
        return None
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run([sys.executable, "-c", _BARE_IMPORT], capture_output=True, text=True, env=paths, check=False)
    return field_bytes(done.stdout, "VmRSS")


def field_bytes(status: str, name: str) -> int | None:
    """A field of /proc/self/status, which counts in KiB, in bytes."""
    for line in status.splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return None


def host_bytes(rss: int | None, bare: int | None, device: int, is_cpu: bool) -> int | None:
    """What a loaded model takes of the host beside an import: on a CPU driver device memory is process memory."""
    if rss is None or bare is None:
        return None
    return rss - bare - (device if is_cpu else 0)


def weight_files(path: Path) -> list[Path]:
    """The files that hold a model's weights."""
    return [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in _WEIGHT_ENDINGS)


def read_once(paths: list[Path]) -> int:
    """Read files from end to end, so that the page cache holds them as far as it can; their bytes."""
    total = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(_READ_BYTES)
            while count := file.readinto(buffer):
                total += count
    return total
