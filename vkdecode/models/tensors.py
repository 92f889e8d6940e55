"""A model's tensors as weight constants: names and shapes are checked here, before anything is uploaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from vkdecode.errors import ConfigError
from vkdecode.graph import WeightSpec
from vkdecode.weights import DType, TensorInfo, WeightSource
from vkdecode.weights.recode import dtype_for_matrix


class TensorTable:
    """What a file holds, by name.

    Args:
        source: the open file; only its headers are read.
        dtype: element type to hold matrices in, where `dtype_for_matrix` allows it; None for what the file has.

    """

    def __init__(self, source: WeightSource, dtype: DType | None = None) -> None:
        self._infos: Mapping[str, TensorInfo] = {name: source.info(name) for name in source.names()}
        self._where = source.path
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def names(self) -> Sequence[str]:
        """All tensor names."""
        return list(self._infos)

    def check_layers(self, prefix: str, count: int) -> None:
        """Raise `ConfigError` where the file has other layers, named `prefix` and a number, than the config says."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        numbers = {int(match[1]) for match in map(pattern.match, self._infos) if match}
        found = max(numbers, default=-1) + 1
        if found != count:
            raise ConfigError(f"num_hidden_layers is {count}, but the file has tensors of {found} layers")

    def matrix(self, name: str, rows: int, columns: int) -> WeightSpec:
        """A [rows, columns] tensor as a constant; raises `ConfigError` where it is missing or has another shape."""
        info = self._checked(name, (rows, columns))
        stored = DType.F16 if info.dtype.is_block else info.dtype
        return WeightSpec((name,), (rows,), columns, dtype_for_matrix(name, stored, columns, self._dtype))

    def vector(self, name: str, size: int) -> WeightSpec:
        """A [size] tensor as a float32 constant; raises like `matrix`."""
        self._checked(name, (size,))
        return WeightSpec((name,), (size,), 1, DType.F32, vector=True)

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._infos.get(name)
        if info is None:
            raise ConfigError(f"{self._where} has no tensor {name}, which its config asks for")
        if info.shape != shape:
            raise ConfigError(
                f"tensor {name} in {self._where} has shape {list(info.shape)}, its config asks for {list(shape)}"
            )
        return info
