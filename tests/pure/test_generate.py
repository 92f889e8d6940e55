from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes import BOS, END, FakeContext, FakeKvCache, FakeModel, fake_modules
from hypothesis import given
from hypothesis import strategies as st

from vkdecode.errors import ContextLengthError, InvalidInputError, SamplingError, TokenizerError, VkDecodeError
from vkdecode.generate import generate, stream
from vkdecode.sampling import SamplingParams
from vkdecode.token_loop import StopMatcher


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[FakeContext]:
    """Stand in for `vkdecode.decode`; returns the contexts that were made."""
    made: list[FakeContext] = []

    class Context(FakeContext):
        def __init__(self, device: object) -> None:
            super().__init__(device)
            made.append(self)

    decode = fake_modules(FakeModel())["vkdecode.decode"]
    vars(decode)["InferenceContext"] = Context
    monkeypatch.setitem(sys.modules, "vkdecode.decode", decode)
    return made


def test_an_end_token_ends_the_text(contexts: list[FakeContext]) -> None:
    model = FakeModel("Paris.")
    result = generate(model, "Capital?")
    assert result.text == "Paris."
    assert result.token_ids == list(b"Paris.")
    assert result.finish_reason == "stop"
    assert model.fed == [[BOS, *b"Capital?"], *[[byte] for byte in b"Paris."]]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (9, 6)
    assert result.usage.decode_steps == 6
    assert [context.device for context in contexts] == [model.device]
    assert contexts[0].closed and model.caches[0].closed


def test_max_tokens_ends_the_text_without_a_needless_pass() -> None:
    model = FakeModel("Paris.")
    result = generate(model, [1, 2], max_tokens=3)
    assert (result.text, result.finish_reason) == ("Par", "length")
    assert model.fed == [[1, 2], [ord("P")], [ord("a")]]
    assert result.usage.decode_steps == 2


def test_the_full_context_ends_the_text() -> None:
    model = FakeModel("abcdefgh", positions=5)
    result = generate(model, [1, 2, 3])
    assert (result.text, result.finish_reason) == ("abc", "context")
    kv = FakeKvCache(4)
    result = generate(FakeModel("abcdefgh"), [1, 2, 3, 4], kv=kv, max_tokens=None)
    assert (result.text, result.finish_reason) == ("a", "context")
    assert not kv.closed


def test_no_max_tokens_goes_on_to_the_end_token() -> None:
    assert generate(FakeModel("x" * 700), "p", max_tokens=None).text == "x" * 700


def test_numpy_token_ids_are_a_prompt() -> None:
    model = FakeModel("a")
    generate(model, np.array([5, 6], dtype=np.uint16))  # type: ignore[arg-type]  # an array is no Sequence to mypy
    assert model.fed[0] == [5, 6]
    assert all(type(token_id) is int for token_id in model.fed[0])


def test_special_tokens_are_added_unless_told_otherwise() -> None:
    model = FakeModel("")
    generate(model, "a", add_special_tokens=False)
    assert model.fed == [[ord("a")]]


def test_pieces_are_whole_characters_and_sum_to_the_text() -> None:
    words = "a é 漢字 🙂."
    pieces = stream(FakeModel(words), "p")
    assert list(pieces) == list(words)
    assert pieces.result.text == words
    assert list(pieces) == []


def test_a_character_cut_off_by_the_limit_is_replaced_not_dropped() -> None:
    assert generate(FakeModel("🙂"), "p", max_tokens=2).text == "\N{REPLACEMENT CHARACTER}"


def test_stop_strings_over_several_tokens_are_never_shown() -> None:
    pieces = stream(FakeModel("one<b<br>two"), "p", stop=["<br>", "xyz"])
    shown = list(pieces)
    assert "".join(shown) == "one<b" == pieces.result.text
    assert pieces.result.finish_reason == "stop"
    assert pieces.result.token_ids == list(b"one<b<br>")


def test_held_back_text_is_shown_when_nothing_comes_of_it() -> None:
    ended, cut = FakeModel("one<br"), FakeModel("one<br")
    assert generate(ended, "p", stop="<br>").text == "one<br"
    result = generate(cut, "p", stop="<br>", max_tokens=5)
    assert (result.text, result.finish_reason) == ("one<b", "length")


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_end_the_text_wherever_the_pieces_are_cut(text: str, stop: list[str], cuts: list[int]) -> None:
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    longest = max((len(s) for s in stop if ends and text[: ends[0]].endswith(s)), default=0)
    expected = text[: ends[0] - longest] if ends else text
    matcher, shown, stopped = StopMatcher(stop), "", False
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(borders):
        piece, stopped = matcher.push(text[start:end])
        shown += piece
        assert expected.startswith(shown)
        if stopped:
            break
    assert stopped == bool(ends)
    assert shown + matcher.flush() == expected


def test_a_prompt_longer_than_the_context_computes_nothing() -> None:
    model = FakeModel(positions=8)
    for start in (generate, stream):
        with pytest.raises(ContextLengthError, match="9 tokens but the context holds 8"):
            start(model, list(range(9)))
    assert model.fed == [] and model.caches == []
    kv = FakeKvCache(6)
    kv.token_ids = [1, 2, 3]
    with pytest.raises(ContextLengthError, match="4 tokens after 3 cached ones but the context holds 6"):
        stream(model, [1, 2, 3, 4], kv=kv)
    assert kv.token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([5, 260], "token id 260 at position 1"),
        ([-1], "token id -1 at position 0"),
        ([True], "neither text nor"),
        ([1.5], "neither text nor"),
        (None, "neither text nor"),
        (7, "neither text nor"),
        (b"bytes", "bytes"),
        ([[1, 2]], "neither text nor"),
        ("half \udcff", "not valid Unicode at character 5"),
    ],
)
def test_a_prompt_that_means_nothing_is_refused(prompt: Any, words: str) -> None:
    model = FakeModel()
    with pytest.raises(InvalidInputError, match=words):
        stream(model, prompt)
    assert model.fed == []


@pytest.mark.parametrize("max_tokens", [0, -1, True, 2.0, "5"])
def test_max_tokens_out_of_range_is_refused(max_tokens: Any) -> None:
    with pytest.raises(InvalidInputError, match="max_tokens"):
        generate(FakeModel(), "p", max_tokens=max_tokens)


@pytest.mark.parametrize("stop", ["", ["ok", ""], [3], 5])
def test_stop_strings_that_mean_nothing_are_refused(stop: Any) -> None:
    with pytest.raises(InvalidInputError, match="stop"):
        generate(FakeModel(), "p", stop=stop)


def test_an_empty_text_without_a_first_token_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        generate(FakeModel(), "", add_special_tokens=False)


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids() -> None:
    model = FakeModel("abc")
    model.tokenizer = None
    result = generate(model, [1], max_tokens=5)
    assert (result.text, result.token_ids) == ("", [*b"abc", END, END])  # no end token is known
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing.*token ids"):
        generate(model, "text")
    with pytest.raises(InvalidInputError, match="without a tokenizer"):
        generate(model, [1], stop="x")


def test_given_cache_and_context_are_kept_and_go_on() -> None:
    model, kv, context = FakeModel("abc"), FakeKvCache(50), FakeContext()
    generate(model, [1, 2], kv=kv, context=context, max_tokens=2)
    assert kv.token_ids == [1, 2, ord("a")]
    generate(model, [3], kv=kv, context=context, max_tokens=1)
    assert kv.token_ids == [1, 2, ord("a"), 3]
    assert not kv.closed and not context.closed and model.caches == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), VkDecodeError("device lost")])
@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_in_a_pass_leaves_the_cache_as_before_that_pass(error: BaseException, at: int) -> None:
    model, kv, context = FakeModel("abcd", failures={at: error}), FakeKvCache(50), FakeContext()
    kv.token_ids = [9]
    pieces = stream(model, [1, 2, 3, 4], kv=kv, context=context)
    shown: list[str] = []
    with pytest.raises(type(error)):
        shown.extend(_each(pieces, shown))
    assert kv.token_ids == ([9] if at == 0 else [9, 1, 2, 3, 4, ord("a")])
    assert pieces.result.finish_reason == "interrupted"
    assert "".join(shown) == pieces.result.text == ("" if at == 0 else "ab")
    assert next(pieces, None) is None
    assert not kv.closed and not context.closed
    model.say("xy")
    assert generate(model, [5], kv=kv, context=context).text == "xy"


def _each(pieces: Iterator[str], shown: list[str]) -> list[str]:
    for piece in pieces:
        shown.append(piece)
    return []


def test_logits_that_mean_nothing_do_not_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kv = FakeModel(), FakeKvCache(50)
    monkeypatch.setattr(
        model, "forward_with_kv_context_persistent", lambda ids, kv, _: kv.token_ids.extend(ids) or np.full(260, np.nan)
    )
    with pytest.raises(VkDecodeError, match="NaN"):
        generate(model, [1, 2], kv=kv)
    assert kv.token_ids == []


def test_a_failed_pass_closes_what_was_made_for_the_request(contexts: list[FakeContext]) -> None:
    model = FakeModel("abc", failures={1: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        generate(model, "p")
    assert model.caches[0].closed and contexts[0].closed


def test_a_cache_is_closed_when_the_context_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> None:
        raise VkDecodeError("no memory")

    vars(sys.modules["vkdecode.decode"])["InferenceContext"] = refuse
    model = FakeModel("abc")
    with pytest.raises(VkDecodeError, match="no memory"):
        generate(model, "p")
    assert model.caches[0].closed


def test_closing_a_stream_early_ends_it_and_frees_its_cache(contexts: list[FakeContext]) -> None:
    model = FakeModel("abc")
    with stream(model, "p") as pieces:
        assert next(pieces) == "a"
        with pytest.raises(InvalidInputError, match="has not ended"):
            _ = pieces.result
    assert (pieces.result.text, pieces.result.finish_reason) == ("a", "interrupted")
    assert list(pieces) == [] and len(model.fed) == 1
    assert model.caches[0].closed and contexts[0].closed


def test_an_abandoned_stream_frees_its_cache() -> None:
    model = FakeModel("abc")
    for _ in stream(model, "p"):
        break
    assert model.caches[0].closed


def test_a_stream_that_never_ran_makes_no_cache() -> None:
    model = FakeModel("abc")
    stream(model, "p").close()
    assert model.caches == [] and model.fed == []


def test_stop_ends_before_the_next_pass_and_shows_what_was_held_back() -> None:
    model = FakeModel("a<b")
    pieces = stream(model, "p", stop="<br>")
    model.failures[2] = pieces.stop
    assert list(pieces) == ["a", "<b"]
    assert (pieces.result.text, pieces.result.finish_reason) == ("a<b", "interrupted")
    assert len(model.fed) == 3


def test_sampling_reaches_the_sampler() -> None:
    uniform = SamplingParams(temperature=100.0, seed=1)  # so hot that the script hardly matters

    def draw(params: SamplingParams) -> list[int]:
        return generate(FakeModel("a" * 50), [1], sampling=params, max_tokens=20).token_ids

    assert draw(uniform) == draw(uniform) != [ord("a")] * 20
    assert draw(SamplingParams()) == [ord("a")] * 20
    with pytest.raises(SamplingError, match="sampling is"):
        generate(FakeModel(), [1], sampling={"temperature": 1})  # type: ignore[arg-type]  # a wrong type is the point


def test_usage_reads_as_the_speed_line() -> None:
    usage = generate(FakeModel("abc"), "p").usage
    assert str(usage).startswith("prompt 2 tokens, ")
    assert " tok/s | generated 3 tokens, " in str(usage)
    assert str(usage).endswith(" tok/s")
    one = generate(FakeModel("abc"), "p", max_tokens=1).usage
    assert one.completion_tokens_per_second == 0.0
