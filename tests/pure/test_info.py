"""`vkdecode info` on what needs no device: files of kinds that are not supported, and how facts read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_files import TINY, convert_tiny, write_gguf
from typer.testing import CliRunner

from vkdecode import cli
from vkdecode.decode import MemoryReport
from vkdecode.errors import InvalidInputError, ModelFileError
from vkdecode.info.inspect_model import ModelInfo, TensorGroup, inspect_model
from vkdecode.info.text import as_text

MAMBA = {"mamba9.block_count": 3, "mamba9.embedding_length": 64, "mamba9.attention.head_count": 4}


def mamba(path: Path) -> Path:
    tensors = {"token_embd.weight": np.ones((32, 64), np.float32), "blk.0.ffn_up.weight": np.ones((8, 64), np.float32)}
    return write_gguf(path, MAMBA, tensors, "Q8_0", arch="mamba9")


def test_an_unknown_architecture_is_named_with_what_its_header_says(tmp_path: Path) -> None:
    found = inspect_model(str(mamba(tmp_path / "m.gguf")))
    assert found.model_type == "mamba9"
    assert not found.runs
    (problem,) = found.problems
    assert "'mamba9'" in problem and "supported: " in problem and "llama" in problem
    assert found.sizes == {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    assert found.parameters == 40 * 64
    assert found.tensors == {"embedding": TensorGroup(32 * 64, {"Q8_0": 1}), "mlp": TensorGroup(8 * 64, {"Q8_0": 1})}
    assert found.memory is None and found.device is None


def test_a_folder_that_is_refused_says_why(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect_model(str(tmp_path))
    assert (found.model_type, found.sizes) == ("llama", {"hidden_size": 64})
    assert "awq" in found.problems[0]


def test_a_model_type_without_a_graph_is_named(tmp_path: Path) -> None:
    config = json.loads((TINY / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "falcon9"}))
    (tmp_path / "model.safetensors").write_bytes((TINY / "llama" / "model.safetensors").read_bytes())
    found = inspect_model(str(tmp_path))
    assert found.parameters > 0 and found.sizes["num_hidden_layers"] == 2
    assert "'falcon9' is not supported; supported: " in found.problems[0]


def test_a_part_of_a_split_file_is_said_to_be_one(tmp_path: Path) -> None:
    found = inspect_model(str(convert_tiny(tmp_path / "m.gguf", TINY / "llama", extra={"split.count": 3})))
    assert "one of 3 parts" in found.problems[0]
    assert found.file_bytes > 0


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "m.gguf", tmp_path / "nothing"):
        with pytest.raises(ModelFileError):
            inspect_model(str(path))
    with pytest.raises(InvalidInputError, match="q9"):
        inspect_model(str(TINY / "llama"), weights="q9")


INFO = ModelInfo(
    path="folder/a model.gguf",
    model_type="llama",
    file_bytes=1_500_000,
    parameters=1_234_000_000,
    sizes={"num_hidden_layers": 2, "vocab_size": 49152},
    tensors={"mlp": TensorGroup(900_000, {"Q4_K": 3, "Q6_K": 1})},
    chat_template=True,
    ends={2: "<|im_end|>"},
    device="0: GPU",
    memory=MemoryReport(4096, "f16", 100, 200, 7, 5, 1000),
)


def test_facts_read_as_lines() -> None:
    lines = {line[:24].strip(): line[24:] for line in as_text(INFO).splitlines()}
    assert lines["model"] == "a model.gguf"
    assert lines["parameters"] == "1.23B, 1.5 MB in files"
    assert lines["layers"] == "2" and lines["vocabulary"] == "49,152"
    assert lines["mlp tensors"].split() == ["900K", "3", "Q4_K,", "1", "Q6_K"]
    assert lines["chat template"] == "yes"
    assert lines["end tokens"] == "2 '<|im_end|>'"
    assert "4096 rows of f16" in as_text(INFO)
    assert as_text(INFO).endswith("runs here               yes")
    other = replace(INFO, problems=("too large",), tokenizer_problem="no file")
    assert as_text(other).endswith("will not run here       too large")
    assert "none: no file" in as_text(other) and "runs here               yes" not in as_text(other)


def test_json_has_everything() -> None:
    found = json.loads(json.dumps(INFO.as_json()))
    assert found["runs"] is True and found["problems"] == []
    assert found["memory"]["total"] == 312
    assert found["ends"] == {"2": "<|im_end|>"}
    assert found["tensors"]["mlp"] == {"parameters": 900_000, "types": {"Q4_K": 3, "Q6_K": 1}}


def test_the_command_prints_and_ends_with_0(tmp_path: Path) -> None:
    path = str(mamba(tmp_path / "m.gguf"))
    run = CliRunner().invoke(cli.app, ["info", path])
    assert run.exit_code == 0
    assert "will not run here" in run.stdout.splitlines()[-1]
    found = json.loads(CliRunner().invoke(cli.app, ["info", path, "--json"]).stdout)
    assert found["runs"] is False and found["model_type"] == "mamba9"
    assert CliRunner().invoke(cli.app, ["info", path, "--context", "0"]).exit_code == 2
