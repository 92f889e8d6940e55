"""Converting a model: one source, one target, and a proof that the target reads back as it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vkdecode.conversion.output import check_space, check_target, is_gguf, replacing
from vkdecode.conversion.same_model import check_written
from vkdecode.conversion.to_folder import folder_tensors, write_folder
from vkdecode.conversion.to_gguf import from_folder, from_gguf
from vkdecode.errors import InvalidInputError
from vkdecode.weights import DType, GgufFile, WeightSource, open_weights
from vkdecode.weights.gguf_writer import write_gguf
from vkdecode.weights.output_tensor import OutputTensor, counted
from vkdecode.weights.recode import asked_dtype

Progress = Callable[[int, int], None]
SHARD_BYTES = 5_000_000_000
"""Most bytes of weights in one file of a folder."""


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote: where, bytes of weights, and how many tensors there are of each type."""

    path: Path
    nbytes: int
    tensors: Mapping[str, int]


def convert(
    source: str | Path,
    target: str | Path,
    weights: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a model in another format, or with its matrices in another type.

    Args:
        source: a Hugging Face folder or a `.gguf` file.
        target: a name that ends in `.gguf` for a GGUF file, any other for a Hugging Face folder.
        weights: `f32`, `f16`, `bf16`, `q8_0` or `q4_0` for matrices (see `load`); None keeps their types, except that a
            folder holds quantized blocks as f16. Folders hold plain types only.
        overwrite: whether a file or model folder of the target's name may be replaced, as a whole.
        progress: called with bytes written and bytes in all.

    Raises:
        OutputError: the target exists, the disk is full, or the system refuses; nothing was changed.
        UnsupportedModelError: the target's format has no words for this model.
        VkDecodeError: the source is damaged, or an argument is wrong.

    """
    asked = asked_dtype(weights)
    if not isinstance(target, (str, Path)) or not str(target):
        raise InvalidInputError(f"a target is a .gguf file or a folder, not {target!r}")
    opened = open_weights(source)
    try:
        path = Path(target).expanduser()
        check_target(opened.path, path, overwrite)
        write = _write_gguf if is_gguf(path) else _write_folder
        tensors = write(opened, path, asked, overwrite, progress)
    finally:
        opened.close()
    return Converted(path, sum(one.nbytes for one in tensors), Counter(one.encoding.lower() for one in tensors))


def _write_gguf(
    source: WeightSource, target: Path, asked: DType | None, overwrite: bool, progress: Progress | None
) -> list[OutputTensor]:
    contents = from_gguf(source, asked) if isinstance(source, GgufFile) else from_folder(source, asked)
    total = sum(tensor.nbytes for tensor in contents.tensors)
    check_space(target, total)
    with replacing(target, overwrite) as beside:
        write_gguf(beside, contents.arch, contents.metadata, contents.tensors, counted(total, progress))
        _check(source, beside)
    return contents.tensors


def _write_folder(
    source: WeightSource, target: Path, asked: DType | None, overwrite: bool, progress: Progress | None
) -> list[OutputTensor]:
    tensors = folder_tensors(source, asked)
    total = sum(tensor.nbytes for tensor in tensors)
    check_space(target, total)
    with replacing(target, overwrite) as beside:
        write_folder(beside, source, tensors, counted(total, progress), SHARD_BYTES)
        _check(source, beside)
    return tensors


def _check(source: WeightSource, beside: Path) -> None:
    written = open_weights(beside)
    try:
        check_written(source, written)
    finally:
        written.close()
