"""Tensors of a GGUF file as Hugging Face has them: renamed, cut out of stacks, re-ordered, put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.weights.blocks import can_decode, decode_rows, ggml_type, scales_are_finite
from vkdecode.weights.dtypes import BLOCK_DTYPES, PLAIN_DTYPES, DType
from vkdecode.weights.families import GgufFamily, Layout, hf_name, split_name
from vkdecode.weights.gguf_header import GgufTensor
from vkdecode.weights.rowfile import RowFile
from vkdecode.weights.source import TensorInfo, row_indices

_HELD = {ggml_type(dtype): dtype for dtype in (*PLAIN_DTYPES, *BLOCK_DTYPES)}
_QKV = "attn_qkv"
_FUSED = (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads"), ("attn_v", "num_key_value_heads"))


@dataclass(frozen=True)
class Part:
    """What one stored tensor gives to a Hugging Face tensor.

    `tensor.shape` is cut down to the part; `first` counts the rows before it (numbers, where it is part of a vector).
    """

    tensor: GgufTensor
    layout: Layout
    heads: int = 1
    first: int = 0


@dataclass(frozen=True)
class TensorView:
    """One Hugging Face tensor and the stored tensors that hold its values."""

    name: str
    parts: tuple[Part, ...]
    path: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The Hugging Face shape."""
        shape = self.parts[0].tensor.shape
        if self._layout.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return (*shape[:-1], shape[-1] * self._layout.parts)

    @property
    def info(self) -> TensorInfo:
        """Shape and element type; `UnsupportedModelError` for an encoding that cannot be dequantized."""
        tensor, shape = self.parts[0].tensor, self.shape
        held = _HELD.get(tensor.type)
        rows_stay = not (self._layout.transposed or self._layout.parts > 1)
        numbers = len(shape) == 1 or self.name.endswith("bias")  # one bias, or those of all experts
        if held is None or (held.is_block and (numbers or not rows_stay)):
            if not can_decode(tensor.type, GGML_QUANT_SIZES[tensor.type][1]):
                raise UnsupportedModelError(
                    f"tensor {tensor.name} in {self.path} is stored as {tensor.type.name}, which cannot be dequantized"
                )
            held = DType.F32 if numbers else DType.F16
        if self._layout.plus_one:
            held = DType.F32
        return TensorInfo(self.name, shape, held, tensor.type.name)

    @property
    def _layout(self) -> Layout:
        return self.parts[0].layout

    def read(self, file: RowFile, rows: slice | NDArray[Any] | None) -> NDArray[Any]:
        """Rows along axis 0 in Hugging Face order; see `WeightSource.read`."""
        info = self.info
        wanted = row_indices(rows, info.shape[0], self.name)
        if self._layout.parts > 1 or self._layout.transposed:
            return self._composed(file, info, wanted)
        part = self.parts[0]
        stored = part.layout.stored_rows(wanted, info.shape[0], part.heads)
        if len(info.shape) == 1:
            values = self._vector(file, part, info)[stored]
            return np.ascontiguousarray(values - np.float32(1) if part.layout.plus_one else values)
        per_row = math.prod(info.shape[1:-1])
        row_shape = info.read_shape[1:]
        out: NDArray[Any] = np.empty((len(wanted), *row_shape), info.dtype.numpy)
        for where, block in self._blocks(file, part, per_row, stored):
            out[where] = self._decode(part.tensor, block, info).reshape(-1, *row_shape)
        return out

    def _vector(self, file: RowFile, part: Part, info: TensorInfo) -> NDArray[Any]:
        """All numbers of a vector, which may be a row of a stored matrix or a stretch of a stored vector."""
        tensor = part.tensor
        row = file.read_rows(tensor.offset, tensor.row_bytes, np.zeros(1, np.int64))
        return self._decode(tensor, row, info).reshape(-1)[part.first : part.first + info.shape[0]]

    def _blocks(
        self, file: RowFile, part: Part, per_row: int, stored: NDArray[np.int64]
    ) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
        start = part.tensor.offset + part.first * part.tensor.row_bytes
        return file.read_blocks(start, part.tensor.row_bytes * per_row, stored)

    def _composed(self, file: RowFile, info: TensorInfo, wanted: NDArray[np.int64]) -> NDArray[Any]:
        """Rows of a tensor that is kept transposed or in several, by blocks of what is stored."""
        out: NDArray[Any] = np.empty((len(wanted), *info.shape[1:]), info.dtype.numpy)
        for part in self.parts:
            layout, width = part.layout, part.tensor.shape[-1]
            if not layout.transposed:
                for where, block in self._blocks(file, part, math.prod(info.shape[1:-1]), wanted):
                    values = self._decode(part.tensor, block, info).reshape(-1, *info.shape[1:-1], width)
                    out[where, ..., layout.part :: layout.parts] = values
                continue
            height = part.tensor.shape[-2]
            matrices = (
                [(out, 0, wanted)] if len(info.shape) == 2 else [(out[i], int(m), None) for i, m in enumerate(wanted)]
            )
            for target, matrix, columns in matrices:
                kept = np.arange(height) + matrix * height
                for where, block in self._blocks(file, part, 1, kept):
                    values = self._decode(part.tensor, block, info).reshape(-1, width)
                    taken = values if columns is None else values[:, columns]
                    target[..., layout.part :: layout.parts][:, where] = taken.T
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


def read_vector(file: RowFile, tensor: GgufTensor, path: str) -> list[float]:
    """The numbers of a tensor that must be a vector of F32 values."""
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ModelFileError(f"{tensor.name} in {path} must be a vector of F32 values")
    values: list[float] = TensorView(tensor.name, (Part(tensor, Layout()),), path).read(file, None).tolist()
    return values


def make_views(
    family: GgufFamily, config: Mapping[str, Any], tensors: Mapping[str, GgufTensor], layers: int, path: str
) -> dict[str, TensorView]:
    """All tensors of a file under their Hugging Face names.

    Raises `UnsupportedModelError` for a tensor that the family does not have, `ModelFileError` for one that does not
    fit the config.
    """
    found: dict[str, list[Part]] = {}
    for stored in tensors.values():
        for tensor, first in _unfused(family, config, stored, path):
            name = hf_name(family, tensor.name, layers, path)
            if name is None:
                continue
            for target, part in _parts(family, config, tensor, first, name, path):
                found.setdefault(target, []).append(part)
    return {name: _view(name, parts, path) for name, parts in found.items()}


def _unfused(
    family: GgufFamily, config: Mapping[str, Any], tensor: GgufTensor, path: str
) -> list[tuple[GgufTensor, int]]:
    """The q, k and v of a tensor that holds all three though the family has them apart; else the tensor itself."""
    module, layer, kind = split_name(tensor.name)
    if module != f"blk.{{i}}.{_QKV}" or module in family.tensors or "blk.{i}.attn_q" not in family.tensors:
        return [(tensor, 0)]
    heads = sum(int(config[key]) for _, key in _FUSED)
    if tensor.shape[0] % heads:
        raise ModelFileError(f"tensor {tensor.name} in {path} has {tensor.shape[0]} rows, not q, k and v of the config")
    size, first, pieces = tensor.shape[0] // heads, 0, []
    for name, key in _FUSED:
        rows = int(config[key]) * size
        pieces.append((replace(tensor, name=f"blk.{layer}.{name}.{kind}", shape=(rows, *tensor.shape[1:])), first))
        first += rows
    return pieces


def _parts(
    family: GgufFamily, config: Mapping[str, Any], tensor: GgufTensor, first: int, name: str, path: str
) -> Iterator[tuple[str, Part]]:
    module, _, kind = split_name(tensor.name)
    layout = family.layout(f"{module}.{kind}")
    heads = int(config[layout.heads_key]) if layout.heads_key else 1
    if tensor.shape[0] % (layout.rows_per_head * heads):
        raise ModelFileError(
            f"tensor {tensor.name} in {path} has {tensor.shape[0]} rows, which {heads} heads cannot share"
        )
    if layout.transposed and len(tensor.shape) < 2:
        raise ModelFileError(f"tensor {tensor.name} in {path} is a vector where a matrix is needed")
    if layout.row_vector and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    if not layout.stacked:
        yield name, Part(tensor, layout, heads, first)
        return
    count = int(config[layout.stacked])
    if tensor.shape[0] != count or len(tensor.shape) < 2:
        raise ModelFileError(f"tensor {tensor.name} in {path} has shape {list(tensor.shape)}, not a stack of {count}")
    rows = math.prod(tensor.shape[1:-1])
    for place in range(count):
        offset = tensor.offset + place * rows * tensor.row_bytes
        one = replace(tensor, shape=tensor.shape[1:], offset=offset)
        yield name.replace("{e}", str(place)), Part(one, layout)


def _view(name: str, parts: list[Part], path: str) -> TensorView:
    ordered = tuple(sorted(parts, key=lambda part: part.layout.part))
    first = ordered[0]
    if [part.layout.part for part in ordered] != list(range(first.layout.parts)):
        raise ModelFileError(f"{path} has {first.tensor.name}, but not what goes with it")
    if len({(part.tensor.shape, part.tensor.type) for part in ordered}) != 1:
        names = " and ".join(part.tensor.name for part in ordered)
        raise ModelFileError(f"{names} in {path} differ in shape or type")
    return TensorView(name, ordered, path)
