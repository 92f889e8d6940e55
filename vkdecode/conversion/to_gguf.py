"""What a GGUF file of a model holds: metadata and tensors, from a Hugging Face folder or from another GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION, LlamaFileType
from numpy.typing import NDArray

from vkdecode.conversion.rope_words import gguf_rope
from vkdecode.conversion.same_model import check_same_config
from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.models.registry import architecture_of
from vkdecode.text import load_tokenizer
from vkdecode.text.gguf_vocab import gguf_vocabulary
from vkdecode.text.hf_tokenizer import special_token_texts
from vkdecode.weights import DType, GgufFile, WeightSource
from vkdecode.weights.blocks import can_decode, decode_rows
from vkdecode.weights.families import FAMILIES, GgufFamily, family_of_model_type
from vkdecode.weights.families.inverse import Stored, gguf_metadata, stored_tensors
from vkdecode.weights.gguf_header import GgufTensor, read_header
from vkdecode.weights.gguf_writer import MetaEntry, entry
from vkdecode.weights.output_tensor import OutputTensor, in_layout
from vkdecode.weights.recode import dtype_for_matrix, keeps_its_type, recode_rows
from vkdecode.weights.rowfile import RowFile

_FILE_TYPES = {
    DType.F32: LlamaFileType.ALL_F32,
    DType.F16: LlamaFileType.MOSTLY_F16,
    DType.BF16: LlamaFileType.MOSTLY_BF16,
    DType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    DType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
}
_PIECE_BYTES = 4 << 20
# Buffers that old checkpoints store and every model computes.
_COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias", ".attn.bias", ".attn.masked_bias")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True)
class GgufContents:
    """Everything that goes into one GGUF file."""

    arch: str
    metadata: Mapping[str, MetaEntry]
    tensors: list[OutputTensor]


def from_folder(source: WeightSource, asked: DType | None) -> GgufContents:
    """A Hugging Face folder as a GGUF file: matrices as asked or stored, all else as F32.

    Raises:
        UnsupportedModelError: the family has no GGUF names, or its config says what a GGUF file cannot.
        TokenizerError: the folder has a tokenizer that a GGUF file cannot have.

    """
    where = str(source.path)
    family = _family(source.config.get("model_type"), where)
    _, architecture = architecture_of(source.config)
    parsed = architecture.parse_config(source.config)
    rope = architecture.rope(source.config, parsed)
    config = {**source.config, **asdict(parsed)}
    tied = bool(config.get("tie_word_embeddings"))
    names = [name for name in source.names() if not name.endswith(_COMPUTED)]
    heads = [target for module, target in family.tensors.items() if module == "output"]
    kept = [name for name in names if not (tied and name.rpartition(".")[0] in heads)]
    stored = stored_tensors(family, kept, where)
    words = gguf_rope(config, rope)
    shapes = {one.name: one.shape(_shape(source, one)) for one in stored}
    shapes.update({name: values.shape for name, values in words.vectors.items()})
    vectors = {name: values.tolist() for name, values in words.vectors.items()}
    metadata, rebuilt = gguf_metadata(family, config, words.metadata, shapes, vectors, where)
    rebuilt["vocab_size"] = config["vocab_size"]
    check_same_config(source.config, rebuilt, where)
    tensors = [_from_hf(source, one, shapes[one.name], rebuilt, asked) for one in stored]
    tensors += [_vector(name, values) for name, values in words.vectors.items()]
    general = {
        "general.type": entry("model"),
        "general.name": entry(source.path.resolve().name),
        "general.file_type": entry(int(_FILE_TYPES[asked or _most_common(tensors)])),
        "general.quantization_version": entry(GGML_QUANT_VERSION),
    }
    vocabulary = _tokenizer_metadata(source, int(config["vocab_size"]), family.arch)
    return GgufContents(family.arch, {**general, **metadata, **vocabulary}, tensors)


def from_gguf(source: GgufFile, asked: DType | None) -> GgufContents:
    """A GGUF file with its metadata, and with its matrices as asked; all else is copied byte for byte."""
    header = read_header(source.path)
    metadata = {key: MetaEntry(value, header.types[key]) for key, value in header.metadata.items()}
    if asked is not None:
        metadata["general.file_type"] = entry(int(_FILE_TYPES[asked]))
        metadata["general.quantization_version"] = entry(GGML_QUANT_VERSION)
    tensors = [_from_stored(source, tensor, asked) for tensor in header.tensors.values()]
    return GgufContents(str(header.metadata["general.architecture"]), metadata, tensors)


def _family(model_type: object, where: str) -> GgufFamily:
    family = family_of_model_type(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted({family.model_type for family in FAMILIES}))
        raise UnsupportedModelError(
            f"{where} is a model of the type {model_type!r}, for which no GGUF names are known; known: {known}"
        )
    return family


def _shape(source: WeightSource, stored: Stored) -> tuple[int, ...]:
    shapes = {source.info(name).shape for name in stored.sources}
    if len(shapes) != 1:
        raise ModelFileError(f"the tensors {stored.sources[0]}, … of {source.path} differ in shape")
    return shapes.pop()


def _from_hf(
    source: WeightSource, stored: Stored, shape: tuple[int, ...], config: Mapping[str, Any], asked: DType | None
) -> OutputTensor:
    info = source.info(stored.sources[0])
    is_matrix = len(info.shape) > 1 and _is_matrix(stored.name, shape)
    held = dtype_for_matrix(stored.name, info.dtype, shape[-1], asked) if is_matrix else DType.F32
    heads = int(config[stored.layout.heads_key]) if stored.layout.heads_key else 1
    if stored.layout.heads_key and info.shape[0] % (heads * stored.layout.rows_per_head):
        raise ModelFileError(
            f"{stored.sources[0]} of {source.path} has {info.shape[0]} rows, which {heads} heads cannot share"
        )
    return in_layout(source, stored.sources, stored.name, shape, held, stored.layout, heads)


def _from_stored(source: GgufFile, tensor: GgufTensor, asked: DType | None) -> OutputTensor:
    if asked is None or not _is_matrix(tensor.name, tensor.shape):
        return _copied(source, tensor)
    stored = DType.__members__.get(tensor.type.name, DType.F32)
    held = dtype_for_matrix(tensor.name, stored, tensor.shape[-1], asked)
    if held.name == tensor.type.name:
        return _copied(source, tensor)
    if tensor.type.name not in DType.__members__ and not can_decode(tensor.type, GGML_QUANT_SIZES[tensor.type][1]):
        raise UnsupportedModelError(
            f"tensor {tensor.name} in {source.path} is stored as {tensor.type.name}, which cannot be dequantized"
        )
    rows = math.prod(tensor.shape[:-1])
    return OutputTensor(
        tensor.name,
        tensor.shape,
        held.name,
        rows * held.row_bytes(tensor.shape[-1]),
        lambda: _recoded(source, tensor, held),
    )


def _recoded(source: GgufFile, tensor: GgufTensor, held: DType) -> Iterator[NDArray[Any]]:
    """Rows of a stored tensor in another type."""
    stored = DType.__members__.get(tensor.type.name)
    for piece in _stored_bytes(source, tensor):
        rows = piece.reshape(-1, tensor.row_bytes)
        if stored is not None and not stored.is_block:
            yield np.ascontiguousarray(recode_rows(rows.view(stored.numpy), stored, held, tensor.name))
            continue
        values = decode_rows(rows, tensor.type, GGML_QUANT_SIZES[tensor.type][1])
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {tensor.name} in {source.path} has blocks whose scale is not finite")
        yield np.ascontiguousarray(recode_rows(values, DType.F32, held, tensor.name))


def _copied(source: GgufFile, tensor: GgufTensor) -> OutputTensor:
    nbytes = math.prod(tensor.shape[:-1]) * tensor.row_bytes
    return OutputTensor(tensor.name, tensor.shape, tensor.type.name, nbytes, lambda: _stored_bytes(source, tensor))


def _stored_bytes(source: GgufFile, tensor: GgufTensor) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor as they are, whole rows at a time."""
    nbytes = math.prod(tensor.shape[:-1]) * tensor.row_bytes
    step = max(1, _PIECE_BYTES // tensor.row_bytes) * tensor.row_bytes
    file = RowFile(source.path)
    try:
        for start in range(0, nbytes, step):
            piece: NDArray[np.uint8] = np.empty(min(step, nbytes - start), np.uint8)
            file.read_into(tensor.offset + start, piece)
            yield piece
    finally:
        file.close()


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and name.endswith(".weight") and not keeps_its_type(name)


def _vector(name: str, values: NDArray[np.float32]) -> OutputTensor:
    return OutputTensor(name, values.shape, DType.F32.name, values.nbytes, lambda: iter([values]))


def _most_common(tensors: list[OutputTensor]) -> DType:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.encoding] = sizes.get(tensor.encoding, 0) + tensor.nbytes
    return DType[max(sizes, key=lambda encoding: sizes[encoding])]


def _tokenizer_metadata(source: WeightSource, vocab_size: int, arch: str) -> dict[str, MetaEntry]:
    """The folder's tokenizer; a folder without any gives a file that says so, for use with token ids."""
    if any((source.path / name).exists() for name in _TOKENIZER_FILES):
        texts = special_token_texts(source)
        return gguf_vocabulary(load_tokenizer(source), texts, vocab_size, arch, str(source.path))
    ids = {key: source.config.get(key) for key in ("bos_token_id", "eos_token_id")}
    found = {f"tokenizer.ggml.{key}": entry(value) for key, value in ids.items() if isinstance(value, int)}
    return {"tokenizer.ggml.model": entry("none"), **found}
