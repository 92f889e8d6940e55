"""A model's tensors as weight constants: names and shapes are checked here, before anything is uploaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkdecode.errors import ConfigError, UnsupportedModelError
from vkdecode.graph import RowPick, WeightSpec
from vkdecode.weights import DType, TensorInfo, WeightSource
from vkdecode.weights.recode import dtype_for_matrix

# Masks and frequencies that older checkpoints carry along, and the parts of a model that read no text.
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.(attn|attention)\.(bias|masked_bias)$"
    r"|^(model\.)?(vision_tower|multi_modal_projector)\."
)


def _text_name(name: str) -> str:
    """A tensor's name without what a model of text is wrapped in, or with what a bare GPT-2 lacks."""
    name = re.sub(r"^language_model\.(?=model\.|lm_head\.)", "", name)
    name = re.sub(r"^model\.language_model\.", "model.", name)
    return re.sub(r"^(?=(wte|wpe|ln_f|h\.\d+)\.)", "transformer.", name)


@dataclass(frozen=True)
class Part:
    """Rows of a tensor of `of` rows, which has others too or has them in another order."""

    of: int
    pick: RowPick


class TensorTable:
    """What a file holds, by name.

    Args:
        source: the open file; only its headers are read.
        dtype: element type to hold matrices in, where `dtype_for_matrix` allows it; None for what the file has.

    """

    def __init__(self, source: WeightSource, dtype: DType | None = None) -> None:
        names = [name for name in source.names() if not _IGNORED.search(name)]
        self._infos: Mapping[str, TensorInfo] = {_text_name(name): source.info(name) for name in names}
        self._used: set[str] = set()
        self._where = source.path
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def names(self) -> Sequence[str]:
        """All tensor names."""
        return list(self._infos)

    def check_all_used(self) -> None:
        """Raise `ConfigError` where the file has tensors that nothing asked for: left out, they would be missing.

        An output head that is not asked for repeats the embedding.
        """
        left = sorted(name for name in self._infos if name not in self._used and name != "lm_head.weight")
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ConfigError(f"{self._where} has the tensor {left[0]}{more}, which its config does not account for")

    def check_layers(self, prefix: str, count: int) -> None:
        """Raise `ConfigError` where the file has other layers, named `prefix` and a number, than the config says."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        numbers = {int(match[1]) for match in map(pattern.match, self._infos) if match}
        found = max(numbers, default=-1) + 1
        if found != count:
            raise ConfigError(f"num_hidden_layers is {count}, but the file has tensors of {found} layers")

    def matrix(
        self, name: str, rows: int, columns: int, part: Part | None = None, transposed: bool = False
    ) -> WeightSpec:
        """A [rows, columns] tensor, or rows of one, as a constant.

        Args:
            name: the tensor's.
            rows: how many the constant has.
            columns: of each row.
            part: which rows of the tensor they are; None for all.
            transposed: the file has the tensor as [columns, rows].

        Raises:
            ConfigError: it is missing or has another shape.
            UnsupportedModelError: it is transposed, and stored in blocks.

        """
        whole = (part.of if part else rows, columns)
        info = self._checked(name, whole[::-1] if transposed else whole)
        if transposed and info.dtype.is_block:
            raise UnsupportedModelError(f"tensor {name} in {self._where} is transposed and stored as {info.stored_as}")
        dtype = dtype_for_matrix(name, info.dtype, columns, self._dtype)
        return WeightSpec((info.name,), (rows,), columns, dtype, picks=_picks(part), transposed=transposed)

    def stack(self, names: Sequence[str], rows: int, columns: int) -> WeightSpec:
        """The [rows, columns] tensors of as many experts as one constant.

        Raises:
            ConfigError: like `matrix`.
            UnsupportedModelError: they are stored as different types.

        """
        specs = [self.matrix(name, rows, columns) for name in names]
        kinds = {spec.dtype: name for name, spec in zip(names, specs, strict=True)}
        if len(kinds) != 1:
            found = " and ".join(f"{name} as {dtype.value}" for dtype, name in kinds.items())
            raise UnsupportedModelError(f"{self._where} has {found}; the experts of a layer must be stored alike")
        held = tuple(name for spec in specs for name in spec.names)
        return WeightSpec(held, (rows,) * len(specs), columns, specs[0].dtype, experts=len(specs))

    def stacked(self, name: str, experts: int, rows: int, columns: int, part: Part | None = None) -> WeightSpec:
        """The same of one tensor [experts, columns, rows], or of those of its rows that `part` picks of each expert.

        Raises like `matrix` of a transposed tensor.
        """
        info = self._checked(name, (experts, columns, part.of if part else rows))
        if info.dtype.is_block:
            raise UnsupportedModelError(f"tensor {name} in {self._where} is transposed and stored as {info.stored_as}")
        dtype = dtype_for_matrix(name, info.dtype, columns, self._dtype)
        picks = _picks(part)
        return WeightSpec(
            (info.name,), (experts * rows,), columns, dtype, "plain", picks=picks, transposed=True, experts=experts
        )

    def stacked_vectors(self, name: str, experts: int, size: int, part: Part | None = None) -> WeightSpec:
        """A tensor [experts, size], or those values of each expert's that `part` picks; raises like `matrix`."""
        info = self._checked(name, (experts, part.of if part else size))
        picks = _picks(part)
        return WeightSpec((info.name,), (experts * size,), 1, DType.F32, vector=True, picks=picks, experts=experts)

    def vector(
        self, name: str, size: int, part: Part | None = None, shape: tuple[int, ...] | None = None
    ) -> WeightSpec:
        """A [size] tensor, or values of one, as a float32 constant; `shape` where the tensor is not flat.

        Raises like `matrix`.
        """
        info = self._checked(name, shape or (part.of if part else size,))
        return WeightSpec((info.name,), (size,), 1, DType.F32, vector=True, picks=_picks(part))

    def vectors(self, names: Sequence[str], size: int) -> WeightSpec:
        """Tensors [size] one after another as a float32 constant; raises like `matrix`."""
        found = tuple(self._checked(name, (size,)).name for name in names)
        return WeightSpec(found, (size,) * len(found), 1, DType.F32, vector=True)

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._infos.get(name)
        self._used.add(name)
        if info is None:
            raise ConfigError(f"{self._where} has no tensor {name}, which its config asks for")
        if info.shape != shape:
            raise ConfigError(
                f"tensor {name} in {self._where} has shape {list(info.shape)}, its config asks for {list(shape)}"
            )
        return info


def _picks(part: Part | None) -> tuple[RowPick, ...]:
    return (part.pick,) if part else ()
