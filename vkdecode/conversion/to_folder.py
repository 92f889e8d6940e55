"""Writes a Hugging Face folder: plain safetensors, config, and the tokenizer's files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vkdecode.conversion.rope_words import folder_rope
from vkdecode.errors import InvalidInputError, TokenizerError, VkDecodeWarning
from vkdecode.text import load_tokenizer
from vkdecode.text.hf_files import hf_tokenizer_files
from vkdecode.weights import DType, GgufFile, WeightSource
from vkdecode.weights.output_tensor import OutputTensor, recoded
from vkdecode.weights.safetensors_writer import shards, write_safetensors

_NAMES = {DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
)
_NO_TOKENIZER = (None, "none", "no_vocab")
_COPIED_FOLDERS = ("chat_templates", "additional_chat_templates")


def folder_tensors(source: WeightSource, asked: DType | None) -> list[OutputTensor]:
    """All tensors in plain types: matrices as asked or stored, blocks as F16; vectors as stored, or widened to F32.

    Raises:
        InvalidInputError: a block format is asked for.

    """
    if asked is not None and asked.is_block:
        raise InvalidInputError(
            f"a model folder holds f32, f16 or bf16, not {asked.value}; give a target that ends in .gguf"
        )
    return [recoded(source, name, _plain(source, name, asked)) for name in source.names()]


def write_folder(
    folder: Path,
    source: WeightSource,
    tensors: list[OutputTensor],
    progress: Callable[[int], None],
    most_bytes: int,
) -> None:
    """Write a folder that does not exist yet, with files of at most `most_bytes` of weights each."""
    folder.mkdir()
    config = dict(source.config)
    if isinstance(source, GgufFile):
        config = {key: _short(value) if isinstance(value, float) else value for key, value in config.items()}
        config.update(_common_rope(config))
        _write_texts(folder, _tokenizer_files(source))
    else:
        _copy_files(source.path, folder)
    key = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
    config[key] = _NAMES[_main_dtype(tensors)]
    _write_texts(folder, {"config.json": json.dumps(config, indent=2, ensure_ascii=False)})
    files = shards(tensors, most_bytes)
    if len(files) == 1:
        write_safetensors(folder / "model.safetensors", files[0], progress)
        return
    weight_map = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / name, part, progress)
        weight_map.update({tensor.name: name for tensor in part})
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_texts(folder, {"model.safetensors.index.json": json.dumps(index, indent=2)})


def _plain(source: WeightSource, name: str, asked: DType | None) -> DType:
    info = source.info(name)
    if len(info.shape) > 1:
        return asked or (DType.F16 if info.dtype.is_block else info.dtype)
    return info.dtype if asked in (None, info.dtype) else DType.F32


def _main_dtype(tensors: list[OutputTensor]) -> DType:
    """The type of most bytes, which is what a config names."""
    sizes = {dtype: sum(one.nbytes for one in tensors if one.encoding == dtype.name) for dtype in _NAMES}
    return max(sizes, key=lambda dtype: sizes[dtype])


def _short(value: float) -> float:
    """The shortest number that is the same float32, which is what GGUF metadata holds: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value


def _write_texts(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _copy_files(source: Path, folder: Path) -> None:
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for name in _COPIED_FOLDERS:
        for path in sorted((source / name).glob("*.jinja")):
            (folder / name).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name / path.name)


def _tokenizer_files(source: GgufFile) -> dict[str, str]:
    """The file's tokenizer; one that cannot be built is left out with a warning, since token ids work without it."""
    if source.metadata.get("tokenizer.ggml.model") in _NO_TOKENIZER:
        return {}
    try:
        return hf_tokenizer_files(load_tokenizer(source), source.metadata)
    except TokenizerError as error:
        warnings.warn(f"the folder gets no tokenizer: {error}", VkDecodeWarning, stacklevel=2)
        return {}


def _common_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that other programs know, in place of GGUF frequency factors."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") != "factors":
        return {}
    found = folder_rope(config)
    if found is not None:
        return {"rope_scaling": found}
    warnings.warn(
        "the RoPE frequency factors of this file are no llama3 settings; only vkdecode reads them from a folder",
        VkDecodeWarning,
        stacklevel=3,
    )
    return {}
