"""Made-up weights of any size, without a file: shapes from a config, rows from a small pool of random ones.

What a device computes with them means nothing, but takes as long as with real ones of the same shapes and types.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.bench.shapes import BUILT_IN
from vkdecode.decode import KvGeometry, StepOptions
from vkdecode.errors import InvalidInputError, ModelFileError
from vkdecode.models.registry import architecture_of
from vkdecode.models.tensors import TensorTable
from vkdecode.weights import DType, TensorInfo
from vkdecode.weights.blocks import random_rows
from vkdecode.weights.dtypes import BLOCK_DTYPES, PLAIN_DTYPES
from vkdecode.weights.jsonfile import read_json_object
from vkdecode.weights.source import row_indices

SYNTHETIC_DTYPES = (*PLAIN_DTYPES, *BLOCK_DTYPES)
_POOL_BYTES = 2 << 20
_VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight")
# About what training starts from: activations stay in a sane range at any width.
_DEVIATION = 0.02


class SyntheticSource:
    """Random weights for a config, the same in every run.

    Args:
        name: what to call the model.
        config: as a config.json has it.
        dtype: element type of the matrices. As in quantized files, embedding and head are q8_0 (q6_k beside formats
            with blocks of 256) where the format has fewer than 6 bits, and rows that are no whole number of blocks are
            held as q8_0 or f16.

    Raises:
        VkDecodeError: the architecture or its config is not supported.

    """

    def __init__(self, name: str, config: Mapping[str, Any], dtype: DType = DType.F16) -> None:
        self.path = Path(name)
        self.config: Mapping[str, Any] = dict(config)
        self.generation_config: Mapping[str, Any] = {}
        self.dtype = dtype
        self._infos: dict[str, TensorInfo] = {}
        self._pools: dict[tuple[DType, int], NDArray[Any]] = {}
        self._infos = _infos(self, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as a file would hold them."""
        return sum(_stored_bytes(info) for info in self._infos.values())

    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return list(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Shape and element type; `ModelFileError` if it is missing."""
        if name not in self._infos:
            raise ModelFileError(f"the synthetic model {self.path} has no tensor {name}")
        return self._infos[name]

    def read(self, name: str, rows: slice | NDArray[Any] | None = None) -> NDArray[Any]:
        """Rows along axis 0, raw bytes for a block format; a vector is ones for a weight and zeros for a bias."""
        info = self.info(name)
        wanted = row_indices(rows, info.shape[0], name)
        if len(info.shape) == 1:
            return np.full(wanted.size, float(name.endswith("weight")), info.dtype.numpy)
        pool = self._pool(info.dtype, info.shape[-1])
        start = zlib.crc32(name.encode())
        inner = int(np.prod(info.shape[1:-1], dtype=np.int64))  # rows of each matrix of a stack
        rows = (wanted[:, None] * inner + np.arange(inner)).reshape(-1)
        picked: NDArray[Any] = pool[(rows + start) % len(pool)]
        return picked.reshape(wanted.size, *info.read_shape[1:])

    def close(self) -> None:
        """Do nothing: there is no file, and what is read later is read again from here."""

    def _pool(self, dtype: DType, columns: int) -> NDArray[Any]:
        key = (dtype, columns)
        if key not in self._pools:
            self._pools[key] = _random_rows(dtype, columns, max(_POOL_BYTES // dtype.row_bytes(columns), 1))
        return self._pools[key]


def synthetic_source(config: str, dtype: str = "f16") -> SyntheticSource:
    """Made-up weights for a built-in shape, a config.json, or a folder with one.

    Raises:
        InvalidInputError: no such shape or file, or an unknown element type.
        VkDecodeError: the config is damaged or not supported.

    """
    known = {one.value: one for one in SYNTHETIC_DTYPES}
    if dtype not in known:
        raise InvalidInputError(f"synthetic weights must be one of {', '.join(known)}, not {dtype!r:.40}")
    if config.lower() in BUILT_IN:
        return SyntheticSource(config.lower(), BUILT_IN[config.lower()], known[dtype])
    path = Path(config).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        names = ", ".join(BUILT_IN)
        raise InvalidInputError(
            f"--synthetic {config!r:.80} is neither a built-in shape nor a config.json; built in: {names}"
        )
    return SyntheticSource(file.resolve().parent.name or file.name, read_json_object(file), known[dtype])


def _random_rows(dtype: DType, columns: int, rows: int) -> NDArray[Any]:
    """Random rows as a file would hold them: normal numbers, or the raw bytes of random blocks."""
    rng = np.random.default_rng(columns)
    if dtype.is_block:
        return random_rows(rng, rows, columns, dtype)
    return (rng.standard_normal((rows, columns), np.float32) * np.float32(_DEVIATION)).astype(dtype.numpy)


class _AskedTensors(TensorTable):
    """Has every tensor that an architecture asks for, in the shape in which it asks."""

    def __init__(self, source: SyntheticSource) -> None:
        super().__init__(source)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        self.shapes[name] = shape
        return TensorInfo(name, shape, DType.F32, DType.F32.name)


def _infos(empty: SyntheticSource, dtype: DType) -> dict[str, TensorInfo]:
    """What the architecture's decode step asks for is what the model has."""
    _, architecture = architecture_of(empty.config)
    config = architecture.parse_config(empty.config)
    rope = architecture.rope(empty.config, config)
    tensors = _AskedTensors(empty)
    kv = KvGeometry(config.num_hidden_layers, config.num_key_value_heads, 1, config.head_dim, DType.F32)
    options = StepOptions(1, "last", architecture.default_kv_offset, "masked")
    architecture.build_step(config, tensors, rope.rotary_dim, options, kv)
    held = {name: _held(dtype, name, shape) for name, shape in tensors.shapes.items()}
    return {name: TensorInfo(name, shape, held[name], held[name].name) for name, shape in tensors.shapes.items()}


def _held(dtype: DType, name: str, shape: tuple[int, ...]) -> DType:
    if len(shape) == 1:
        return DType.F32
    few_bits = dtype.is_block and 8 * dtype.block_bytes < 6 * dtype.block_columns
    finer = DType.Q6_K if dtype.block_columns > DType.Q8_0.block_columns else DType.Q8_0
    wanted = finer if few_bits and name.endswith(_VOCABULARY_TENSORS) else dtype
    return next(one for one in (wanted, DType.Q8_0, DType.F16) if one.fits(shape[-1]))


def _stored_bytes(info: TensorInfo) -> int:
    return int(np.prod(info.shape[:-1], dtype=np.int64)) * info.dtype.row_bytes(info.shape[-1])
