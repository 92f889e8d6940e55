from __future__ import annotations

import sys
from typing import Any

import pytest
from fakes import BOS, END, START, FakeContext, FakeModel, FakeTokenizer, fake_modules

from vkdecode.conversation import Continuation, Conversation
from vkdecode.errors import (
    ChatTemplateError,
    ClosedError,
    ContextLengthError,
    InvalidInputError,
    TokenizerError,
    VkDecodeError,
)
from vkdecode.sampling import SamplingParams
from vkdecode.token_loop import Generation


def start(model: FakeModel, **options: Any) -> Conversation:
    return Conversation(model, context=FakeContext(), **options)


def answer(conversation: Conversation, text: str) -> Generation:
    pieces = conversation.send(text)
    assert "".join(pieces) == pieces.result.text
    return pieces.result


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, contents, strict=False)]


def test_a_turn_computes_only_its_new_tokens() -> None:
    model = FakeModel("Hello")
    conversation = start(model)
    first = answer(conversation, "Hi")
    assert model.fed[0] == [START, *b"user:Hi", END, START, *b"assistant:"]
    model.fed.clear()
    model.say("Fine")
    second = answer(conversation, "How are you?")
    # The end token of the first answer was chosen but never fed, so the new tokens start there.
    assert model.fed[0] == [END, START, *b"user:How are you?", END, START, *b"assistant:"]
    assert second.usage.prompt_tokens == len(model.fed[0])
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len("Hello")
    assert f"({second.usage.cached_tokens} cached)" in str(second.usage)
    assert conversation.messages == turns("Hi", "Hello", "How are you?", "Fine")
    everything = FakeTokenizer().encode_chat(conversation.messages, add_generation_prompt=False)
    assert model.caches[0].token_ids == everything[:-1]


def test_the_system_message_stands_first_and_survives_a_reset() -> None:
    model = FakeModel("a")
    conversation = start(model, system="Be brief.")
    answer(conversation, "Hi")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.cached_len == 0
    answer(conversation, "Hi")
    assert model.fed[-1] == [START, *b"system:Be brief.", END, START, *b"user:Hi", END, START, *b"assistant:"]


def test_a_continuation_goes_on_with_all_text_so_far() -> None:
    model = FakeModel("bc", tokenizer=FakeTokenizer(chat_template=None))
    text = Continuation(model, context=FakeContext(), system="Title. ", max_tokens=2)
    assert answer(text, "a").text == "bc"
    assert model.fed[0] == [BOS, *b"Title. a"]
    model.fed.clear()
    model.say("e")
    assert answer(text, "d").text == "e"
    assert model.fed[0] == [*b"cd"]  # the last token of the answer was not fed
    assert text.messages[1:] == turns("a", "bc", "d", "e")
    text.reset()
    assert text.cached_len == 0


class RewritingTokenizer(FakeTokenizer):
    """A template that shortens the answers of earlier turns, as templates that drop their reasoning do."""

    def encode_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
        short = [{**m, "content": m["content"].split("|")[-1]} for m in messages]
        return super().encode_chat(short, add_generation_prompt=add_generation_prompt)


def test_a_template_that_renders_earlier_turns_anew_gets_what_it_renders() -> None:
    model = FakeModel("thinking|yes", tokenizer=RewritingTokenizer())
    conversation = start(model)
    answer(conversation, "Well?")
    model.fed.clear()
    model.say("ok")
    result = answer(conversation, "Sure?")
    assert model.fed[0] == [*b"yes", END, START, *b"user:Sure?", END, START, *b"assistant:"]
    assert result.usage.cached_tokens == len([START, *b"user:Well?", END, START, *b"assistant:"])
    assert model.caches[0].token_ids[:-2] == RewritingTokenizer().encode_chat(conversation.messages[:-1])


def test_when_all_tokens_are_cached_the_last_one_is_computed_again() -> None:
    class Forgetful(FakeTokenizer):
        def encode_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
            return [1, 2, 3]

    model = FakeModel("ab", tokenizer=Forgetful())
    conversation = start(model)
    answer(conversation, "x")
    model.fed.clear()
    result = answer(conversation, "y")
    assert model.fed == [[3]]
    assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (1, 2)
    assert model.caches[0].token_ids == [1, 2, 3]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), VkDecodeError("device lost")])
def test_an_interrupted_answer_is_kept_and_the_cache_fits_it(error: BaseException) -> None:
    model = FakeModel("Hello", failures={3: error})
    conversation = start(model)
    with pytest.raises(type(error)):
        answer(conversation, "Hi")
    assert conversation.messages == turns("Hi", "Hel")
    model.fed.clear()
    model.say("x")
    answer(conversation, "Go on")
    # The token whose pass failed is fed again.
    assert model.fed[0] == [*b"l", END, START, *b"user:Go on", END, START, *b"assistant:"]
    everything = FakeTokenizer().encode_chat(conversation.messages, add_generation_prompt=False)
    assert model.caches[0].token_ids == everything[:-1]


def test_an_answer_interrupted_before_its_first_text_takes_the_question_back() -> None:
    model = FakeModel("Hello", failures={0: KeyboardInterrupt()})
    conversation = start(model)
    with pytest.raises(KeyboardInterrupt):
        answer(conversation, "Hi")
    assert conversation.messages == []
    assert conversation.cached_len == 0
    answer(conversation, "Hi again")
    assert conversation.messages == turns("Hi again", "Hello")


def test_an_empty_answer_is_an_answer() -> None:
    conversation = start(FakeModel(""))
    answer(conversation, "Hi")
    assert conversation.messages == turns("Hi", "")


def test_sending_again_ends_an_open_answer() -> None:
    model = FakeModel("Hello")
    conversation = start(model)
    open_answer = conversation.send("Hi")
    assert next(open_answer) == "H"
    model.say("x")
    answer(conversation, "Stop")
    assert conversation.messages == turns("Hi", "H", "Stop", "x")
    assert list(open_answer) == []


def test_a_full_context_ends_the_answer_then_refuses_and_loses_nothing() -> None:
    model = FakeModel("z" * 500)
    conversation = start(model, max_seq_len=30)
    result = answer(conversation, "Hi")
    assert result.finish_reason == "context"
    assert conversation.cached_len == conversation.max_seq_len == 30
    before, fed = conversation.messages, len(model.fed)
    with pytest.raises(ContextLengthError, match=r"would have \d+ tokens but its context holds 30.*/reset"):
        conversation.send("More")
    assert conversation.messages == before
    assert len(model.fed) == fed and conversation.cached_len == 30
    conversation.reset()
    assert answer(conversation, "Hi").text.startswith("z")


def test_limits_of_an_answer() -> None:
    assert answer(start(FakeModel("abcdef"), max_tokens=2), "Hi").text == "ab"
    assert answer(start(FakeModel("abcdef"), stop="cd"), "Hi").text == "ab"


def test_a_seed_goes_on_from_turn_to_turn_and_starts_again_with_a_reset() -> None:
    hot = SamplingParams(temperature=100.0, seed=1)
    conversation = start(FakeModel(), sampling=hot, max_tokens=8)
    first, second = answer(conversation, "Hi").token_ids, answer(conversation, "Hi").token_ids
    conversation.reset()
    assert answer(conversation, "Hi").token_ids == first != second


def test_the_cache_has_the_size_asked_for() -> None:
    small, large = FakeModel(positions=100), FakeModel(positions=100_000)
    assert start(small).max_seq_len == 100
    assert start(large).max_seq_len == 4096
    assert start(large, max_seq_len=9000).max_seq_len == 9000


@pytest.mark.parametrize("max_seq_len", [0, -5, 1001, True, 10.0])
def test_a_cache_size_out_of_range_is_refused(max_seq_len: Any) -> None:
    model = FakeModel()
    with pytest.raises(InvalidInputError, match="1 to 1000"):
        start(model, max_seq_len=max_seq_len)
    assert model.caches == []


def test_a_model_that_cannot_chat_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match=r"without a chat template.*use generate"):
        start(FakeModel(tokenizer=FakeTokenizer(chat_template=None)))
    model = FakeModel()
    model.tokenizer = None
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing.*cannot chat"):
        start(model)


@pytest.mark.parametrize("text", [None, 5, b"Hi", "\udc80"])
def test_a_message_that_is_no_text_is_refused(text: Any) -> None:
    conversation = start(FakeModel())
    with pytest.raises(InvalidInputError, match="user message"):
        conversation.send(text)
    assert conversation.messages == []


def test_closing_frees_what_the_conversation_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeContext] = []

    class Context(FakeContext):
        def __init__(self, device: object) -> None:
            super().__init__(device)
            made.append(self)

    decode = fake_modules(FakeModel())["vkdecode.decode"]
    vars(decode)["InferenceContext"] = Context
    monkeypatch.setitem(sys.modules, "vkdecode.decode", decode)
    model = FakeModel("abc")
    with Conversation(model) as conversation:
        next(conversation.send("Hi"))
    assert conversation.messages == turns("Hi", "a")
    assert model.caches[0].closed and made[0].closed
    conversation.close()
    with pytest.raises(ClosedError):
        conversation.send("Hi")
    with pytest.raises(ClosedError):
        conversation.reset()
