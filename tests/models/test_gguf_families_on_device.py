"""GGUF files of every family that has some give the logits of the folders that they were made from."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from gguf_converter import NAMES
from model_files import TINY, convert_tiny
from numpy.typing import NDArray
from rungs import CONTRACT, check_reference, prompt_and_decode
from safetensors.numpy import save_file
from stepping import Logits, furthest

from vkdecode.decode import DecodeMode, InferenceContext
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.weights import WeightSource, open_weights
from vkdecode.weights.blocks import decode_rows, ggml_type


def prompt_and_four_tokens(path: Path, name: str, device: Device, weights: str | None = None) -> tuple[Logits, Logits]:
    with load(path, device=device, weights=weights) as model, InferenceContext(device) as context:
        return prompt_and_decode(model, name, DecodeMode(), context, tokens=4)


def values(source: WeightSource, name: str) -> NDArray[np.float32]:
    info, read = source.info(name), source.read(name)
    if info.dtype.is_block:
        flat = read.reshape(-1, read.shape[-1])
        read = decode_rows(flat, ggml_type(info.dtype), info.dtype.block_bytes).reshape(info.shape)
    return np.ascontiguousarray(read, np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_plain_numbers_gives_the_reference_logits(tmp_path: Path, device: Device, name: str) -> None:
    path = convert_tiny(tmp_path / "m.gguf", TINY / name)
    check_reference(name, *prompt_and_four_tokens(path, name, device))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_blocks_gives_the_logits_of_its_values(tmp_path: Path, device: Device, name: str) -> None:
    path = convert_tiny(tmp_path / "m.gguf", TINY / name, "Q8_0")
    folder = tmp_path / "folder"
    folder.mkdir()
    with closing(open_weights(path)) as source:
        save_file({tensor: values(source, tensor) for tensor in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text((TINY / name / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    found = prompt_and_four_tokens(path, name, device)
    wanted = prompt_and_four_tokens(folder, name, device, "f32")
    assert max(furthest(one, other) for one, other in zip(found, wanted, strict=True)) <= CONTRACT
