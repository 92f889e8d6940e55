"""Which type a matrix is held in, and rows from one type to another, against the `gguf` package."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import ml_dtypes
import numpy as np
import pytest
from model_files import TINY

from vkdecode.errors import ConfigError, InvalidInputError
from vkdecode.models.tensors import TensorTable
from vkdecode.weights import DType, open_weights
from vkdecode.weights.blocks import QUANTIZED_AT_LOAD, ggml_type
from vkdecode.weights.recode import ASKED_DTYPES, asked_dtype, dtype_for_matrix, recode_rows

Q = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Case:
    name: str
    stored: DType
    columns: int
    asked: DType | None
    held: DType


@pytest.mark.parametrize(
    "case",
    [
        Case(Q, DType.Q4_1, 64, None, DType.Q4_1),
        Case(Q, DType.F32, 64, DType.BF16, DType.BF16),
        Case(Q, DType.Q4_1, 64, DType.F32, DType.F32),
        Case(Q, DType.Q4_1, 64, DType.Q8_0, DType.Q8_0),
        Case(Q, DType.F32, 64, DType.Q4_0, DType.Q4_0),
        Case(EMBEDDING, DType.F32, 64, DType.Q4_0, DType.Q8_0),
        Case(HEAD, DType.F32, 64, DType.Q4_0, DType.Q8_0),
        Case(HEAD, DType.F32, 64, DType.Q8_0, DType.Q8_0),
        Case(HEAD, DType.F32, 64, DType.F16, DType.F16),
        Case(Q, DType.F32, 48, DType.Q8_0, DType.F16),
        Case(Q, DType.F16, 48, DType.Q8_0, DType.F16),
        Case(Q, DType.BF16, 48, DType.Q4_0, DType.BF16),
        Case(Q, DType.F32, 48, DType.F32, DType.F32),
    ],
    ids=str,
)
def test_the_type_to_hold(case: Case) -> None:
    assert dtype_for_matrix(case.name, case.stored, case.columns, case.asked) is case.held


def test_a_model_holds_its_matrices_so() -> None:
    table = TensorTable(open_weights(TINY / "llama"), DType.Q4_0)
    assert table.matrix(Q, 64, 64).dtype is DType.Q4_0
    assert table.matrix("model.layers.1.mlp.down_proj.weight", 64, 96).dtype is DType.Q4_0
    assert table.matrix(EMBEDDING, 160, 64).dtype is DType.Q8_0
    assert table.vector("model.norm.weight", 64).dtype is DType.F32


def test_options_name_types() -> None:
    assert asked_dtype(None) is None
    assert [asked_dtype(dtype.value) for dtype in ASKED_DTYPES] == list(ASKED_DTYPES)
    for wrong in ("q4_1", "Q8_0", "", "int8"):
        with pytest.raises(InvalidInputError, match=f"must be one of .*'q8_0'.* not '{wrong}'"):
            asked_dtype(wrong)


@pytest.mark.parametrize("held", QUANTIZED_AT_LOAD)
@pytest.mark.parametrize("stored", [DType.F32, DType.F16, DType.BF16, DType.Q4_1])
def test_quantizing_equals_the_gguf_package(stored: DType, held: DType) -> None:
    wide = np.random.default_rng(2).normal(size=(37, 96)).astype(np.float32)
    if stored.is_block:
        rows = gguf.quants.quantize(wide, ggml_type(stored))
        wide = gguf.quants.dequantize(rows, ggml_type(stored))
    else:
        rows = wide.astype(stored.numpy)
        wide = rows.astype(np.float32)
    found = recode_rows(rows, stored, held, "x")
    np.testing.assert_array_equal(found, gguf.quants.quantize(wide, ggml_type(held)))


def test_the_same_type_keeps_the_bytes() -> None:
    rows = np.random.default_rng(3).integers(0, 256, (4, 34), np.uint8)
    assert recode_rows(rows, DType.Q8_0, DType.Q8_0, "x") is rows


def test_plain_types() -> None:
    wide = np.array([[1.0, 1e6, -3.25, 0.0]], np.float32)
    np.testing.assert_array_equal(
        recode_rows(wide, DType.F32, DType.BF16, "x"), wide.astype(np.dtype(ml_dtypes.bfloat16))
    )
    with pytest.raises(ConfigError, match=r"tensor x .* range of f16"):
        recode_rows(wide, DType.F32, DType.F16, "x")


@pytest.mark.parametrize(("dtype", "largest"), [(DType.Q8_0, 127 * 65504.0), (DType.Q4_0, 8 * 65504.0)])
def test_what_no_block_can_hold_is_refused(dtype: DType, largest: float) -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[1, 33] = -largest
    recode_rows(rows, DType.F32, dtype, "x")
    rows[1, 33] = -largest * 1.01
    with pytest.raises(ConfigError, match=f"tensor x has values beyond the range of {dtype.value}"):
        recode_rows(rows, DType.F32, dtype, "x")
    for value in (np.nan, np.inf):
        rows[1, 33] = value
        with pytest.raises(ConfigError, match="tensor x has values that are not finite"):
            recode_rows(rows, DType.F32, dtype, "x")


@pytest.mark.parametrize("dtype", QUANTIZED_AT_LOAD)
def test_values_too_small_for_a_scale_become_zeros(dtype: DType) -> None:
    rows = np.full((1, 32), 1e-42, np.float32)
    blocks = np.asarray(recode_rows(rows, DType.F32, dtype, "x"), np.uint8)
    assert not gguf.quants.dequantize(blocks, ggml_type(dtype)).any()


@pytest.mark.parametrize(
    "name", ["transformer.wpe", "model.layers.3.mlp.gate", "blk.0.ffn_gate_inp", "blk.1.attn_q_norm"]
)
def test_what_is_small_and_delicate_is_not_quantized(name: str) -> None:
    for asked in QUANTIZED_AT_LOAD:
        assert dtype_for_matrix(f"{name}.weight", DType.F32, 64, asked) is DType.F16
        assert dtype_for_matrix(f"{name}.weight", DType.BF16, 64, asked) is DType.BF16
    assert dtype_for_matrix(f"{name}.weight", DType.F32, 64, DType.F32) is DType.F32
    assert dtype_for_matrix("model.layers.3.mlp.gate_proj.weight", DType.F32, 64, DType.Q4_0) is DType.Q4_0
