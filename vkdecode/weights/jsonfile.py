"""Reads the small JSON files of a model folder, refusing what is not a plain, sane JSON object."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from vkdecode.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """Return a regular file's UTF-8 text; `ModelFileError` when it is missing, too large, or not text."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} is missing or not a regular file")
        if path.stat().st_size > limit:
            raise ModelFileError(f"{path} has {path.stat().st_size} bytes; more than {limit} is not a sane size for it")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8 text (byte {error.start}); download it again") from error


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return a file's JSON object; `ModelFileError` when it is missing, damaged, or something else."""
    return parse_json_object(read_text(path, limit), str(path))


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object in which no key comes twice; `where` names it in errors."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ModelFileError(f"{where} gives {key!r} twice; it is damaged or was edited by hand")
        return found

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, ValueError) else "nested too deeply"
        raise ModelFileError(f"{where} is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} holds a JSON {type(value).__name__}, but an object is needed")
    return value
