"""Conversions between folders and GGUF files: the same model comes out, in the types that were asked for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conversions import LLAMAS, as_numbers, as_type, assert_same_settings, changed_folder, opened_gguf, settings
from gguf_converter import NAMES, converted
from model_files import LLAMA_META, TINY, convert_tiny, smollm2_path, write_gguf
from safetensors.numpy import load_file, save_file

from vkdecode.conversion import Converted, convert
from vkdecode.conversion import convert_model as module
from vkdecode.errors import InvalidInputError, UnsupportedModelError, VkDecodeError, VkDecodeWarning
from vkdecode.text import load_tokenizer
from vkdecode.weights import DType, open_weights
from vkdecode.weights.families import Layout, family_of_model_type
from vkdecode.weights.families.inverse import gguf_metadata
from vkdecode.weights.gguf_header import read_header

EMBEDDING = "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("weights", [None, "f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", LLAMAS)
def test_a_folder_becomes_a_gguf_file_of_the_same_model(tmp_path: Path, name: str, weights: str | None) -> None:
    folder = open_weights(TINY / name)
    done = convert(TINY / name, tmp_path / "m.gguf", weights)
    made = opened_gguf(tmp_path / "m.gguf")
    assert sorted(made.names()) == sorted(folder.names())
    assert_same_settings(made, folder)
    assert [made.config[key] for key in ("bos_token_id", "eos_token_id")] == [1, 2]
    for tensor in folder.names():
        values, info = folder.read(tensor), made.info(tensor)
        if values.ndim == 1:
            assert info.dtype is DType.F32
        elif weights == "q4_0" and tensor in (EMBEDDING, "lm_head.weight"):
            assert info.dtype is DType.Q8_0
        else:
            assert info.dtype is (folder.info(tensor).dtype if weights is None else DType(weights))
        np.testing.assert_array_equal(made.read(tensor), as_type(values, info.dtype))
    assert done.path == tmp_path / "m.gguf"
    assert sum(done.tensors.values()) == len(read_header(done.path).tensors)


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama-bias-headdim", "llama-tied-mqa"])
def test_rows_lie_where_the_converter_of_llama_cpp_puts_them(tmp_path: Path, name: str, quant: str) -> None:
    convert(TINY / name, tmp_path / "ours.gguf", quant.lower())
    theirs = gguf.GGUFReader(convert_tiny(tmp_path / "theirs.gguf", TINY / name, quant))
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "ours.gguf").tensors}
    assert sorted(ours) == sorted(tensor.name for tensor in theirs.tensors)
    for tensor in theirs.tensors:
        mine = ours[tensor.name]
        assert (mine.tensor_type, mine.shape.tolist()) == (tensor.tensor_type, tensor.shape.tolist())
        np.testing.assert_array_equal(mine.data, tensor.data)


def test_the_reader_of_the_gguf_package_finds_every_field(tmp_path: Path) -> None:
    convert(TINY / "llama-rope-yarn", tmp_path / "m.gguf", "q8_0")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    types = {key: field.types[0].name for key, field in reader.fields.items()}
    epsilon = fields.pop("llama.attention.layer_norm_rms_epsilon")
    assert epsilon == pytest.approx(1e-6)
    assert fields == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "llama-rope-yarn",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q8_0,
        "general.quantization_version": 2,
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.vocab_size": 160,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "tokenizer.ggml.model": "none",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert {types[key] for key, value in fields.items() if isinstance(value, int)} == {"UINT32"}
    assert {types[key] for key, value in fields.items() if isinstance(value, float)} == {"FLOAT32"}


def test_llama3_scaling_becomes_the_factors_of_the_formula(tmp_path: Path) -> None:
    """As llama.cpp's converter computes them: 1 for short waves, the factor for long ones, a ramp between."""
    convert(TINY / "llama-rope-llama3", tmp_path / "m.gguf")
    (found,) = (one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors if one.name == "rope_freqs.weight")
    expected = []
    for freq in 1.0 / 500000.0 ** (np.arange(0, 16, 2) / 16):
        wavelength = 2 * np.pi / freq
        smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
        ramp = 1 / ((1 - smooth) / 8.0 + smooth)
        expected.append(1.0 if wavelength < 16 / 4.0 else 8.0 if wavelength > 16 / 1.0 else ramp)
    np.testing.assert_allclose(found.data, expected, rtol=1e-6)


@pytest.mark.parametrize("name", LLAMAS)
def test_a_gguf_file_becomes_a_folder_of_the_same_model(tmp_path: Path, name: str) -> None:
    folder = open_weights(TINY / name)
    convert(TINY / name, tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "folder")
    made = open_weights(tmp_path / "folder")
    assert sorted(made.names()) == sorted(folder.names())
    assert_same_settings(made, folder)
    for tensor in folder.names():
        np.testing.assert_array_equal(as_numbers(made, tensor), as_numbers(folder, tensor))
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["torch_dtype"] == ("bfloat16" if name == "llama-rope-llama3" else "float32")
    assert config["rms_norm_eps"] == folder.config["rms_norm_eps"]
    # Other programs know this name, and not the factors of the GGUF file.
    if name == "llama-rope-llama3":
        scaling = {key: value for key, value in folder.config["rope_parameters"].items() if key != "rope_theta"}
        assert config["rope_scaling"] == scaling


def test_quantized_blocks_become_numbers_in_a_folder(tmp_path: Path) -> None:
    source = opened_gguf(convert_tiny(tmp_path / "m.gguf", TINY / "llama", "Q4_1"))
    for weights, dtype in ((None, DType.F16), ("f32", DType.F32), ("bf16", DType.BF16)):
        convert(source.path, tmp_path / str(weights), weights)
        made = open_weights(tmp_path / str(weights))
        assert made.info(DOWN).dtype is dtype
        np.testing.assert_array_equal(made.read(DOWN), as_numbers(source, DOWN).astype(dtype.numpy))
        assert made.info("model.norm.weight").dtype is DType.F32
    with pytest.raises(InvalidInputError, match=r"holds f32, f16 or bf16, not q8_0; .*\.gguf"):
        convert(source.path, tmp_path / "folder", "q8_0")


def test_a_folder_becomes_a_folder_with_other_types(tmp_path: Path) -> None:
    original = changed_folder(tmp_path / "original", "llama-rope-llama3")  # bf16
    files = {"tokenizer.json": "{}", "LICENSE": "yes", "chat_template.jinja": "x", "other.bin": "no"}
    for name, text in files.items():
        (original / name).write_text(text)
    convert(original, tmp_path / "f16", "f16")
    source, made = open_weights(original), open_weights(tmp_path / "f16")
    for name in source.names():
        values = source.read(name)
        assert made.info(name).dtype is (DType.F16 if values.ndim > 1 else DType.F32)
        np.testing.assert_array_equal(made.read(name), values.astype(made.info(name).dtype.numpy))
    assert {**source.config, "dtype": "float16"} == made.config
    left_out = {"other.bin", "expected.npz"}
    assert {path.name for path in made.path.iterdir()} == {path.name for path in original.iterdir()} - left_out


@pytest.mark.parametrize("name", NAMES)
def test_every_family_becomes_what_the_converter_of_llama_cpp_makes_of_it(tmp_path: Path, name: str) -> None:
    convert(TINY / name, tmp_path / "m.gguf", "f32")
    arch, meta, tensors = converted(TINY / name)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.architecture"].contents() == arch
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert sorted(found) == sorted(tensors)
    if "rope_freqs.weight" in tensors:
        np.testing.assert_allclose(found["rope_freqs.weight"].data, tensors.pop("rope_freqs.weight"), rtol=1e-6)
    for key, array in tensors.items():
        # Shapes are padded with ones where they are read: a vector is a matrix of one row.
        assert found[key].shape.tolist()[::-1] in (list(array.shape), list(array.squeeze().shape)), key
        np.testing.assert_array_equal(found[key].data, array.reshape(found[key].data.shape), key)
    for key in set(meta) & set(reader.fields):
        value = reader.fields[key].contents()
        assert value == (pytest.approx(meta[key], rel=1e-6) if isinstance(meta[key], float) else meta[key]), key
    assert_same_settings(opened_gguf(tmp_path / "m.gguf"), open_weights(TINY / name))


def test_a_folder_keeps_tensors_of_any_shape(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "m")
    rng = np.random.default_rng(8)
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (3, 1), (2, 3, 5), (2, 0), (2, 3, 4, 5))
    more = {f"more.{index}": rng.normal(size=shape).astype(np.float32) for index, shape in enumerate(shapes)}
    save_file({**load_file(folder / "model.safetensors"), **more}, folder / "model.safetensors")
    convert(folder, tmp_path / "same")
    convert(folder, tmp_path / "f16", "f16")
    for name, values in more.items():
        for target in ("same", "f16"):
            made = load_file(tmp_path / target / "model.safetensors")[name]
            wanted = values.astype(np.float16) if target == "f16" and values.ndim > 1 else values
            assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(made, wanted)


def test_a_family_without_a_table_is_written_as_a_folder_and_refused_as_gguf_by_name(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "m", model_type="made_up")
    convert(folder, tmp_path / "bf16", "bf16")
    assert open_weights(tmp_path / "bf16").info(DOWN).dtype is DType.BF16
    with pytest.raises(UnsupportedModelError, match=r"type 'made_up', for which no GGUF names are known; .*llama"):
        convert(folder, tmp_path / "m.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "m"]


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "max_positions 128"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}, "inv_freq"),
    ],
)
def test_what_gguf_metadata_cannot_say_is_refused(tmp_path: Path, rope: dict[str, Any], words: str) -> None:
    folder = changed_folder(tmp_path / "m", rope_parameters={**rope, "rope_theta": 100.0})
    with pytest.raises(UnsupportedModelError, match=f"{words}.* which a GGUF file cannot say"):
        convert(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
        {"rope_type": "yarn", "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2},
        {"type": "linear", "factor": 3},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_rope_settings_survive(tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = changed_folder(tmp_path / "m", rope_parameters=None, rope_scaling=rope, rope_theta=123456.0)
    convert(folder, tmp_path / "m.gguf")
    assert_same_settings(opened_gguf(tmp_path / "m.gguf"), open_weights(folder))


def test_settings_that_a_config_leaves_out_are_written_out(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "m", rms_norm_eps=None, head_dim=None, rope_parameters=None, hidden_act=None)
    convert(folder, tmp_path / "m.gguf")
    assert_same_settings(opened_gguf(tmp_path / "m.gguf"), open_weights(folder))
    assert settings(opened_gguf(tmp_path / "m.gguf"))["head_dim"] == 16


def test_mistral_without_windows_is_read_as_llama() -> None:
    source = open_weights(TINY / "mistral-sliding")
    family = family_of_model_type("mistral")
    assert family is not None
    for window, model_type in ((7, "mistral"), (None, "llama")):
        config = {**source.config, "sliding_window": window}
        metadata, rebuilt = gguf_metadata(family, config, {"rope.dimension_count": 16}, {}, {}, "m")
        assert rebuilt["model_type"] == model_type
        assert ("llama.attention.sliding_window" in metadata) is (window is not None)


def test_a_tied_head_and_computed_buffers_are_left_out(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "m", "llama-tied-mqa")
    tensors = load_file(folder / "model.safetensors")
    more = {
        "lm_head.weight": tensors[EMBEDDING],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    save_file({**tensors, **more}, folder / "model.safetensors")
    convert(folder, tmp_path / "m.gguf")
    assert sorted(opened_gguf(tmp_path / "m.gguf").names()) == sorted(tensors)


def test_a_tensor_without_a_gguf_name_is_refused(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.0.self_attn.q_none.weight", "model.layers.0.mlp.up_proj.scale", "model.layers.x.weight"):
        save_file({**tensors, name: np.ones(64, np.float32)}, folder / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=f"tensor '{name}' has no place in a GGUF file of a llama"):
            convert(folder, tmp_path / "m.gguf")


def odd_metadata() -> dict[str, Any]:
    return {**LLAMA_META, "general.name": "odd", "custom.flag": True, "custom.list": ["a", "b c"], "custom.text": "ü"}


def test_gguf_to_gguf_keeps_metadata_and_recodes_matrices(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors = {
        "token_embd.weight": rng.normal(size=(32, 64)).astype(np.float32),
        "blk.0.attn_q.weight": rng.normal(size=(64, 64)).astype(np.float32),
        "blk.0.attn_norm.weight": rng.normal(size=64).astype(np.float32),
        "blk.0.attn_q.bias": rng.normal(size=64).astype(np.float32),
        "rope_freqs.weight": np.ones(8, np.float32),
    }
    path = write_gguf(tmp_path / "m.gguf", odd_metadata(), tensors, "Q4_1")
    convert(path, tmp_path / "q8.gguf", "q8_0")
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "q8.gguf")
    first, second = (
        {
            key: (field.types, field.contents())
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.") and key not in ("general.file_type", "general.quantization_version")
        }
        for reader in (before, after)
    )
    assert first == second
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    made = {tensor.name: tensor for tensor in after.tensors}
    assert list(made) == list(tensors)
    for tensor in before.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1:
            wide = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            wanted = gguf.quants.quantize(wide, gguf.GGMLQuantizationType.Q8_0)
            np.testing.assert_array_equal(made[tensor.name].data, wanted)
        else:
            np.testing.assert_array_equal(made[tensor.name].data, tensor.data)


@pytest.mark.parametrize("weights", [None, "q8_0"])
def test_the_same_type_keeps_every_byte(tmp_path: Path, weights: str | None) -> None:
    path = convert_tiny(tmp_path / "m.gguf", TINY / "llama", "Q8_0", {"general.file_type": 7})
    done = convert(path, tmp_path / "copy.gguf", weights)
    before, after = (gguf.GGUFReader(one).tensors for one in (path, done.path))
    for one, other in zip(before, after, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        assert one.data.tobytes() == other.data.tobytes()


def test_types_that_only_the_gguf_package_reads_are_copied_and_recoded(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.TQ2_0
    table = np.random.default_rng(6).integers(-1, 2, (32, 256)).astype(np.float32)
    meta = {**LLAMA_META, "llama.embedding_length": 256}
    path = write_gguf(tmp_path / "m.gguf", meta, {"token_embd.weight": table}, kind.name)
    convert(path, tmp_path / "copy.gguf")
    convert(path, tmp_path / "f32.gguf", "f32")
    (copy,), (wide,) = (gguf.GGUFReader(tmp_path / name).tensors for name in ("copy.gguf", "f32.gguf"))
    assert copy.tensor_type == kind
    np.testing.assert_array_equal(gguf.quants.dequantize(copy.data, kind), table)
    np.testing.assert_array_equal(wide.data, table)


def test_rows_that_do_not_divide_into_blocks_stay_at_16_bits(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "m", intermediate_size=80)
    tensors = load_file(folder / "model.safetensors")
    tensors[DOWN] = tensors[DOWN][:, :80].copy()
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "m.gguf", "q8_0")
    made = opened_gguf(tmp_path / "m.gguf")
    assert made.info(DOWN).dtype is DType.F16
    np.testing.assert_array_equal(made.read(DOWN), tensors[DOWN].astype(np.float16))


def test_a_large_folder_is_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    convert(TINY / "llama", tmp_path / "m")
    names = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert len(names) >= 3
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    source, made = open_weights(TINY / "llama"), open_weights(tmp_path / "m")
    assert sorted(made.names()) == sorted(source.names())
    for name in source.names():
        np.testing.assert_array_equal(made.read(name), source.read(name))
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(source.read(name).nbytes for name in source.names())


def test_memory_stays_bounded_and_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "m", vocab_size=40000, hidden_size=512)
    table = np.random.default_rng(7).normal(size=(40000, 512)).astype(np.float32)  # 82 MB
    save_file({EMBEDDING: table, "lm_head.weight": table}, folder / "model.safetensors")
    del table
    seen: list[tuple[int, int]] = []
    tracemalloc.start()
    done = convert(folder, tmp_path / "m.gguf", "q8_0", progress=lambda done, total: seen.append((done, total)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 << 20
    assert [one for one, _ in seen] == sorted(one for one, _ in seen)
    assert len(seen) >= 20
    assert seen[-1] == (done.nbytes, done.nbytes)


def test_the_real_model_there_and_back(tmp_path: Path) -> None:
    original = opened_gguf(smollm2_path())
    convert(original.path, tmp_path / "folder", "bf16")
    done = convert(tmp_path / "folder", tmp_path / "m.gguf", "q8_0")
    assert done == Converted(tmp_path / "m.gguf", done.nbytes, {"q8_0": 211, "f32": 61})
    made = opened_gguf(tmp_path / "m.gguf")
    assert_same_settings(made, original)
    for key in (
        "tokens",
        "merges",
        "model",
        "pre",
        "bos_token_id",
        "eos_token_id",
        "unknown_token_id",
        "add_bos_token",
    ):
        assert made.metadata[f"tokenizer.ggml.{key}"] == original.metadata[f"tokenizer.ggml.{key}"], key
    np.testing.assert_array_equal(
        made.metadata["tokenizer.ggml.token_type"], original.metadata["tokenizer.ggml.token_type"]
    )
    assert made.metadata["tokenizer.chat_template"] == original.metadata["tokenizer.chat_template"]
    first, second = load_tokenizer(original), load_tokenizer(made)
    assert first.special_tokens == second.special_tokens
    text = "The <|im_start|>user said: 12 naïve\n\n cafés — 日本 🙂"
    assert first.encode(text) == second.encode(text)


def test_a_table_that_is_read_backwards_wrongly_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read as a user will read it, and held against the source."""
    monkeypatch.setattr(Layout, "original_rows", lambda _self, rows, _count, _heads: rows)
    with pytest.raises(UnsupportedModelError, match=r"[qk]_proj.weight .* would change its values"):
        convert(TINY / "llama", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="weights must be one of"):
        convert(TINY / "llama", tmp_path / "m.gguf", "q5_0")
    with pytest.raises(InvalidInputError, match="a target is"):
        convert(TINY / "llama", "")
    with pytest.raises(VkDecodeError, match="does not exist"):
        convert(tmp_path / "none", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_factors_of_no_known_scaling_stay_factors_with_a_warning(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    table = np.ones((32, 64), np.float32)
    path = write_gguf(tmp_path / "m.gguf", LLAMA_META, {"token_embd.weight": table, "rope_freqs.weight": factors})
    with pytest.warns(VkDecodeWarning, match="no llama3 settings"):
        convert(path, tmp_path / "m")
    assert_same_settings(open_weights(tmp_path / "m"), opened_gguf(path))
    convert(tmp_path / "m", tmp_path / "back.gguf")
    np.testing.assert_array_equal(read_factors(tmp_path / "back.gguf"), factors)


def read_factors(path: Path) -> Any:
    return next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "rope_freqs.weight")
