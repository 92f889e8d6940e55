"""Streaming: pieces add up to the whole text, never show part of a character, and cost the same for every token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_files import golden_smollm2, smollm2_path
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from vkdecode.errors import TokenizerError
from vkdecode.text import Tokenizer, load_tokenizer
from vkdecode.text.stream import ByteStream, WindowStream, byte_level_alphabet, piece_reader
from vkdecode.text.tokenizer import SpecialTokens
from vkdecode.weights import open_weights


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(open_weights(smollm2_path()))


def sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁▁c", "é"]
    backend = Backend(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps])
    return Tokenizer(backend, SpecialTokens())


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    stream = tokenizer.stream_decoder(skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.finish()]


def check(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces = pieces_of(tokenizer, ids, skip=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40), skip=st.booleans())
@example(ids=[15486, 218, 2, 246], skip=True)
def test_pieces_of_random_tokens_add_up(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    check(smollm2, ids, skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 262) | st.sampled_from([242, 161, 154, 130, 258]), max_size=30), skip=st.booleans())
def test_pieces_of_random_sentencepiece_tokens_add_up(ids: list[int], skip: bool) -> None:
    check(sentencepiece(decoders.Strip(" ", 1, 0)), ids, skip)


@settings(deadline=None)
@given(text=st.text(max_size=50))
def test_text_is_decoded_like_the_library_does(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == smollm2._backend.decode(ids, skip_special_tokens=False)
    check(smollm2, ids, False)


@pytest.mark.parametrize("case", golden_smollm2()["completions"], ids=lambda case: case["prompt"][:12])
def test_streamed_reference_text(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    pieces = pieces_of(smollm2, case["greedy"], skip=False)
    assert "".join(pieces) == case["text"]
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_emoji_appears_with_its_last_byte(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a😀中")
    pieces = pieces_of(smollm2, ids, skip=True)
    assert "".join(pieces) == "a😀中"
    assert len(ids) > 3
    assert "" in pieces[:-1]
    assert all(piece in ("", "a", "😀", "中") for piece in pieces)


def test_half_a_character_at_the_end_shows_only_when_finished() -> None:
    tokenizer = sentencepiece()
    stream = tokenizer.stream_decoder()
    assert [stream.push(2 + byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = sentencepiece()
    assert "".join(pieces_of(tokenizer, [1, 260], skip=True)) == "b"
    assert "".join(pieces_of(tokenizer, [1, 260], skip=False)) == "<s>b"


def test_only_the_first_space_is_dropped() -> None:
    stripping = sentencepiece(decoders.Strip(" ", 1, 0))
    assert stripping.decode([259, 259]) == "a a"
    assert stripping.decode([261]) == " c"
    assert stripping.decode([258, 258]) == " "
    assert "".join(pieces_of(stripping, [1, 258, 259], skip=True)) == " a"
    assert sentencepiece().decode([259]) == " a"


def test_work_per_token_does_not_grow() -> None:
    """Each push asks for the bytes of its own token and nothing else."""
    asked: list[int] = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return b"x"

    stream = ByteStream(token_bytes, 0)
    for token in range(1000):
        assert stream.push(token) == "x"
    assert asked == list(range(1000))


def test_window_never_re_reads_more_than_a_few_tokens() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("\ufffd" if token == 0 else f" {token}" for token in ids)

    stream = WindowStream(decode)
    ids = [1, 2, *[0] * 100, 3, 4]
    pieces = [*map(stream.push, ids), stream.finish()]
    assert longest <= 32
    assert "".join(pieces) == decode(ids)


def test_unknown_decoders_go_through_the_library() -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "un": 1, "##known": 2, "word": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(backend, SpecialTokens())
    assert tokenizer.decode([1, 2, 3]) == "unknown word"
    assert pieces_of(tokenizer, [1, 2, 3], skip=False) == ["un", "known", " word", ""]
    assert tokenizer.token_piece(2) == "##known"


@pytest.mark.parametrize(
    ("decoder", "known"),
    [
        (None, False),
        ({"type": "CTC"}, False),
        ({"type": "ByteLevel"}, True),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, True),
        ({"type": "Sequence", "decoders": []}, False),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}, False),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}, True),
        ({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}, False),
    ],
)
def test_which_decoders_are_about_bytes(decoder: dict[str, Any] | None, known: bool) -> None:
    assert (piece_reader(decoder) is not None) == known


def test_alphabet_covers_every_byte_once() -> None:
    table = byte_level_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    for char, byte in table.items():
        if 0x21 <= byte < 0x7F:
            assert ord(char) == byte
    assert table["Ġ"] == 0x20
    assert table["Ċ"] == 0x0A


def test_token_piece_shows_text_or_bytes(smollm2: Tokenizer) -> None:
    (capital,) = smollm2.encode(" capital")
    assert smollm2.token_piece(capital) == " capital"
    assert smollm2.token_piece(2) == "<|im_end|>"
    first = smollm2.encode("😀")[0]
    assert smollm2.token_piece(first).startswith("<0x")


@pytest.mark.parametrize("token", [-1, 49152, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(smollm2: Tokenizer, token: int) -> None:
    message = f"{token} is outside the vocabulary of 49152"
    with pytest.raises(TokenizerError, match=message):
        smollm2.decode([token])
    with pytest.raises(TokenizerError, match=message):
        smollm2.stream_decoder().push(token)
    with pytest.raises(TokenizerError, match=message):
        smollm2.token_piece(token)
