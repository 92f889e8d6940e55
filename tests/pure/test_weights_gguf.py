"""GGUF files present themselves as Hugging Face folders: same names, row order, config and values."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from model_files import LLAMA_META, TINY, convert_tiny, smollm2_path, write_gguf
from numpy.typing import NDArray

from vkdecode.errors import ClosedError, InvalidInputError, ModelFileError, UnsupportedModelError
from vkdecode.models.rope import rope_from_config
from vkdecode.weights import DType, GgufFile, TensorInfo, open_weights
from vkdecode.weights.blocks import decode_rows, ggml_type, scales_are_finite
from vkdecode.weights.dtypes import BLOCK_DTYPES, PLAIN_DTYPES

EMBEDDING = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(32, 64)

SAME_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
)


def minimal(
    path: Path,
    meta: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[Any]] | None = None,
    quant: str = "F32",
) -> Path:
    return write_gguf(path, {**LLAMA_META, **(meta or {})}, {"token_embd.weight": EMBEDDING, **(tensors or {})}, quant)


def opened(path: Path) -> GgufFile:
    source = open_weights(path)
    assert isinstance(source, GgufFile)
    return source


@pytest.fixture(scope="module")
def smollm2() -> GgufFile:
    return opened(smollm2_path())


@pytest.mark.parametrize("name", ["llama", "llama-bias-headdim", "llama-tied-mqa"])
def test_converted_checkpoint_reads_like_its_folder(tmp_path: Path, name: str) -> None:
    folder = open_weights(TINY / name)
    source = opened(convert_tiny(tmp_path / "m.gguf", TINY / name))
    assert sorted(source.names()) == sorted(folder.names())
    for tensor in folder.names():
        assert source.info(tensor) == folder.info(tensor)
        np.testing.assert_array_equal(source.read(tensor), folder.read(tensor))
        rows = np.array([3, 0, 7, 8, 1, 15])
        np.testing.assert_array_equal(source.read(tensor, rows), folder.read(tensor, rows))
    for key in SAME_KEYS:
        assert source.config[key] == folder.config[key], key
    assert source.config["rms_norm_eps"] == pytest.approx(folder.config["rms_norm_eps"])
    head_dim = folder.config["head_dim"]
    np.testing.assert_array_equal(
        rope_from_config(source.config, head_dim).inv_freq, rope_from_config(folder.config, head_dim).inv_freq
    )


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_come_as_the_bytes_of_the_gguf_package(tmp_path: Path, quant: str) -> None:
    table = np.random.default_rng(1).normal(size=(50, 96)).astype(np.float32)
    source = opened(minimal(tmp_path / "m.gguf", None, {"blk.0.ffn_down.weight": table}, quant))
    expected = gguf.quants.quantize(table, gguf.GGMLQuantizationType[quant])
    name = "model.layers.0.mlp.down_proj.weight"
    info = source.info(name)
    assert info == TensorInfo(name, (50, 96), DType[quant], quant)
    assert info.dtype.row_bytes(96) == expected.shape[1]
    np.testing.assert_array_equal(source.read(name), expected)
    np.testing.assert_array_equal(source.read(name, slice(45, 3, -4)), expected[45:3:-4])
    assert source.read(name, np.array([], np.int64)).shape == (0, expected.shape[1])


def test_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    for dtype in (*PLAIN_DTYPES, *BLOCK_DTYPES):
        assert (dtype.block_columns, dtype.block_bytes) == gguf.GGML_QUANT_SIZES[ggml_type(dtype)]


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_any_block_is_finite_where_its_scales_are(dtype: DType) -> None:
    """Random bytes: the check and the decoded values agree on what is damaged."""
    blocks = np.random.default_rng(5).integers(0, 256, (400, dtype.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        values = decode_rows(blocks, ggml_type(dtype), dtype.block_bytes)
    finite = np.isfinite(values).all(axis=1)
    assert 0 < finite.sum() < 400
    assert [scales_are_finite(block, dtype) for block in blocks] == finite.tolist()


@pytest.mark.parametrize(("quant", "held"), [("F32", DType.F32), ("F16", DType.F16), ("BF16", DType.BF16)])
def test_plain_values_are_held_as_stored(tmp_path: Path, quant: str, held: DType) -> None:
    source = opened(minimal(tmp_path / "m.gguf", None, None, quant))
    name = "model.embed_tokens.weight"
    assert source.info(name) == TensorInfo(name, (32, 64), held, quant)
    read = source.read(name)
    assert read.dtype == held.numpy
    np.testing.assert_array_equal(read, EMBEDDING.astype(held.numpy))
    assert read.dtype.itemsize == held.itemsize


def test_quantized_vector_is_held_as_f32(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32)
    packed = gguf.quants.quantize(values[None], gguf.GGMLQuantizationType.Q8_0)[0]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in LLAMA_META.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_tensor("token_embd.weight", EMBEDDING)
    writer.add_tensor("output_norm.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = opened(path)
    assert source.info("model.norm.weight") == TensorInfo("model.norm.weight", (64,), DType.F32, "Q8_0")
    np.testing.assert_allclose(source.read("model.norm.weight", slice(3, 40, 5)), values[3:40:5], atol=0.3)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_no_number_is_an_error(tmp_path: Path, bad: float) -> None:
    table = np.ones((2, 32), np.float32)
    path = minimal(tmp_path / "m.gguf", None, {"blk.0.ffn_up.weight": table}, "Q8_0")
    data = bytearray(path.read_bytes())
    block = data.rindex(np.float16(1 / 127).tobytes() + b"\x7f" * 32)
    data[block : block + 2] = np.float16(bad).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight .* scale is not finite"):
        opened(path).read("model.layers.0.mlp.up_proj.weight")


def test_rows_outside_are_refused(smollm2: GgufFile) -> None:
    with pytest.raises(InvalidInputError, match=r"0\.\.49151"):
        smollm2.read("model.embed_tokens.weight", np.array([49152]))


def test_reading_some_rows_takes_memory_for_those_rows_only(smollm2: GgufFile) -> None:
    name = "model.embed_tokens.weight"
    smollm2.read(name, slice(0, 1))
    tracemalloc.start()
    try:
        few = smollm2.read(name, np.array([49151, 0, 7]))
        some = smollm2.read(name, slice(1000, 3000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert few.shape == (3, 612)
    assert some.dtype == np.uint8
    assert peak < 16 << 20  # the table has 29 MiB


def test_real_file_against_the_gguf_reader(smollm2: GgufFile) -> None:
    reader = gguf.GGUFReader(str(smollm2_path()))
    assert len(smollm2.names()) == len(reader.tensors) == 272
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    embedding = by_name["token_embd.weight"]
    rows = np.array([0, 17, 49151])
    expected = embedding.data[rows]
    np.testing.assert_array_equal(smollm2.read("model.embed_tokens.weight", rows), expected)
    value = by_name["blk.29.attn_v.weight"]
    np.testing.assert_array_equal(smollm2.read("model.layers.29.self_attn.v_proj.weight"), value.data)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            read = smollm2.metadata[key]
            assert (read.tolist() if isinstance(read, np.ndarray) else read) == field.contents()


def test_config_of_the_real_file(smollm2: GgufFile) -> None:
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: smollm2.config[key] for key in expected} == expected
    assert smollm2.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert "rope_scaling" not in smollm2.config
    assert smollm2.info("model.layers.0.self_attn.q_proj.weight").stored_as == "Q4_1"


def test_rope_factors_go_into_the_config(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 2, 3, 8, 8, 8], np.float32)
    source = opened(minimal(tmp_path / "m.gguf", None, {"rope_freqs.weight": factors}))
    assert list(source.names()) == ["model.embed_tokens.weight"]
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(rope_from_config(source.config, 16).inv_freq, plain / factors, rtol=1e-14)


def test_yarn_metadata_becomes_yarn_config(tmp_path: Path) -> None:
    meta = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.finetuned": True,
    }
    ours = rope_from_config(opened(minimal(tmp_path / "m.gguf", meta)).config, 16)
    theirs = rope_from_config(open_weights(TINY / "llama-rope-yarn").config, 16)
    np.testing.assert_array_equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_factor


def test_yarn_attention_factor_is_the_product_of_both(tmp_path: Path) -> None:
    meta = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    rope = rope_from_config(opened(minimal(tmp_path / "m.gguf", meta)).config, 16)
    assert rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


@pytest.mark.parametrize(
    "meta",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling_in_both_spellings(tmp_path: Path, meta: dict[str, Any]) -> None:
    ours = rope_from_config(opened(minimal(tmp_path / "m.gguf", meta)).config, 16)
    theirs = rope_from_config(open_weights(TINY / "llama-rope-linear").config, 16)
    np.testing.assert_array_equal(ours.inv_freq, theirs.inv_freq)


@pytest.mark.parametrize(
    ("meta", "word"),
    [
        ({"llama.attention.value_length": 8}, "value heads"),
        ({"llama.attention.head_count_kv": [2, 4]}, "differs between layers"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        (
            {
                "llama.rope.scaling.type": "linear",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.attn_factor": 2.0,
            },
            "attn_factor",
        ),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"split.count": 3}, "3 parts"),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path: Path, meta: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word) as caught:
        open_weights(minimal(tmp_path / "m.gguf", meta))
    assert "\n" not in str(caught.value)


def test_equal_head_counts_of_all_layers_are_one_number(tmp_path: Path) -> None:
    assert (
        opened(minimal(tmp_path / "m.gguf", {"llama.attention.head_count_kv": [2, 2]})).config["num_key_value_heads"]
        == 2
    )


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"token_embd.weight": EMBEDDING}, arch="mamba9")
    with pytest.raises(UnsupportedModelError, match=r"'mamba9'.*supported: .*llama"):
        open_weights(path)


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = minimal(tmp_path / "m.gguf", None, {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q_norm\.weight"):
        open_weights(path)


def test_tensor_of_a_layer_that_is_not_there(tmp_path: Path) -> None:
    path = minimal(tmp_path / "m.gguf", None, {"blk.2.attn_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(ModelFileError, match="only 2 layers"):
        open_weights(path)


def test_type_that_cannot_be_dequantized_is_refused_by_name(tmp_path: Path) -> None:
    path = minimal(tmp_path / "m.gguf", None, {"blk.0.ffn_up.weight": np.ones((2, 8), np.int32)})
    source = opened(path)
    for use in (source.info, source.read):
        with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight .* I32"):
            use("model.layers.0.mlp.up_proj.weight")


def test_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    path = minimal(tmp_path / "m.gguf", None, {"blk.0.attn_q.weight": np.ones((36, 64), np.float32)})
    with pytest.raises(ModelFileError, match="4 heads"):
        opened(path).read("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", "many"),
        ("llama.block_count", 0),
        ("llama.attention.head_count", True),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.rope.freq_base", "x"),
        ("llama.rope.scaling.type", 3),
        ("general.type", "adapter"),
    ],
)
def test_metadata_of_the_wrong_kind_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_weights(minimal(tmp_path / "m.gguf", {key: value}))
    assert (str(value) if key == "general.type" else key) in str(caught.value)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.embedding_length", "llama.attention.head_count"])
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    meta = {name: value for name, value in LLAMA_META.items() if name != key}
    with pytest.raises(ModelFileError, match=f"{key} .* is missing"):
        open_weights(write_gguf(tmp_path / "m.gguf", meta, {"token_embd.weight": EMBEDDING}))


def test_file_without_an_embedding(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_META, {"output_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(ModelFileError, match="token_embd"):
        open_weights(path)


def test_suffix_does_not_matter_where_the_magic_is_right(tmp_path: Path) -> None:
    assert opened(minimal(tmp_path / "blob")).config["model_type"] == "llama"


def test_closed_and_missing(tmp_path: Path) -> None:
    source = opened(minimal(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match="lm_head"):
        source.info("lm_head.weight")
    assert "model.embed_tokens.weight" in source
    assert "token_embd.weight" not in source
    source.close()
    with pytest.raises(ClosedError):
        source.read("model.embed_tokens.weight")
