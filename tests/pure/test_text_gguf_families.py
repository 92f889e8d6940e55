"""Tokenizers of families in GGUF files: all of Gemma 3's way of cutting, Phi 3's spaces, end tokens, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import DATA
from vocabularies import CONTROL, NORMAL, PIECES, USER, byte_level_meta, load, sentencepiece_meta

from vkdecode.errors import TokenizerError
from vkdecode.text import Tokenizer
from vkdecode.text.gguf_tokenizer import metadata_tokenizer
from vkdecode.text.pretokenizers import PRE_TOKENIZERS

GEMMA3 = json.loads((DATA / "gemma3.json").read_text(encoding="utf-8"))
CUT_DOWN = json.loads((DATA / "gemma3_vocabulary.json").read_text(encoding="utf-8"))
"""All tokens of Gemma 3 that occur in the reference texts, bytes and some control tokens, with their own ids."""


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": CUT_DOWN["tokens"],
        "tokenizer.ggml.token_type": CUT_DOWN["types"],
        "tokenizer.ggml.scores": CUT_DOWN["scores"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return load(tmp_path_factory.mktemp("gemma3"), meta)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of the whole vocabulary."""
    return [CUT_DOWN["ids"][token] for token in tokenizer.encode(text)]


@pytest.mark.parametrize("case", GEMMA3["completions"], ids=lambda case: case["prompt"][:12])
def test_gemma3_prompts_have_the_reference_ids(gemma3: Tokenizer, case: dict[str, Any]) -> None:
    assert ids_of(gemma3, case["prompt"]) == case["ids"]
    here = {token: place for place, token in enumerate(CUT_DOWN["ids"])}
    assert gemma3.decode([here[token] for token in case["greedy"]]) == case["text"]


def test_gemma3_takes_runs_of_white_space_and_turns_whole(gemma3: Tokenizer) -> None:
    assert ids_of(gemma3, "\n\n\n") == [2, 109]
    assert ids_of(gemma3, "   ")[1:] == [139]
    assert ids_of(gemma3, "<start_of_turn>\n<end_of_turn>") == [2, 105, 107, 106]
    assert {CUT_DOWN["ids"][token] for token in gemma3.eos_token_ids} == {1, 106}


def test_marks_in_user_defined_tokens_are_spaces(tmp_path: Path) -> None:
    """Older files write the space of such tokens as SentencePiece does, but they are matched in plain text."""
    meta = sentencepiece_meta({**PIECES, "▁▁": -9.0, "▁x": -9.5}, add_bos_token=False, add_space_prefix=False)
    meta["tokenizer.ggml.token_type"][-2] = USER
    names = meta["tokenizer.ggml.tokens"]
    tokenizer = load(tmp_path, meta)
    assert [names[token] for token in tokenizer.encode("a  b")] == ["a", "▁▁", "b"]
    assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"


def phi3(architecture: str) -> Tokenizer:
    meta = sentencepiece_meta({**PIECES, "<|user|>": -9.0, "<|end|>": -9.0, "<|endoftext|>": -9.0})
    meta["tokenizer.ggml.token_type"][-3:] = [USER, CONTROL, CONTROL]
    metadata = {
        **meta,
        "tokenizer.ggml.token_type": np.array(meta["tokenizer.ggml.token_type"]),
        "tokenizer.ggml.scores": np.array(meta["tokenizer.ggml.scores"], np.float32),
        "general.architecture": architecture,
    }
    return metadata_tokenizer(metadata, len(meta["tokenizer.ggml.tokens"]), "made up")


def test_phi3_tokens_swallow_the_space_behind_them() -> None:
    for architecture, swallows in (("phi3", True), ("llama", False)):
        tokenizer = phi3(architecture)
        same = tokenizer.encode("<|user|>\n a") == tokenizer.encode("<|user|>a")
        assert same is swallows
        assert tokenizer.encode("<|endoftext|> a") != tokenizer.encode("<|endoftext|>a")


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<|im_end|>", "<|endoftext|>"], {"<|im_end|>", "<|endoftext|>"}),
        (["<|end|>", "<|user|>"], {"<|end|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<end_of_turn>", "<|eom_id|>"], {"<end_of_turn>", "<|eom_id|>"}),
    ],
)
@pytest.mark.parametrize("kind", [CONTROL, USER, NORMAL])
def test_ends_are_known_by_their_text(tmp_path: Path, texts: list[str], ends: set[str], kind: int) -> None:
    """Whatever type a file gives them; `<|end|>` of gpt-oss ends a message of several."""
    meta = byte_level_meta()
    meta["tokenizer.ggml.tokens"] = [*meta["tokenizer.ggml.tokens"], *texts]
    meta["tokenizer.ggml.token_type"] = [*meta["tokenizer.ggml.token_type"], *(kind for _ in texts)]
    tokenizer = load(tmp_path, meta)
    names = meta["tokenizer.ggml.tokens"]
    assert {names[token] for token in tokenizer.eos_token_ids} == ends | {"<s>", "<|eot_id|>"}
    end = min(ends)
    assert [names[token] for token in tokenizer.encode(f"he{end}")] == ["he", end]


@pytest.mark.parametrize(
    ("architecture", "like"),
    [("gpt2", "gpt-2"), ("qwen2", "qwen2"), ("command-r", "command-r"), ("starcoder2", "starcoder")],
)
@pytest.mark.parametrize("pre", [None, "default"])
def test_without_a_name_the_architecture_decides(architecture: str, like: str, pre: str | None) -> None:
    tokens = byte_level_meta()["tokenizer.ggml.tokens"]
    metadata = {
        **byte_level_meta(),
        "general.architecture": architecture,
        "tokenizer.ggml.token_type": np.array(byte_level_meta()["tokenizer.ggml.token_type"]),
        "tokenizer.ggml.pre": pre,
    }
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    named = metadata_tokenizer({**metadata, "tokenizer.ggml.pre": like}, len(tokens), "made up")
    text = "he he 12e\u0301 DON'T"
    assert metadata_tokenizer(metadata, len(tokens), "made up").encode(text) == named.encode(text)


def test_without_a_name_llama_files_are_refused(tmp_path: Path) -> None:
    for pre in ("default", None):
        meta = byte_level_meta(pre=pre)
        if pre is None:
            del meta["tokenizer.ggml.pre"]
        with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre.*convert"):
            load(tmp_path, meta)


@pytest.mark.parametrize("name", ["olmo", "command-r", "stablelm2", "qwen2"])
def test_some_families_compose_characters(tmp_path: Path, name: str) -> None:
    tokenizer = load(tmp_path, byte_level_meta(pre=name))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"
    other = load(tmp_path, byte_level_meta(pre="gpt-2"))
    assert other.decode(other.encode("e\u0301")) == "e\u0301"


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("deepseek-coder", "ab\n12 .,x", ["ab", "Ċ", "1", "2", "Ġ.,", "x"]),
        ("seed-coder", "It's 12!\n", ["It", "'s", "Ġ", "1", "2", "!", "Ċ"]),
        ("command-r", "a 12", ["a", "Ġ", "1", "2"]),
        ("olmo", "a 12", ["a", "Ġ12"]),
        ("stablelm2", "IT'S 12", ["IT", "'S", "Ġ", "1", "2"]),
        ("dbrx", "IT'S 1234", ["IT", "'S", "Ġ", "123", "4"]),
    ],
)
def test_cutting_by_name(name: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == pieces
