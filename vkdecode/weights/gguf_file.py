"""A GGUF file presented exactly like a Hugging Face folder: same config keys, tensor names and row order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.weights.blocks import can_decode, decode_rows, ggml_type, scales_are_finite
from vkdecode.weights.dtypes import BLOCK_DTYPES, PLAIN_DTYPES, DType
from vkdecode.weights.gguf_families import family_of, hf_config, hf_name, split_name
from vkdecode.weights.gguf_header import GgufTensor, read_header
from vkdecode.weights.gguf_meta import Metadata
from vkdecode.weights.rowfile import RowFile
from vkdecode.weights.source import ClosableSource, TensorInfo, row_indices

_HELD = {ggml_type(dtype): dtype for dtype in (*PLAIN_DTYPES, *BLOCK_DTYPES)}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufFile(ClosableSource):
    """The weights and config of a GGUF file; `metadata` is the file's own, for the tokenizer.

    Plain tensors and those in a block format that devices hold are read as stored. Those in another format are
    dequantized while they are read and held as F16; so are blocks of one dimension, as F32.
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
        self._family = family_of(arch, str(path))
        self._file = RowFile(path)
        try:
            shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
            config = hf_config(self._family, Metadata(header.metadata, arch, str(path)), shapes, str(path))
            layers = config["num_hidden_layers"]
            self._tensors: dict[str, GgufTensor] = {}
            for name, tensor in header.tensors.items():
                target = hf_name(self._family, name, layers, str(path))
                if target is not None:
                    self._tensors[target] = tensor
            self.config: Mapping[str, Any] = config
            config.update(_token_config(path, header.metadata, header.tensors))
            if _ROPE_FACTORS in header.tensors:
                self._absorb_rope_factors(config, header.tensors[_ROPE_FACTORS])
        except BaseException:
            self.close()
            raise

    def names(self) -> Sequence[str]:
        """Hugging Face names of all tensors."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Shape and element type; `ModelFileError` if missing, `UnsupportedModelError` if it cannot be dequantized."""
        tensor = self._tensor(name)
        held = _HELD.get(tensor.type)
        if held is None or (held.is_block and len(tensor.shape) == 1):
            if not can_decode(tensor.type, GGML_QUANT_SIZES[tensor.type][1]):
                raise UnsupportedModelError(
                    f"tensor {tensor.name} in {self.path} is stored as {tensor.type.name}, which cannot be dequantized"
                )
            held = DType.F32 if len(tensor.shape) == 1 else DType.F16
        return TensorInfo(name, tensor.shape, held, tensor.type.name)

    def read(self, name: str, rows: slice | NDArray[Any] | None = None) -> NDArray[Any]:
        """Return rows along axis 0, in Hugging Face row order; see `WeightSource.read`."""
        self._check_open()
        return self._read(self._tensor(name), self.info(name), rows)

    def close(self) -> None:
        """Close the file; reading afterwards raises `ClosedError`."""
        super().close()
        self._file.close()

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise ModelFileError(f"tensor {name} is missing from {self.path}")
        return self._tensors[name]

    def _read(self, tensor: GgufTensor, info: TensorInfo, rows: slice | NDArray[Any] | None) -> NDArray[Any]:
        wanted = row_indices(rows, tensor.shape[0], info.name)
        stored = self._stored_rows(tensor, wanted)
        if len(tensor.shape) == 1:
            whole = self._file.read_rows(tensor.offset, tensor.row_bytes, np.zeros(1, np.int64))
            return np.ascontiguousarray(self._decode(tensor, whole, info).reshape(-1)[stored])
        per_row = math.prod(tensor.shape[1:-1])
        row_shape = info.read_shape[1:]
        out: NDArray[Any] = np.empty((len(wanted), *row_shape), info.dtype.numpy)
        for where, block in self._file.read_blocks(tensor.offset, tensor.row_bytes * per_row, stored):
            out[where] = self._decode(tensor, block, info).reshape(-1, *row_shape)
        return out

    def _decode(self, tensor: GgufTensor, block: NDArray[np.uint8], info: TensorInfo) -> NDArray[Any]:
        """Turn stored bytes, uint8 [n, bytes], into values of the held dtype."""
        if _HELD.get(tensor.type) is info.dtype:
            if info.dtype.is_block and not scales_are_finite(block, info.dtype):
                raise ModelFileError(
                    f"tensor {tensor.name} in {self.path} has blocks whose scale is not finite; the file is damaged"
                )
            return block.reshape(-1).view(info.dtype.numpy)
        values = decode_rows(block, tensor.type, GGML_QUANT_SIZES[tensor.type][1])
        with np.errstate(over="ignore", invalid="ignore"):
            held: NDArray[Any] = values.astype(info.dtype.numpy)
        if not np.isfinite(held).all():
            raise ModelFileError(
                f"tensor {tensor.name} in {self.path} has values that are not finite "
                f"or beyond the range of {info.dtype.value}; the file is damaged or needs wider weights"
            )
        return held

    def _stored_rows(self, tensor: GgufTensor, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the file keeps the rows that Hugging Face numbers `wanted`."""
        heads_key = self._family.permuted.get(split_name(tensor.name)[0])
        if heads_key is None:
            return wanted
        heads = int(self.config[heads_key])
        if tensor.shape[0] % (2 * heads):
            raise ModelFileError(
                f"tensor {tensor.name} in {self.path} has {tensor.shape[0]} rows, which {heads} heads cannot share"
            )
        return interleaved_rows(wanted, tensor.shape[0] // heads)

    def _absorb_rope_factors(self, config: dict[str, Any], tensor: GgufTensor) -> None:
        info = TensorInfo(_ROPE_FACTORS, tensor.shape, DType.F32, tensor.type.name)
        if tensor.type is not GGMLQuantizationType.F32 or len(tensor.shape) != 1:
            raise ModelFileError(f"{_ROPE_FACTORS} in {self.path} must be a vector of F32 values")
        scaling = config.get("rope_scaling")
        if scaling is not None:
            raise UnsupportedModelError(
                f"{self.path} combines {_ROPE_FACTORS} with RoPE scaling {scaling['rope_type']!r}, "
                "which is not supported"
            )
        config["rope_scaling"] = {"rope_type": "factors", "factors": self._read(tensor, info, None).tolist()}


def interleaved_rows(rows: NDArray[np.int64], head_dim: int) -> NDArray[np.int64]:
    """Map Hugging Face row numbers of a query or key projection to those of a llama GGUF file.

    Hugging Face keeps the two halves of a rotated head apart (i, i + head_dim/2); llama.cpp's converter puts each pair
    next to each other (2i, 2i + 1).
    """
    head, inside = np.divmod(rows, head_dim)
    half, pair = np.divmod(inside, head_dim // 2)
    return np.asarray(head * head_dim + 2 * pair + half, np.int64)


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
