"""Reading models from disk: Hugging Face folders and GGUF files behind one interface, rows at a time."""

from __future__ import annotations

import os
from pathlib import Path

from vkdecode.errors import ModelFileError
from vkdecode.weights.dtypes import DType
from vkdecode.weights.gguf_file import GgufFile
from vkdecode.weights.hf_folder import HfFolder
from vkdecode.weights.source import TensorInfo, WeightSource

__all__ = ["DType", "GgufFile", "HfFolder", "TensorInfo", "WeightSource", "open_weights"]


def open_weights(path: str | Path) -> WeightSource:
    """Open a Hugging Face folder or a `.gguf` file; only headers are read.

    Raises `ModelFileError` when nothing is there or it is damaged, `UnsupportedModelError` when it is sound but of a
    kind that vkdecode does not have.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ModelFileError(f"a model is a folder or a .gguf file, not {path!r}")
    try:
        location = Path(path).expanduser()
        if location.is_dir():
            return _open_folder(location)
        if location.is_file():
            return _open_file(location)
        exists = location.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"cannot open {str(path)!r}: {error}") from error
    if exists:
        raise ModelFileError(f"{location} is neither a folder nor a regular file")
    raise ModelFileError(f"{location} does not exist; give a Hugging Face model folder or a .gguf file")


def _open_folder(path: Path) -> WeightSource:
    if not (path / "config.json").exists():
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = (
            f"to use a GGUF file, give its own path, such as {path / files[0]}" if files else "it is not a model folder"
        )
        raise ModelFileError(f"{path} has no config.json; {hint}")
    return HfFolder(path)


def _open_file(path: Path) -> WeightSource:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix.lower() == ".gguf" or magic == b"GGUF":
        return GgufFile(path)
    raise ModelFileError(f"{path} is not a model; give a Hugging Face model folder or a .gguf file")
