"""A Hugging Face model folder: config.json and one or more safetensors files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.weights.jsonfile import read_json_object
from vkdecode.weights.safetensors_file import SafetensorsFile
from vkdecode.weights.source import ClosableSource, TensorInfo

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# gpt-oss was released in MXFP4, so there are no original weights to fall back on.
_INSTEAD = {"mxfp4": "use a GGUF file of the model, or a copy of the folder with its weights dequantized to bf16"}


class HfFolder(ClosableSource):
    """The weights, config and generation config of a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = _read_config(path)
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json_object(generation) if generation.exists() else {}
        self._files: list[SafetensorsFile] = []
        try:
            self._where = self._open_files()
        except BaseException:
            self.close()
            raise

    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return list(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def info(self, name: str) -> TensorInfo:
        """Shape and element type; `ModelFileError` if missing, `UnsupportedModelError` if of another dtype."""
        return self._file_of(name).info(name)

    def read(self, name: str, rows: slice | NDArray[Any] | None = None) -> NDArray[Any]:
        """Return rows along axis 0 as a C-contiguous array of `info(name).dtype`."""
        self._check_open()
        return self._file_of(name).read(name, rows)

    def close(self) -> None:
        """Close all files; reading afterwards raises `ClosedError`."""
        super().close()
        for file in self._files:
            file.close()

    def _file_of(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise ModelFileError(f"tensor {name} is missing from {self.path}")
        return self._where[name]

    def _open_files(self) -> dict[str, SafetensorsFile]:
        if (self.path / _SINGLE).exists():
            return dict.fromkeys(*self._open_shard(self.path / _SINGLE))
        if (self.path / _INDEX).exists():
            return self._open_index(self.path / _INDEX)
        if any(self.path.glob("*.bin")) or any(self.path.glob("*.pth")) or any(self.path.glob("*.pt")):
            raise UnsupportedModelError(
                f"{self.path} has only PyTorch pickle weights, which can run code when read; "
                "safetensors files are needed"
            )
        raise ModelFileError(f"{self.path} has neither {_SINGLE} nor {_INDEX}; it is not a complete model folder")

    def _open_shard(self, path: Path) -> tuple[list[str], SafetensorsFile]:
        file = SafetensorsFile(path)
        self._files.append(file)
        return file.names, file

    def _open_index(self, index: Path) -> dict[str, SafetensorsFile]:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{index} has no weight_map object that says which file holds which tensor")
        shards: dict[str, SafetensorsFile] = {}
        owner: dict[str, str] = {}
        for shard in dict.fromkeys(weight_map.values()):
            held, shards[shard] = self._open_shard(_shard_path(self.path, index, shard))
            for name in held:
                if name in owner:
                    raise ModelFileError(f"tensor {name} is both in {owner[name]} and in {shard} of {self.path}")
                owner[name] = shard
        for name, shard in weight_map.items():
            if owner.get(name) != shard:
                raise ModelFileError(f"{index} puts tensor {name} in {shard}, but it is not there")
        return {name: shards[shard] for name, shard in weight_map.items()}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = read_json_object(path)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelFileError(f"{path} has no model_type, so it does not say which architecture this is")
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            details = config[key]
            method = details.get("quant_method", "unnamed") if isinstance(details, dict) else details
            raise UnsupportedModelError(
                f"{path} says that the weights are quantized with {method!r}, which is not supported; "
                f"{_INSTEAD.get(str(method), 'use the original weights or a GGUF file')}"
            )
    return config


def _shard_path(folder: Path, index: Path, shard: object) -> Path:
    """Return the file an index names, refusing anything that is not inside the folder."""
    if not isinstance(shard, str) or not shard:
        raise ModelFileError(f"{index} names {shard!r} as a file; a file name is needed")
    pure = PurePosixPath(shard)
    if pure.is_absolute() or ".." in pure.parts or "\\" in shard or ":" in shard or "\0" in shard:
        raise ModelFileError(f"{index} names {shard!r}, a path outside the model folder; it is refused")
    path = folder / shard
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise ModelFileError(f"{index} names {shard!r}, whose links cannot be followed") from error
    if not any(target.is_relative_to(root) for root in _allowed_roots(folder)):
        raise ModelFileError(f"{index} names {shard!r}, a link to {target} outside the model folder; it is refused")
    return path


def _allowed_roots(folder: Path) -> list[Path]:
    """The folder itself, and for a snapshot in the Hugging Face cache the blobs that its links point to."""
    resolved = folder.resolve()
    roots = [resolved]
    if resolved.parent.name == "snapshots":
        roots.append(resolved.parent.parent / "blobs")
    return roots
