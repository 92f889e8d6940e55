"""Hugging Face folders: what is read equals what the safetensors library reads, and damaged folders are refused."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import TINY
from safetensors.numpy import load_file, save_file

from vkdecode.errors import ClosedError, InvalidInputError, ModelFileError, UnsupportedModelError
from vkdecode.weights import DType, HfFolder, TensorInfo, open_weights

CONFIG = {"model_type": "llama", "vocab_size": 160}


def make_folder(path: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or CONFIG))
    save_file(tensors, path / "model.safetensors")
    return path


def make_sharded(path: Path, shards: dict[str, dict[str, Any]], weight_map: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if weight_map is None:
        weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def refusal(path: Path, kind: type[Exception] = ModelFileError) -> str:
    with pytest.raises(kind) as caught:
        open_weights(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(path.name for path in TINY.glob("llama*")))
def test_every_tensor_equals_the_reference_reader(name: str) -> None:
    expected = {key: array for file in (TINY / name).glob("*.safetensors") for key, array in load_file(file).items()}
    source = open_weights(TINY / name)
    assert isinstance(source, HfFolder)
    assert source.config["model_type"] == "llama"
    assert source.generation_config["eos_token_id"] == 2
    assert sorted(source.names()) == sorted(expected)
    for key, array in expected.items():
        read = source.read(key)
        assert source.info(key).shape == read.shape
        assert read.dtype == array.dtype == source.info(key).dtype.numpy
        assert read.flags.c_contiguous
        np.testing.assert_array_equal(read.view(np.uint8), array.view(np.uint8))


def test_info_names_the_stored_type(tmp_path: Path) -> None:
    tensors = {
        "f": np.zeros((2, 3), np.float32),
        "h": np.zeros((4,), np.float16),
        "b": np.zeros((2, 2, 2), ml_dtypes.bfloat16),
        "s": np.array(1.5, np.float32),
    }
    source = open_weights(make_folder(tmp_path, tensors))
    assert source.info("f") == TensorInfo("f", (2, 3), DType.F32, "F32")
    assert source.info("h") == TensorInfo("h", (4,), DType.F16, "F16")
    assert source.info("b") == TensorInfo("b", (2, 2, 2), DType.BF16, "BF16")
    assert source.read("s") == np.float32(1.5)
    assert "f" in source
    assert "g" not in source


TABLE = np.arange(40 * 3, dtype=np.float32).reshape(40, 3)


@pytest.fixture(scope="module")
def table_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("table"), {"t": TABLE})


@given(rows=st.lists(st.integers(0, 39), max_size=60))
def test_rows_by_index(table_folder: Path, rows: list[int]) -> None:
    picked = np.array(rows, np.int64)
    with HfFolder(table_folder) as source:
        np.testing.assert_array_equal(source.read("t", picked), TABLE[picked])


@given(start=st.integers(-50, 50), stop=st.integers(-50, 50), step=st.sampled_from([None, 1, 2, 7, -1, -3]))
def test_rows_by_slice(table_folder: Path, start: int, stop: int, step: int | None) -> None:
    with HfFolder(table_folder) as source:
        np.testing.assert_array_equal(source.read("t", slice(start, stop, step)), TABLE[start:stop:step])


@pytest.mark.parametrize("rows", [[-1], [0, 40], [1 << 40]])
def test_rows_outside_are_refused(table_folder: Path, rows: list[int]) -> None:
    with HfFolder(table_folder) as source, pytest.raises(InvalidInputError, match=r"0\.\.39"):
        source.read("t", np.array(rows))


@pytest.mark.parametrize("rows", [np.array([0.5]), np.array([[1]]), np.array([True])])
def test_rows_that_are_no_indices_are_refused(table_folder: Path, rows: Any) -> None:
    with HfFolder(table_folder) as source, pytest.raises(InvalidInputError, match="integer"):
        source.read("t", rows)


def test_reading_some_rows_takes_memory_for_those_rows_only(tmp_path: Path) -> None:
    big = np.ones((1 << 14, 256), np.float32)  # 16 MiB
    source = open_weights(make_folder(tmp_path, {"big": big}))
    tracemalloc.start()
    try:
        source.read("big", np.array([0, 16000, 3]))
        source.read("big", np.random.default_rng(0).permutation(1024))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20


def test_closed_source_says_so(tmp_path: Path) -> None:
    source = open_weights(make_folder(tmp_path, {"t": TABLE}))
    source.close()
    source.close()
    with pytest.raises(ClosedError):
        source.read("t")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    source = open_weights(make_folder(tmp_path, {"t": TABLE}))
    for use in (source.info, source.read):
        with pytest.raises(ModelFileError, match="lm_head"):
            use("lm_head")


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float64, ml_dtypes.float8_e4m3fn, np.bool_])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: Any) -> None:
    source = open_weights(make_folder(tmp_path, {"w": np.zeros((2, 2), dtype), "t": TABLE}))
    np.testing.assert_array_equal(source.read("t"), TABLE)
    for use in (source.info, source.read):
        with pytest.raises(UnsupportedModelError, match=r"tensor w .* stored as \w+; only F32, F16, BF16"):
            use("w")


def test_quantized_checkpoint_is_refused_with_its_method(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": TABLE}, {**CONFIG, "quantization_config": {"quant_method": "gptq"}})
    message = refusal(folder, UnsupportedModelError)
    assert "'gptq', which is not supported; use the original weights or a GGUF file" in message


def test_gpt_oss_in_mxfp4_is_refused_with_what_there_is_instead(tmp_path: Path) -> None:
    """It was released so: there are no original weights to point to."""
    blocks = {"model.layers.0.mlp.experts.down_proj_blocks": np.zeros((2, 64, 3, 16), np.uint8)}
    packed = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    message = refusal(make_folder(tmp_path / "m", blocks, packed), UnsupportedModelError)
    assert str(tmp_path / "m" / "config.json") in message
    assert message.endswith(
        "quantized with 'mxfp4', which is not supported; use a GGUF file of the model, or a copy of the folder with "
        "its weights dequantized to bf16"
    )
    unsaid = open_weights(make_folder(tmp_path / "n", blocks, {"model_type": "gpt_oss"}))
    with pytest.raises(UnsupportedModelError, match=r"down_proj_blocks in .* is stored as U8; only F32, F16, BF16"):
        unsaid.info("model.layers.0.mlp.experts.down_proj_blocks")


@pytest.mark.parametrize("method", [None, 4, ["mxfp4"], {"a": 1}])
def test_a_method_that_is_no_name_is_refused_too(tmp_path: Path, method: Any) -> None:
    folder = make_folder(tmp_path, {"t": TABLE}, {**CONFIG, "quantization_config": {"quant_method": method}})
    assert repr(method) in refusal(folder, UnsupportedModelError)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '{"vocab_size": 1}', '{"model_type": 5}', '{"model_type": "a", "model_type": "b"}'],
)
def test_config_that_is_no_config(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path, {"t": TABLE})
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


def test_config_nested_without_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": TABLE})
    (folder / "config.json").write_text("[" * 200_000)
    assert "config.json" in refusal(folder)


def test_config_that_is_not_text(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": TABLE})
    (folder / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    assert "UTF-8" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


def test_damaged_generation_config(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": TABLE})
    (folder / "generation_config.json").write_text("nope")
    assert "generation_config.json" in refusal(folder)


def test_what_is_not_a_model(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "note.txt").write_text("hello")
    assert "not a model" in refusal(tmp_path / "note.txt")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf" in refusal(tmp_path)
    with pytest.raises(ModelFileError):
        open_weights("bad\0name")
    with pytest.raises(ModelFileError):
        open_weights("x" * 5000)


def test_pickle_weights_are_refused_and_safetensors_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "safetensors files are needed" in refusal(tmp_path, UnsupportedModelError)


def test_truncation_at_every_kind_of_place(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": TABLE, "u": TABLE[:3]})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in [*range(0, 300, 7), len(whole) - 1, len(whole) - 4]:
        path.write_bytes(whole[:length])
        assert "model.safetensors" in refusal(folder)


def test_flipped_header_bytes_never_crash_or_read_wrong_sizes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": TABLE, "u": TABLE[:3]})
    path = folder / "model.safetensors"
    whole = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    for position in range(header):
        for flip in (0x01, 0x10, 0x80):
            whole[position] ^= flip
            path.write_bytes(whole)
            try:
                source = open_weights(folder)
            except (ModelFileError, UnsupportedModelError):
                pass
            else:
                for name in source.names():
                    try:
                        assert source.read(name).shape == source.info(name).shape
                    except UnsupportedModelError:
                        assert position > 8
                source.close()
            whole[position] ^= flip


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}',
        b'{"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16000]}}',
        b'{"t": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}',
        b'{"t": {"dtype": "F32", "shape": [1152921504606846976, 16], "data_offsets": [0, 16]}}',
        b'{"t": {"dtype": "F32", "shape": [4]}}',
        b'{"t": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
        b' "t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
    ],
)
def test_header_that_lies(tmp_path: Path, header: bytes) -> None:
    folder = make_folder(tmp_path, {"t": TABLE})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    refusal(folder)


def test_header_of_absurd_length(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": TABLE})
    for length in (1 << 60, (1 << 64) - 1, 1 << 32):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + bytes(64))
        refusal(folder)


def test_file_that_shrinks_while_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"t": np.ones((4096, 64), np.float32)})
    source = open_weights(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelFileError, match="ends early"):
        source.read("t")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").mkdir()
    assert "regular file" in refusal(tmp_path)


SHARDS = {"a.safetensors": {"x": TABLE}, "b.safetensors": {"y": TABLE[:2]}}


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    source = open_weights(make_sharded(tmp_path, SHARDS))
    assert sorted(source.names()) == ["x", "y"]
    np.testing.assert_array_equal(source.read("y"), TABLE[:2])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"x": 3}}']
)
def test_index_that_is_no_index(tmp_path: Path, text: str) -> None:
    folder = make_sharded(tmp_path, SHARDS)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "index.json" in refusal(folder)


def test_index_that_names_an_absent_shard(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path, SHARDS)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors" in refusal(folder)


def test_index_that_puts_a_tensor_where_it_is_not(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path, SHARDS, {"x": "b.safetensors", "y": "b.safetensors"})
    assert "tensor x" in refusal(folder)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    both = {**SHARDS, "b.safetensors": {"x": TABLE, "y": TABLE}}
    folder = make_sharded(tmp_path, both, {"x": "a.safetensors", "y": "b.safetensors"})
    assert "tensor x is both in" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/passwd", "sub/../../out.safetensors", "..\\out", "C:out", "a\0b"]
)
def test_shard_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"x": TABLE}, tmp_path / "out.safetensors")
    folder = make_sharded(tmp_path / "model", SHARDS, {"x": name, "y": "b.safetensors"})
    assert "outside the model folder" in refusal(folder)


def test_shard_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "model", SHARDS)
    shutil.move(folder / "a.safetensors", tmp_path / "a.safetensors")
    (folder / "a.safetensors").symlink_to(tmp_path / "a.safetensors")
    assert "outside the model folder" in refusal(folder)


def test_links_of_the_hugging_face_cache_work(tmp_path: Path) -> None:
    folder = tmp_path / "models--x" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    make_sharded(folder, SHARDS)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for name in SHARDS:
        shutil.move(folder / name, blobs / name)
        (folder / name).symlink_to(Path("../../blobs") / name)
    np.testing.assert_array_equal(open_weights(folder).read("x"), TABLE)


def test_link_that_leads_to_itself(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path, SHARDS)
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to("a.safetensors")
    refusal(folder)
