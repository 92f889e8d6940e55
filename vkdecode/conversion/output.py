"""Where a conversion writes: under another name beside the target, which it takes only when all is there."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vkdecode.errors import OutputError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a target that cannot or must not be written; `target` ends in .gguf for a file, else it is a folder."""
    try:
        _check_target(source, target, overwrite)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"cannot write {str(target)!r}: {reason}") from error


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    is_file = is_gguf(target)
    there, from_here = target.resolve(), source.resolve()
    if there == from_here or there in from_here.parents:
        raise OutputError(f"{target} is or holds the model that is read; give another target")
    if not there.parent.is_dir():
        raise OutputError(f"cannot write {target}: there is no folder {there.parent}")
    if not os.path.lexists(target):
        return
    if is_file != target.is_file() or target.is_symlink():
        wanted, other = ("file", "a folder or a link") if is_file else ("folder", "a file or a link")
        raise OutputError(f"{target} is {other}; a .gguf {wanted} cannot take its place; give another target")
    if not overwrite:
        raise OutputError(f"{target} exists already; give another target, or ask for overwriting (--overwrite)")
    if not is_file and not (target / "config.json").is_file():
        raise OutputError(f"{target} is a folder without a config.json, so no model; it is not overwritten")


def is_gguf(target: Path) -> bool:
    """Whether a target of this name is a GGUF file."""
    return target.suffix.lower() == ".gguf"


def check_space(target: Path, nbytes: int) -> None:
    """Raise `OutputError` where the target's disk has less room than that."""
    free = shutil.disk_usage(target.resolve().parent).free
    if nbytes > free:
        raise OutputError(f"{target} takes {nbytes} bytes, but its disk has {free} free; make room or use fewer bits")


@contextmanager
def replacing(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a path beside the target to write a file or folder to; it takes the target's name at the end.

    Whatever goes wrong, what was written is removed and the target is as it was.

    Raises:
        OutputError: the system refused to write.

    """
    # Not made from the target's name, which may be as long as names can be.
    beside = target.with_name(f".vkdecode-{secrets.token_hex(8)}.part")
    try:
        yield beside
        _sync(beside)
        if not overwrite and os.path.lexists(target):
            raise OutputError(f"{target} has come into being meanwhile; it is not overwritten")
        _take_name(beside, target)
    except OSError as error:
        reason = "the disk is full" if error.errno in _FULL else error.strerror or str(error)
        raise OutputError(f"cannot write {target}: {reason}; nothing was changed") from error
    finally:
        _remove(beside)


def _take_name(beside: Path, target: Path) -> None:
    if not beside.is_dir() or not target.exists():
        beside.replace(target)
        return
    # A folder cannot be replaced in one step: the old one steps aside, and back where the new one cannot come.
    aside = target.with_name(f"{beside.name}.old")
    target.rename(aside)
    try:
        beside.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    _remove(aside)


def _sync(path: Path) -> None:
    """Have the bytes on the disk before the name is, so that a crash leaves the old or the new whole."""
    for one in [path] if path.is_file() else [one for one in path.iterdir() if one.is_file()]:
        with one.open("rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()
