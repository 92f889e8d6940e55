"""Every family's GGUF file presents the config, names and values of the folder that it was made from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_converter import FAMILIES as CONVERTERS
from gguf_converter import NAMES, converted, model_type
from hypothesis import given
from hypothesis import strategies as st
from model_files import TINY, convert_tiny, write_gguf
from numpy.typing import NDArray

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.models.rope import rope_from_config
from vkdecode.weights import GgufFile, WeightSource, open_weights
from vkdecode.weights.blocks import decode_rows, ggml_type
from vkdecode.weights.dtypes import DType
from vkdecode.weights.families import FAMILIES, Layout, family_of_model_type, gguf_name, split_name

# What a config says beyond the model's mathematics, or says with the value that the family always has.
NOT_COMPARED = {
    "dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "attn_pdrop",
    "hidden_dropout",
    "classifier_dropout",
    "embedding_dropout",
    "residual_dropout",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "max_window_layers",
    "_sliding_window_pattern",
    "is_decoder",
    "pretraining_tp",
    "add_cross_attention",
    "reorder_and_upcast_attn",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "partial_rotary_factor",
    *(f"summary_{what}" for what in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")),
}


def opened(path: Path) -> GgufFile:
    source = open_weights(path)
    assert isinstance(source, GgufFile)
    return source


def plain_values(source: WeightSource, name: str, rows: Any = None) -> NDArray[np.float32]:
    info = source.info(name)
    values = source.read(name, rows)
    if info.dtype.is_block:
        flat = values.reshape(-1, values.shape[-1])
        decoded = decode_rows(flat, ggml_type(info.dtype), info.dtype.block_bytes)
        return decoded.reshape(-1, *info.shape[1:])
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    folder = tmp_path_factory.mktemp("gguf")
    return {name: opened(convert_tiny(folder / f"{name}.gguf", TINY / name)) for name in NAMES}


def test_every_family_has_a_checkpoint_and_a_converter() -> None:
    types = {model_type(TINY / name) for name in NAMES}
    assert types == {family.model_type for family in FAMILIES} == set(CONVERTERS)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_the_folder(files: dict[str, GgufFile], name: str) -> None:
    folder, source = open_weights(TINY / name), files[name]
    assert sorted(source.names()) == sorted(folder.names())
    for tensor in folder.names():
        expected = folder.read(tensor).astype(np.float32)
        assert source.info(tensor).shape == folder.info(tensor).shape
        np.testing.assert_allclose(source.read(tensor), expected, rtol=0, atol=3e-7, err_msg=tensor)
        rows = np.array([0, 3, 2, 0][: 1 if len(expected) < 4 else 4])
        np.testing.assert_array_equal(source.read(tensor, rows), source.read(tensor)[rows], err_msg=tensor)
        np.testing.assert_array_equal(source.read(tensor, slice(1, None, 2)), source.read(tensor)[1::2])


@pytest.mark.parametrize("name", NAMES)
def test_blocks_stay_blocks_or_are_dequantized(tmp_path: Path, name: str) -> None:
    folder, source = open_weights(TINY / name), opened(convert_tiny(tmp_path / "m.gguf", TINY / name, "Q8_0"))
    kinds = set()
    for tensor in folder.names():
        expected = folder.read(tensor).astype(np.float32)
        info = source.info(tensor)
        assert info.shape == expected.shape
        kinds.add(info.dtype)
        if info.dtype is DType.Q8_0:
            stored = gguf.quants.quantize(expected, gguf.GGMLQuantizationType.Q8_0)
            np.testing.assert_array_equal(source.read(tensor), stored, err_msg=tensor)
        tolerance = 3e-7 if expected.ndim == 1 else float(np.abs(expected).max()) / 100
        np.testing.assert_allclose(plain_values(source, tensor), expected, rtol=0, atol=tolerance, err_msg=tensor)
    assert DType.Q8_0 in kinds


@pytest.mark.parametrize("name", NAMES)
def test_config_says_what_the_folder_says(files: dict[str, GgufFile], name: str) -> None:
    ours, theirs = files[name].config, open_weights(TINY / name).config
    for key, value in theirs.items():
        if key in NOT_COMPARED or key in ("rope_parameters", "rope_scaling") or (key == "head_dim" and value is None):
            continue
        if key == "layer_types" and set(value) == {"full_attention"}:
            assert set(ours.get(key, value)) == {"full_attention"}
        elif key == "n_inner":
            assert ours[key] == (value or 4 * theirs["n_embd"])
        elif value in (None, False):
            assert not ours.get(key), key
        elif isinstance(value, float):
            assert math.isclose(ours[key], value, rel_tol=1e-6), key
        else:
            assert ours[key] == value, key
    for key in ("attention_bias", "mlp_bias", "use_qk_norm", "sliding_window", "attn_logit_softcapping"):
        assert bool(ours.get(key)) == bool(theirs.get(key)), key


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt2"])
def test_rope_turns_alike(files: dict[str, GgufFile], name: str) -> None:
    ours, theirs = files[name].config, open_weights(TINY / name).config
    head_dim = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    kinds = set(theirs["layer_types"]) if "gemma3" in name else {None}
    for kind in kinds:
        one, other = (rope_from_config(config, head_dim, layer_type=kind) for config in (ours, theirs))
        np.testing.assert_allclose(one.inv_freq, other.inv_freq, rtol=1e-6)
        assert one.attention_factor == pytest.approx(other.attention_factor)


@pytest.mark.parametrize("name", NAMES)
def test_names_lead_back(files: dict[str, GgufFile], name: str) -> None:
    """`gguf_name` finds for every tensor of a folder the tensor, or tensors, of the file that hold it."""
    family = family_of_model_type(files[name].config["model_type"])
    assert family is not None
    stored = {tensor.name for tensor in gguf.GGUFReader(str(files[name].path)).tensors}
    found: set[str] = set()
    for tensor in open_weights(TINY / name).names():
        names, place = gguf_name(family, tensor)
        assert set(names) <= stored, tensor
        assert (place is not None) == ("experts." in tensor and "gpt_oss" not in name)
        found.update(names)
    assert found == stored - {"rope_freqs.weight"}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.extra"):
        gguf_name(family, "model.layers.0.extra.weight")


@given(heads=st.integers(1, 5), size=st.integers(1, 9), grouped=st.booleans())
def test_row_orders_undo_each_other(heads: int, size: int, grouped: bool) -> None:
    layout, per_head = (Layout(grouped="h"), 3) if grouped else (Layout(permuted="h"), 2)
    count = heads * size * per_head
    rows = np.arange(count)
    stored = layout.stored_rows(rows, count, heads)
    assert sorted(stored) == rows.tolist()
    np.testing.assert_array_equal(layout.original_rows(stored, count, heads), rows)


def test_split_names() -> None:
    assert split_name("blk.12.attn_q.weight") == ("blk.{i}.attn_q", 12, "weight")
    assert split_name("output_norm.bias") == ("output_norm", None, "bias")
    assert split_name("blk.012.attn_q") == ("blk.012.attn_q", None, "")


def changed(path: Path, name: str, meta: dict[str, Any] | None = None, tensors: Any = None, drop: str = "") -> Path:
    """The GGUF file of a tiny folder, with metadata and tensors replaced, added or left out."""
    arch, old_meta, old = converted(TINY / name)
    new_meta = {key: value for key, value in {**old_meta, **(meta or {})}.items() if value is not None}
    kept = {key: value for key, value in old.items() if not drop or drop not in key}
    return write_gguf(path, new_meta, {**kept, **(tensors or {})}, arch=arch)


@pytest.mark.parametrize(
    ("name", "meta", "word"),
    [
        ("qwen3", {"qwen3.pooling_size": 3}, "qwen3.*pooling_size"),
        ("gemma3-text", {"gemma3.attention.key_length_swa": 16}, "key_length_swa"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "without RoPE"),
        ("olmo2", {"olmo2.attention.sliding_window": 8}, "OLMo 3"),
        ("phi", {"phi2.attention.key_length": 32}, "heads of size 32"),
        ("qwen2_moe", {"qwen2moe.expert_group_count": 2}, "expert_group_count"),
        ("llama", {"llama.attention.causal": False}, "both directions"),
        ("mixtral", {"llama.expert_gating_func": 2}, "expert_gating_func 2"),
        ("gpt_oss", {"gpt-oss.expert_gating_func": 1}, "expert_gating_func 1"),
        ("cohere", {"command-r.attention.clamp_kqv": 8.0}, "clamp_kqv"),
    ],
)
def test_metadata_that_is_not_understood_is_refused_by_name(
    tmp_path: Path, name: str, meta: dict[str, Any], word: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=word) as caught:
        open_weights(changed(tmp_path / "m.gguf", name, meta))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("mistral-sliding", "blk.0.attn_q.bias", (64,)),
        ("qwen2", "blk.0.attn_output.bias", (64,)),
        ("gemma2", "blk.0.ffn_up.bias", (96,)),
        ("phi3", "blk.0.attn_qkv.bias", (128,)),
        ("mixtral", "blk.0.ffn_up_shexp.weight", (96, 64)),
        ("qwen3_moe", "blk.0.exp_probs_b.bias", (4,)),
        ("cohere", "output.weight", (160, 64)),
        ("llama", "blk.0.attn_q.scale", (64,)),
    ],
)
def test_a_tensor_that_the_family_lacks_is_refused_by_name(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...]
) -> None:
    path = changed(tmp_path / "m.gguf", name, tensors={tensor: np.ones(shape, np.float32)})
    with pytest.raises(UnsupportedModelError, match=tensor.replace(".", r"\.")):
        open_weights(path)


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi"])
def test_fused_qkv_is_taken_apart(files: dict[str, GgufFile], tmp_path: Path, name: str) -> None:
    """Some converters put q, k and v into one tensor where the family has three."""
    arch, meta, tensors = converted(TINY / name)
    fused = {
        f"blk.{layer}.attn_qkv.{kind}": np.concatenate([tensors[f"blk.{layer}.attn_{one}.{kind}"] for one in "qkv"])
        for layer in range(2)
        for kind in ("weight", "bias")
        if f"blk.{layer}.attn_q.{kind}" in tensors
    }
    kept = {key: value for key, value in tensors.items() if key.split(".")[-2] not in ("attn_q", "attn_k", "attn_v")}
    source = opened(write_gguf(tmp_path / "m.gguf", meta, {**kept, **fused}, arch=arch))
    assert sorted(source.names()) == sorted(files[name].names())
    for tensor in source.names():
        np.testing.assert_array_equal(source.read(tensor), files[name].read(tensor), err_msg=tensor)
        np.testing.assert_array_equal(source.read(tensor, np.array([5, 1])), files[name].read(tensor, np.array([5, 1])))


def test_longrope_takes_both_lists(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 9, 8, dtype=np.float32)
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    path = changed(tmp_path / "m.gguf", "phi3", {"phi3.rope.scaling.attn_factor": 1.19}, factors)
    source = opened(path)
    scaling = source.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["long_factor"] == long.tolist()
    assert scaling["short_factor"] == short.tolist()
    assert scaling["attention_factor"] == pytest.approx(1.19)
    assert source.config["original_max_position_embeddings"] == 4096
    assert "rope_factors_long.weight" not in source.names()
    with pytest.raises(ModelFileError, match="rope_factors_short"):
        open_weights(changed(tmp_path / "n.gguf", "phi3", None, {"rope_factors_long.weight": long}))


def test_gemma3_fills_in_what_released_files_leave_out(tmp_path: Path) -> None:
    meta = {
        "gemma3.attention.sliding_window_pattern": None,
        "gemma3.attention.scale": None,
        "gemma3.rope.freq_base_swa": None,
        "gemma3.vocab_size": None,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    config = opened(changed(tmp_path / "m.gguf", "gemma3-text", meta)).config
    assert config["layer_types"] == ["sliding_attention"] * 3
    assert config["query_pre_attn_scalar"] == 32
    assert config["rope_parameters"] == {
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    more = {"gemma3.attention.sliding_window_pattern": 2}
    assert opened(changed(tmp_path / "n.gguf", "gemma3-text", more)).config["layer_types"] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    none = {"gemma3.attention.sliding_window": None, "gemma3.attention.sliding_window_pattern": None}
    source = opened(changed(tmp_path / "o.gguf", "gemma3-text", none))
    assert set(source.config["layer_types"]) == {"full_attention"}
    wrong = {"gemma3.attention.sliding_window_pattern": [True]}
    with pytest.raises(ModelFileError, match="sliding_window_pattern"):
        open_weights(changed(tmp_path / "p.gguf", "gemma3-text", wrong))


@pytest.mark.parametrize(("layers", "scalar"), [(45, 32), (46, 16)])
def test_gemma2_of_46_layers_scales_by_another_number(tmp_path: Path, layers: int, scalar: int) -> None:
    meta = {"gemma2.attention.scale": None, "gemma2.block_count": layers}
    meta["gemma2.attention.sliding_window_pattern"] = None
    config = opened(changed(tmp_path / "m.gguf", "gemma2", meta)).config
    assert config["query_pre_attn_scalar"] == scalar
    assert config["layer_types"][:3] == ["sliding_attention", "full_attention", "sliding_attention"]


def test_gpt_oss_in_mxfp4_is_dequantized_where_its_folders_are_refused(tmp_path: Path) -> None:
    folder = open_weights(TINY / "gpt_oss")
    source = opened(convert_tiny(tmp_path / "m.gguf", TINY / "gpt_oss", "MXFP4"))
    name = "model.layers.1.mlp.experts.down_proj"
    assert (source.info(name).dtype, source.info(name).stored_as) == (DType.F16, "MXFP4")
    rows = np.ascontiguousarray(folder.read(name).transpose(0, 2, 1))
    kind = gguf.GGMLQuantizationType.MXFP4
    stored = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind).transpose(0, 2, 1)
    np.testing.assert_array_equal(source.read(name), stored.astype(np.float16))


def test_gpt_oss_yarn_does_not_round(tmp_path: Path) -> None:
    meta = {
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 32.0,
        "gpt-oss.rope.scaling.original_context_length": 4096,
    }
    scaling = opened(changed(tmp_path / "m.gguf", "gpt_oss", meta)).config["rope_scaling"]
    assert scaling == {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }


def test_routers_may_be_named(tmp_path: Path) -> None:
    assert (
        opened(changed(tmp_path / "m.gguf", "qwen3_moe", {"qwen3moe.expert_gating_func": 1})).config["num_experts"] == 4
    )


def test_llama_files_are_told_apart(tmp_path: Path, files: dict[str, GgufFile]) -> None:
    kinds = {name: files[name].config["model_type"] for name in ("llama", "mistral-sliding", "mixtral")}
    assert list(kinds.values()) == ["llama", "mistral", "mixtral"]
    plain = changed(tmp_path / "m.gguf", "mistral-sliding", {"llama.attention.sliding_window": 0})
    assert opened(plain).config["model_type"] == "llama"


def test_stablelm_norms_of_heads_are_taken_apart(tmp_path: Path) -> None:
    norms = np.arange(64, dtype=np.float32).reshape(4, 16)
    more = {f"blk.{i}.attn_q_norm.weight": norms for i in range(2)}
    more.update({f"blk.{i}.attn_k_norm.weight": norms[:2] for i in range(2)})
    source = opened(changed(tmp_path / "m.gguf", "stablelm", None, more))
    assert source.config["qk_layernorm"] is True
    np.testing.assert_array_equal(source.read("model.layers.1.self_attn.q_layernorm.norms.2.weight"), norms[2])
    assert "model.layers.1.self_attn.k_layernorm.norms.2.weight" not in source


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "word"),
    [
        ("mixtral", "blk.0.ffn_up_exps.weight", (3, 96, 64), "not a stack of 4"),
        ("gpt_oss", "blk.0.ffn_up_exps.bias", (4, 48), "differ in shape"),
        ("gpt2", "blk.0.ffn_up.weight", (64,), "vector"),
        ("gpt_neox", "blk.0.attn_qkv.weight", (190, 64), "4 heads"),
        ("qwen2", "blk.0.attn_qkv.weight", (126, 64), "not q, k and v"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...], word: str
) -> None:
    path = changed(tmp_path / "m.gguf", name, tensors={tensor: np.ones(shape, np.float32)})
    with pytest.raises(ModelFileError, match=word) as caught:
        open_weights(path)
    assert tensor in str(caught.value)


def test_half_of_a_pair_is_missed(tmp_path: Path) -> None:
    path = changed(tmp_path / "m.gguf", "gpt_oss", drop="blk.1.ffn_gate_exps")
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up_exps"):
        open_weights(path)
