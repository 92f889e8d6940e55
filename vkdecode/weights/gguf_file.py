"""A GGUF file presented exactly like a Hugging Face folder: same config keys, tensor names and row order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vkdecode.errors import ModelFileError
from vkdecode.weights.families import GgufContents, family_of, hf_config
from vkdecode.weights.gguf_header import GgufTensor, read_header
from vkdecode.weights.gguf_meta import Metadata
from vkdecode.weights.gguf_views import TensorView, make_views, read_vector
from vkdecode.weights.rowfile import RowFile
from vkdecode.weights.source import ClosableSource, TensorInfo


class GgufFile(ClosableSource):
    """The weights and config of a GGUF file; `metadata` is the file's own, for the tokenizer.

    Plain tensors and those in a block format that devices hold are read as stored. Those in another format are
    dequantized while they are read and held as F16; so are blocks of one dimension, as F32, and blocks of tensors that
    Hugging Face keeps in another order of columns, as F16.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.metadata: Mapping[str, Any] = header.metadata
        self.generation_config: Mapping[str, Any] = {}
        arch = header.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelFileError(f"{path} has no general.architecture, so it does not say which architecture this is")
        kind = header.metadata.get("general.type", "model")
        if kind != "model":
            raise ModelFileError(f"{path} is a GGUF file of type {kind!r}, not a model")
        meta = Metadata(header.metadata, arch, str(path))
        family = family_of(arch, meta)
        self._file = RowFile(path)
        try:
            shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
            contents = GgufContents(meta, shapes, lambda name: read_vector(self._file, header.tensors[name], str(path)))
            config = hf_config(family, contents)
            config.update(_token_config(path, header.metadata, header.tensors))
            self.config: Mapping[str, Any] = config
            self._views: Mapping[str, TensorView] = make_views(
                family, config, header.tensors, meta.integer("block_count"), str(path)
            )
        except BaseException:
            self.close()
            raise

    def names(self) -> Sequence[str]:
        """Hugging Face names of all tensors."""
        return list(self._views)

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def info(self, name: str) -> TensorInfo:
        """Shape and element type; `ModelFileError` if missing, `UnsupportedModelError` if it cannot be dequantized."""
        return self._view(name).info

    def read(self, name: str, rows: slice | NDArray[Any] | None = None) -> NDArray[Any]:
        """Return rows along axis 0, in Hugging Face row order; see `WeightSource.read`."""
        self._check_open()
        return self._view(name).read(self._file, rows)

    def close(self) -> None:
        """Close the file; reading afterwards raises `ClosedError`."""
        super().close()
        self._file.close()

    def _view(self, name: str) -> TensorView:
        if name not in self._views:
            raise ModelFileError(f"tensor {name} is missing from {self.path}")
        return self._views[name]


def _token_config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{path} has no matrix token_embd.weight; it is not a complete model")
    config: dict[str, Any] = {"vocab_size": embedding.shape[0]}
    for key in ("bos_token_id", "eos_token_id"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(value, int) and not isinstance(value, bool):
            config[key] = value
    return config
