"""Tokenizers of Hugging Face folders written to GGUF and back: every text keeps its tokens, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conversions import changed_folder, opened_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from vkdecode.conversion import convert
from vkdecode.errors import TokenizerError, VkDecodeWarning
from vkdecode.text import Tokenizer, load_tokenizer
from vkdecode.text.pretokenizers import PRE_TOKENIZERS
from vkdecode.text.stream import byte_level_alphabet
from vkdecode.weights import open_weights

SPECIAL = ["<unk>", "<s>", "</s>", "<|eot|>", "<|more|>", "<|third|>"]
MARK = "▁"
BPE_PAIRS = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "he"), ("hell", "o"), ("1", "2"), ("12", "3"), ("Ã", "©")]
SPM_PIECES = [MARK, *"abcdehlo123,.!", "é"]
SPM_PAIRS = [("l", "l"), ("h", "e"), (MARK, "he"), ("he", "ll"), (MARK + "he", "ll"), ("a", "b"), ("ab", "ab")]


def byte_level(pre: str = "gpt-2", **changes: Any) -> Backend:
    rules = PRE_TOKENIZERS[pre]
    pieces = [*SPECIAL, *byte_level_alphabet(), *("".join(pair) for pair in BPE_PAIRS), *changes.pop("pieces", ())]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocab=vocab, merges=BPE_PAIRS, ignore_merges=rules.whole_words))
    normalizer = changes.pop("normalizer", rules.normalizer())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = changes.pop("pre_tokenizer", rules.build())
    backend.decoder = decoders.ByteLevel()
    return finished(backend, **changes)


def sentencepiece(*, prefix: bool = True, metaspace: bool = False, **changes: Any) -> Backend:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = dict.fromkeys([*SPECIAL, *bytes_, *SPM_PIECES, *("".join(pair) for pair in SPM_PAIRS)])
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=SPM_PAIRS, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "first" if prefix else "never", split=False)
    else:
        spaces = normalizers.Replace(" ", MARK)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), spaces] if prefix else [spaces])
    steps: list[Any] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return finished(backend, **changes)


def finished(backend: Backend, around: str | None = None, user: tuple[AddedToken, ...] = ()) -> Backend:
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.add_tokens(list(user))
    if around is not None:
        special = [(token, SPECIAL.index(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    return backend


def folder(path: Path, backend: Backend, tokenizer_config: dict[str, Any] | None = None, **config: Any) -> Path:
    """A tiny model with this tokenizer; its embedding has 160 rows, so the config alone says otherwise."""
    vocab_size = backend.get_vocab_size(with_added_tokens=True) + 7
    changed_folder(path, "llama-tied-mqa", **{"vocab_size": vocab_size, **config})
    (path / "generation_config.json").write_text("{}")
    backend.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": {"content": "<unk>"}}
    (path / "tokenizer_config.json").write_text(json.dumps({**named, **(tokenizer_config or {})}))
    return path


def there_and_back(path: Path, *args: Any, **files: Any) -> tuple[Tokenizer, Tokenizer, Tokenizer, dict[str, Any]]:
    """Tokenizers of the folder, of the GGUF file, and of the folder made from that; and the metadata."""
    made = folder(path / "m", *args, **files)
    convert(made, path / "m.gguf")
    convert(path / "m.gguf", path / "again")
    source = opened_gguf(path / "m.gguf")
    again = load_tokenizer(open_weights(path / "again"))
    prefix = "tokenizer.ggml."
    metadata = {key.removeprefix(prefix): value for key, value in source.metadata.items() if key.startswith(prefix)}
    return load_tokenizer(open_weights(made)), load_tokenizer(source), again, metadata


NAMES = {"gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_way_to_cut_is_found_by_its_behaviour(tmp_path: Path, name: str) -> None:
    first, second, third, metadata = there_and_back(tmp_path, byte_level(name))
    assert metadata["pre"] == name
    for text in ("hello 1234 Hello's\n\n  x", "<|eot|>hello<s>", "cafe\u0301 hé"):
        assert first.encode(text) == second.encode(text) == third.encode(text)


def test_original_spellings_are_recognized(tmp_path: Path) -> None:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    for name, original in (("gpt-2", plain), ("smollm", digits)):
        *_, metadata = there_and_back(tmp_path / name, byte_level(pre_tokenizer=original))
        assert metadata["pre"] == name


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d{1,5}"), "isolated")])),
        byte_level(normalizer=normalizers.NFKC()),
    ],
    ids=["prefix space", "five digits", "nfkc"],
)
def test_another_way_to_cut_is_refused(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(TokenizerError, match=r"cuts text in a way that no .* pre-tokenizer does; known: .*qwen2"):
        convert(folder(tmp_path / "m", backend), tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece(tmp_path: Path, prefix: bool, metaspace: bool) -> None:
    backend = sentencepiece(prefix=prefix, metaspace=metaspace)
    first, second, third, metadata = there_and_back(tmp_path, backend)
    assert (metadata["model"], metadata["add_space_prefix"]) == ("llama", prefix)
    assert metadata["unknown_token_id"] == 0
    assert metadata["token_type"][:7].tolist() == [2, 3, 3, 3, 3, 3, 6]
    for text in ("hello hell", "ababab  abé", "", "日本", *(() if metaspace and prefix else (" hello",))):
        assert first.encode(text) == second.encode(text) == third.encode(text)
        assert second.decode(first.encode(text)) == first.decode(first.encode(text))


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.sampled_from("abhelo123,é 日\n"), max_size=30))
def test_any_text_keeps_its_pieces(spm: tuple[Tokenizer, Tokenizer], text: str) -> None:
    assert spm[0].encode(text) == spm[1].encode(text)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    first, second, _, _ = there_and_back(tmp_path_factory.mktemp("spm"), sentencepiece())
    return first, second


@pytest.mark.parametrize("around", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_what_goes_around_a_text(tmp_path: Path, build: Any, around: str | None) -> None:
    first, second, third, metadata = there_and_back(tmp_path, build(around=around))
    assert (metadata["bos_token_id"], metadata["eos_token_id"]) == (1, 2)
    assert metadata["add_bos_token"] is ("<s>" in (around or ""))
    assert metadata["add_eos_token"] is ("</s>" in (around or ""))
    assert first.special_tokens == second.special_tokens == third.special_tokens


def test_other_tokens_around_a_text_are_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<|eot|> $A", special_tokens=[("<|eot|>", 3)])
    with pytest.raises(TokenizerError, match=r"puts the tokens \[3\] around a text; GGUF files can only say add_bos"):
        convert(folder(tmp_path / "m", backend), tmp_path / "m.gguf")


def test_further_ends_of_text_are_named(tmp_path: Path) -> None:
    first, second, third, metadata = there_and_back(tmp_path, byte_level(), eos_token_id=[2, 3, 4])
    assert (metadata["eot_token_id"], metadata["eom_token_id"]) == (3, 4)
    assert first.eos_token_ids == second.eos_token_ids == third.eos_token_ids == {2, 3, 4}
    with pytest.warns(VkDecodeWarning, match=r"left out: \[5\]"):
        there_and_back(tmp_path / "more", byte_level(), eos_token_id=[2, 3, 4, 5])


def test_tokens_are_filled_up_to_the_embedding(tmp_path: Path) -> None:
    user = AddedToken("[tool]", normalized=False)
    first, second, _, metadata = there_and_back(tmp_path, byte_level(user=(user,)))
    size = opened_gguf(tmp_path / "m.gguf").metadata["llama.vocab_size"]
    assert len(metadata["tokens"]) == len(metadata["token_type"]) == size == first.vocab_size == second.vocab_size
    assert metadata["tokens"][-8:] == ["[tool]", *(f"[PAD{index}]" for index in range(size - 7, size))]
    assert metadata["token_type"][-8:].tolist() == [4] + [5] * 7
    assert first.encode("hello[tool]") == second.encode("hello[tool]")


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has the token 2[0-9]+, but the model only 160 embeddings"):
        convert(folder(tmp_path / "m", byte_level(), vocab_size=160), tmp_path / "m.gguf")


def test_a_tokenizer_without_merges_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(byte_level_alphabet())}, merges=[]))
    backend.pre_tokenizer, backend.decoder = PRE_TOKENIZERS["gpt-2"].build(), decoders.ByteLevel()
    with pytest.raises(TokenizerError, match="has no merges"):
        convert(folder(tmp_path / "m", finished(backend)), tmp_path / "m.gguf")


def test_chat_templates_survive(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "{{ bos_token }}a"}, {"name": "tool_use", "template": "b"}]
    for template in ("{{ bos_token }}x", named):
        path = tmp_path / type(template).__name__
        first, *others, _ = there_and_back(path, byte_level(), {"chat_template": template})
        assert first.chat_template is not None
        for other in others[:2]:
            assert other.chat_template is not None
            assert other.chat_template.templates == first.chat_template.templates
            assert other.render_chat([{"role": "user", "content": "hi"}]) == first.render_chat(
                [{"role": "user", "content": "hi"}]
            )


def test_spaces_that_a_token_takes_in_are_warned_of(tmp_path: Path) -> None:
    user = AddedToken("[end]", normalized=False, rstrip=True)
    with pytest.warns(VkDecodeWarning, match=r"the tokens \[end\] .* take in spaces"):
        convert(folder(tmp_path / "m", byte_level(user=(user,))), tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["unigram", "words", "word pieces"])
def test_other_kinds_are_refused(tmp_path: Path, kind: str) -> None:
    made: dict[str, Any] = {
        "unigram": models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False),
        "words": models.BPE({"a": 0, "b": 1}, []),
        "word pieces": models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"),
    }
    with pytest.raises(TokenizerError, match="neither byte-level nor SentencePiece BPE"):
        convert(folder(tmp_path / "m", finished(Backend(made[kind]))), tmp_path / "m.gguf")


def test_a_tokenizer_in_another_file_is_not_left_out(tmp_path: Path) -> None:
    made = changed_folder(tmp_path / "m")
    (made / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(TokenizerError, match=r"no tokenizer.json, only tokenizer.model"):
        convert(made, tmp_path / "m.gguf")


def test_what_the_names_do_not_show_is_found_by_encoding(tmp_path: Path) -> None:
    backend = sentencepiece()
    state = json.loads(backend.to_str())
    state["model"]["dropout"] = None
    state["normalizer"]["normalizers"].append({"type": "Lowercase"})
    changed = Backend.from_str(json.dumps(state))
    with pytest.raises(TokenizerError, match=r"cannot be written to GGUF: .* would become"):
        convert(folder(tmp_path / "m", changed), tmp_path / "m.gguf")
