"""Tokenizers rebuilt from GGUF metadata: token ids equal the reference, and odd metadata is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import LLAMA_META, golden_smollm2, smollm2_path, write_gguf
from tokenizers import pre_tokenizers
from vocabularies import PIECES, UNUSED, byte_level_meta, load, sentencepiece_meta

from vkdecode.errors import ChatTemplateError, TokenizerError
from vkdecode.text import Tokenizer, load_tokenizer
from vkdecode.text.gguf_tokenizer import score_merges
from vkdecode.text.pretokenizers import PRE_TOKENIZERS
from vkdecode.text.stream import byte_level_alphabet
from vkdecode.weights import GgufFile, open_weights


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(open_weights(smollm2_path()))


@pytest.fixture(scope="module")
def missing_bytes() -> set[int]:
    """Bytes that the real vocabulary has no token for: a few control characters, and those of the rarest planes."""
    source = open_weights(smollm2_path())
    assert isinstance(source, GgufFile)
    tokens = set(source.metadata["tokenizer.ggml.tokens"])
    return {byte for char, byte in byte_level_alphabet().items() if char not in tokens}


@pytest.mark.parametrize("case", golden_smollm2()["completions"], ids=lambda case: case["prompt"][:12])
def test_real_prompts_have_the_reference_ids(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm2.encode(case["prompt"]) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["prompt"]
    assert smollm2.decode(case["greedy"]) == case["text"]


def test_real_chat_has_the_reference_text_and_ids(smollm2: Tokenizer) -> None:
    chat = golden_smollm2()["chat"]
    assert smollm2.render_chat(chat["messages"]) == chat["rendered"]
    assert smollm2.encode_chat(chat["messages"]) == chat["ids"]
    assert smollm2.decode(chat["greedy"]) == chat["text"]
    assert smollm2.decode(chat["greedy"], skip_special_tokens=True) == "The capital of France is Paris."


def test_real_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == {0, 2}
    assert smollm2.encode("<|im_start|>user") == [1, 4093]
    assert smollm2.encode("") == []


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_text_survives_the_round_trip(smollm2: Tokenizer, missing_bytes: set[int], text: str) -> None:
    known = "".join(char for char in text if not missing_bytes & set(char.encode()))
    assert smollm2.decode(smollm2.encode(known)) == known


def test_byte_level_merges_and_added_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_meta())
    names = byte_level_meta()["tokenizer.ggml.tokens"]
    assert [names[token] for token in tokenizer.encode("he he[tool]<s>é")] == ["he", "Ġhe", "[tool]", "<s>", "Ã", "©"]
    ids = tokenizer.encode("he[tool]<s>")
    assert tokenizer.decode(ids) == "he[tool]<s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he[tool]"
    assert tokenizer.eos_token_ids == {258, 259}  # <|eot_id|> ends a turn though the file names only <s>


def test_bos_and_eos_as_the_file_says(tmp_path: Path) -> None:
    assert load(tmp_path, byte_level_meta()).encode("he") == [256]
    tokenizer = load(tmp_path, byte_level_meta(add_bos_token=True, add_eos_token=True, eos_token_id=259))
    assert tokenizer.encode("he") == [258, 256, 259]
    assert tokenizer.encode("<s>he") == tokenizer.encode("<s><s>he") == [258, 256, 259]
    assert tokenizer.encode("he", add_special_tokens=False) == [256]
    assert tokenizer.encode("") == [258, 259]
    llama3 = load(tmp_path, byte_level_meta(pre="llama-bpe"))
    assert llama3.encode("he") == [258, 256]
    assert load(tmp_path, byte_level_meta(pre="llama-bpe", add_bos_token=False)).encode("he") == [256]


def test_chat_gets_one_bos_whether_or_not_the_template_writes_it(tmp_path: Path) -> None:
    for template in ("{{ messages[0].content }}", "{{ bos_token + messages[0].content }}"):
        meta = byte_level_meta(add_bos_token=True, add_eos_token=True)
        tokenizer = load(tmp_path, {**meta, "tokenizer.chat_template": template})
        assert tokenizer.encode_chat([{"role": "user", "content": "he"}]) == [258, 256]


def test_named_ends_are_all_respected(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_meta(eos_token_id=10, eot_token_id=11, eom_token_id=12))
    assert tokenizer.eos_token_ids == {10, 11, 12, 259}


def test_whole_words_are_not_merged(tmp_path: Path) -> None:
    """With llama-bpe a piece in the vocabulary is taken as it is, though no merge makes it."""
    meta = byte_level_meta(pre="llama-bpe", add_bos_token=False)
    meta["tokenizer.ggml.tokens"][256:258] = ["xyz", "xy"]
    meta["tokenizer.ggml.merges"] = ["x y"]
    assert load(tmp_path, meta).encode("xyz") == [256]
    meta["tokenizer.ggml.pre"] = "gpt-2"
    assert load(tmp_path, meta).encode("xyz")[0] == 257


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8") | st.sampled_from(list(" \n'sdDtTllv0123４٣½aé́_!")), max_size=40))
def test_cutting_equals_the_original_components(text: str) -> None:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    for name, original in (("gpt-2", plain), ("smollm", digits)):
        cut = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
        assert [piece for piece, _ in cut] == [piece for piece, _ in original.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "don't 1234  x\n\ny!?", ["don", "'t", "Ġ1234", "Ġ", "Ġx", "Ċ", "Ċ", "y", "!?"]),
        ("smollm", "ab 1234 c", ["ab", "Ġ", "1", "2", "3", "4", "Ġc"]),
        ("llama-bpe", "DON'T 12345 x\n\n  y!?\n", ["DON", "'T", "Ġ", "123", "45", "Ġx", "ĊĊ", "Ġ", "Ġy", "!?Ċ"]),
        ("qwen2", "It'S 123\r\n(x)", ["It", "'S", "Ġ", "1", "2", "3", "čĊ", "(x", ")"]),
        ("tekken", "HelloWorld 12/\n", ["Hello", "World", "Ġ", "1", "2", "/Ċ"]),
        ("gpt-4o", "HelloWORLD'S 1234", ["Hello", "WORLD'S", "Ġ", "123", "4"]),
        ("deepseek-v3", "a1234中.b", ["a", "123", "4", "ä¸Ń", ".b"]),
    ],
)
def test_cutting_by_name(name: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == pieces


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_meta(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def leftmost_best(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece BPE spelled out: merge the best-scored neighbours, the leftmost of equals, until none is left."""
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_sentencepiece_merges_like_the_algorithm(data: st.DataObject) -> None:
    from tokenizers import models

    words = data.draw(st.lists(st.text("ab▁", min_size=2, max_size=6), unique=True, max_size=14))
    pieces = ["a", "b", "▁", *words]
    ranks = data.draw(st.permutations(range(len(pieces))))
    scores = [-float(rank) for rank in ranks]
    merges = score_merges(pieces, scores, range(len(pieces)))
    model = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges)
    for text in data.draw(st.lists(st.text("ab▁", min_size=1, max_size=20), min_size=1, max_size=5)):
        expected = leftmost_best(text, dict(zip(pieces, scores, strict=True)))
        assert [token.value for token in model.tokenize(text)] == expected


def test_sentencepiece_prefix_space_bytes_and_bos(tmp_path: Path) -> None:
    meta = sentencepiece_meta(PIECES)
    names = meta["tokenizer.ggml.tokens"]
    tokenizer = load(tmp_path, meta)
    assert [names[token] for token in tokenizer.encode("ab aé")] == ["<s>", "▁ab", "▁a", "é"]
    assert [names[token] for token in tokenizer.encode("<s>z")] == ["<s>", "▁", "<0x7A>"]
    assert [names[token] for token in tokenizer.encode("a</s>a", add_special_tokens=False)] == ["▁a", "</s>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("ab 中  b", add_special_tokens=False)) == "ab 中  b"
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=True) == "a"
    assert tokenizer.eos_token_ids == {2}


def test_sentencepiece_without_prefix_space(tmp_path: Path) -> None:
    meta = sentencepiece_meta(PIECES, add_space_prefix=False, add_bos_token=False)
    names = meta["tokenizer.ggml.tokens"]
    tokenizer = load(tmp_path, meta)
    assert [names[token] for token in tokenizer.encode("ab a")] == ["ab", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_control_and_byte_pieces_never_come_from_merges(tmp_path: Path) -> None:
    meta = sentencepiece_meta({"▁": -1, "<": -2, "0x41>": -3, "/s>": -4}, add_bos_token=False, add_space_prefix=False)
    meta["tokenizer.ggml.token_type"][2] = UNUSED
    names = meta["tokenizer.ggml.tokens"]
    assert [names[token] for token in load(tmp_path, meta).encode("</s>")][:1] == ["<"]
    assert "<0x41>" not in [names[token] for token in load(tmp_path, meta).encode("<0x41>")]


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab é中😀\n"), max_size=30))
def test_sentencepiece_round_trip(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = _sentencepiece(tmp_path_factory)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


_CACHE: list[Tokenizer] = []


def _sentencepiece(factory: pytest.TempPathFactory) -> Tokenizer:
    if not _CACHE:
        _CACHE.append(load(factory.mktemp("spm"), sentencepiece_meta(PIECES)))
    return _CACHE[0]


def test_padded_vocabulary_decodes_to_nothing(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", {**LLAMA_META, **byte_level_meta()}, {"token_embd.weight": np.ones((300, 64), np.float32)}
    )
    tokenizer = load_tokenizer(open_weights(path))
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([256, 299]) == "he"
    with pytest.raises(TokenizerError, match="300"):
        tokenizer.decode([300])


@pytest.mark.parametrize("pre", ["falcon9", "GPT-2"])
def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path, pre: str) -> None:
    with pytest.raises(TokenizerError, match=f"{pre!r}.*supported: .*llama-bpe"):
        load(tmp_path, byte_level_meta(pre=pre))


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "none"])
def test_unknown_tokenizer_kind_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TokenizerError, match=f"{kind!r}.*supported: gpt2, llama"):
        load(tmp_path, byte_level_meta(model=kind))


def test_file_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        load(tmp_path, {})


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": [1, 2]},
        {"tokens": ["a", "a"]},
        {"merges": ["he"]},
        {"merges": ["q zz"]},
        {"merges": [1]},
        {"token_type": [1, 1]},
        {"token_type": [1.0] * 261},
        {"bos_token_id": 261},
        {"eot_token_id": 1 << 31},
        {"add_bos_token": 1},
        {"eos_token_id": "x"},
    ],
)
def test_metadata_that_makes_no_tokenizer(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError) as caught:
        load(tmp_path, byte_level_meta(**more))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [{"scores": [1.0]}, {"scores": ["a"] * 266}])
def test_scores_that_do_not_fit(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="scores"):
        load(tmp_path, sentencepiece_meta(PIECES, **more))


def test_missing_merges_scores_bos_and_bytes(tmp_path: Path) -> None:
    for meta, key in ((byte_level_meta(), "merges"), (sentencepiece_meta(PIECES), "scores")):
        del meta[f"tokenizer.ggml.{key}"]
        with pytest.raises(TokenizerError, match=key):
            load(tmp_path, meta)
    meta = byte_level_meta(add_bos_token=True)
    del meta["tokenizer.ggml.bos_token_id"]
    with pytest.raises(TokenizerError, match="start or end token"):
        load(tmp_path, meta)
    meta = {**sentencepiece_meta({}), "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
    with pytest.raises(TokenizerError, match="neither byte tokens"):
        load(tmp_path, {**meta, "tokenizer.ggml.scores": [0.0]})


def test_no_template_means_no_chat(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_meta())
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
