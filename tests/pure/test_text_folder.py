"""Tokenizers of Hugging Face folders: special tokens from every file that names them, templates, and damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from model_files import TINY
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from vkdecode.errors import ChatTemplateError, TokenizerError
from vkdecode.text import Tokenizer, load_tokenizer
from vkdecode.weights import open_weights

TOKENS = ["<pad>", "<s>", "</s>", "<|eot|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab"]
BOS, EOS, EOT, A, B, AB = 1, 2, 3, 4, 5, 31
USER = [{"role": "user", "content": "ab"}]


def backend(template: str | None = None) -> Backend:
    made = Backend(models.BPE(vocab={token: index for index, token in enumerate(TOKENS)}, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in TOKENS[:4]])
    if template is not None:
        special = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return made


def folder(
    path: Path,
    tokenizer: Backend | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    shutil.copytree(TINY / "llama", path, dirs_exist_ok=True)
    known = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**known, **(config or {})}))
    (path / "generation_config.json").write_text(json.dumps(generation_config or {}))
    (tokenizer or backend()).save(str(path / "tokenizer.json"))
    if tokenizer_config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path


def load(path: Path, **files: Any) -> Tokenizer:
    return load_tokenizer(open_weights(folder(path, **files)))


def refusal(path: Path, kind: type[Exception] = TokenizerError) -> str:
    with pytest.raises(kind) as caught:
        load_tokenizer(open_weights(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_tokenizer(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.encode("ab a") == [AB, 30, A]
    assert tokenizer.decode([AB, 30, A]) == "ab a"
    assert tokenizer.vocab_size == 160  # the model's, which is padded
    assert tokenizer.bos_token_id == 1  # of config.json
    assert tokenizer.eos_token_ids == {2}


def test_post_processor_says_what_goes_around(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer=backend("<s> $A </s>"))
    assert tokenizer.encode("ab") == [BOS, AB, EOS]
    assert tokenizer.encode("") == [BOS, EOS]
    assert tokenizer.encode("ab", add_special_tokens=False) == [AB]


@pytest.mark.parametrize("text", ["ab", "<s>ab", "<s><s>ab"])
def test_exactly_one_bos(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, tokenizer=backend("<s> $A")).encode(text) == [BOS, AB]


@pytest.mark.parametrize(
    ("template", "config", "ids"),
    [
        (None, {"add_bos_token": True, "bos_token": "<s>"}, [BOS, AB]),
        (None, {"add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": False}}, [BOS, AB]),
        (None, {"add_bos_token": False, "bos_token": "<s>"}, [AB]),
        (None, {"add_eos_token": True, "eos_token": "</s>"}, [AB, EOS]),
        ("<s> $A", {"add_bos_token": False, "bos_token": "<s>"}, [AB]),
        ("<s> $A", {"add_bos_token": True, "bos_token": "<s>"}, [BOS, AB]),
        ("<s> $A </s>", {"add_eos_token": False, "eos_token": "</s>"}, [BOS, AB]),
        ("<s> $A", {"bos_token": "<s>"}, [BOS, AB]),
    ],
)
def test_tokenizer_config_decides_about_bos_and_eos(
    tmp_path: Path, template: str | None, config: dict[str, Any], ids: list[int]
) -> None:
    assert load(tmp_path, tokenizer=backend(template), tokenizer_config=config).encode("ab") == ids


def test_all_ends_are_gathered(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        tokenizer_config={"eos_token": "<|eot|>"},
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [8, 9]},
    )
    assert tokenizer.eos_token_ids == {EOT, 7, 8, 9}


@pytest.mark.parametrize("value", [None, [], [None]])
def test_no_end_named(tmp_path: Path, value: Any) -> None:
    assert load(tmp_path, config={"eos_token_id": value, "bos_token_id": None}).eos_token_ids == frozenset()


@pytest.mark.parametrize("value", ["2", -1, True, [1, "x"], 160, 1 << 70])
def test_ends_that_are_no_tokens(tmp_path: Path, value: Any) -> None:
    text = refusal(folder(tmp_path, config={"eos_token_id": value}))
    assert "eos_token_id" in text or "special token" in text


def test_bos_wanted_but_not_named(tmp_path: Path) -> None:
    path = folder(tmp_path, tokenizer_config={"add_bos_token": True, "bos_token": None}, config={"bos_token_id": None})
    assert "add_bos_token" in refusal(path)


def test_missing_tokenizer_leaves_the_model_usable(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tokenizer.json").unlink()
    source = open_weights(path)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(source)
    assert source.read("model.norm.weight").shape == (64,)
    (path / "tokenizer.model").write_bytes(b"x")
    assert "only tokenizer.model" in refusal(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"model": {}}', b"\xff\xfe", b'{"version":"1.0","model":{"type":"Magic"}}']
)
def test_damaged_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    path = folder(tmp_path)
    (path / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json" in refusal(path)


def test_truncated_tokenizer_json(tmp_path: Path) -> None:
    path = folder(tmp_path)
    whole = (path / "tokenizer.json").read_bytes()
    for length in range(0, len(whole) - 2, 97):
        (path / "tokenizer.json").write_bytes(whole[:length])
        refusal(path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"chat_template": 5}', '{"chat_template": [{"name": "x"}]}', '{"chat_template": [3]}']
)
def test_damaged_tokenizer_config(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path)
    (path / "tokenizer_config.json").write_text(text)
    assert "tokenizer_config.json" in refusal(path)


def test_truncation_and_padding_settings_are_ignored(tmp_path: Path) -> None:
    cutting = backend()
    cutting.enable_truncation(1)
    cutting.enable_padding(length=8)
    assert load(tmp_path, tokenizer=cutting).encode("abab") == [AB, AB]


def test_text_that_is_none(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TokenizerError, match="must be a string"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]  # what a caller without type checks may do


def test_template_of_the_config_and_its_tokens(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    tokenizer = load(tmp_path, tokenizer=backend("<s> $A </s>"), tokenizer_config=config)
    assert tokenizer.render_chat(USER) == "<s>ab</s>"
    assert tokenizer.encode_chat(USER) == [BOS, AB, EOS]


def test_chat_gets_the_bos_that_its_template_forgets_and_no_eos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": "{{ messages[0].content }}"}
    assert load(tmp_path, tokenizer=backend("<s> $A </s>"), tokenizer_config=config).encode_chat(USER) == [BOS, AB]


def test_named_templates_and_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    path = folder(tmp_path, tokenizer_config={"chat_template": named})
    tokenizer = load_tokenizer(open_weights(path))
    assert tokenizer.render_chat(USER) == "one"
    assert tokenizer.render_chat(USER, tools=[{}]) == "two"
    (path / "chat_template.jinja").write_text("file")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools file")
    tokenizer = load_tokenizer(open_weights(path))
    assert tokenizer.render_chat(USER) == "file"
    assert tokenizer.render_chat(USER, tools=[{}]) == "tools file"


def test_broken_template_is_an_error_only_when_used(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": "{% for %}"})
    assert tokenizer.encode("ab") == [AB]
    with pytest.raises(ChatTemplateError, match="line 1"):
        tokenizer.render_chat(USER)


def test_template_that_is_not_text(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "chat_template.jinja").write_bytes(b"\xff\xff")
    assert "chat_template.jinja" in refusal(path)
