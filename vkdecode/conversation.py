"""A conversation with a model whose KV cache lives from turn to turn, so that a turn computes only its new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from vkdecode.errors import ChatTemplateError, ClosedError, ContextLengthError, InvalidInputError, TokenizerError
from vkdecode.generate import check_max_tokens, check_text, check_token_ids, stop_strings
from vkdecode.sampling import Sampler, SamplingParams
from vkdecode.token_loop import Generation, TextStream
from vkdecode.token_model import KvFeed, TextTokenizer, TokenModel

DEFAULT_MAX_SEQ_LEN = 4096


class Conversation:
    """Messages and the KV cache that belongs to them; a context manager.

    - `system`: the system message that stands before all others.
    - `sampling`: None is greedy. A seed starts at the first turn and again with `reset`.
    - `max_tokens`: at most so many new tokens per answer; None leaves it to the model and the size of the cache.
    - `stop`: one or more strings that end an answer.
    - `max_seq_len`: positions of the KV cache; None takes the model's context, at most 4096.
    - `context`: the `InferenceContext` to use; None makes one.

    Raises `ChatTemplateError` when the model came without a chat template, and `InvalidInputError` for an argument out
    of range.
    """

    def __init__(
        self,
        model: TokenModel,
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        max_seq_len: int | None = None,
        context: Any = None,
    ) -> None:
        self._tokenizer = self._check_tokenizer(model)
        self._vocab_size = int(model.config.vocab_size)
        self._system = [] if system is None else [_message("system", system)]
        self._messages = list(self._system)
        self._max_tokens = check_max_tokens(max_tokens)
        self._stop = stop_strings(stop, model)
        self._sampler = Sampler(sampling)
        self._answer: TextStream | None = None
        self._closed = False
        self._feed = KvFeed(model, cache_size(model, max_seq_len), context=context)
        try:
            self._feed.open()
        except BaseException:
            self._feed.close()
            raise

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far, each with `role` and `content`; a copy."""
        return [dict(message) for message in self._messages]

    @property
    def cached_len(self) -> int:
        """How many tokens the KV cache holds."""
        return self._feed.cached_len

    @property
    def max_seq_len(self) -> int:
        """How many tokens the conversation may have."""
        return self._feed.limit

    def send(self, text: str) -> TextStream:
        """Return the answer to a user message as a stream; its end puts both messages into `messages`.

        An answer that is stopped or fails half way is kept as far as it was read; one without any text takes the user
        message back too. Sending again ends an answer that is still open. Raises `ContextLengthError` when the
        conversation no longer fits, `ChatTemplateError` and `InvalidInputError`; the conversation is then as before.
        """
        self._check_open()
        if self._answer is not None:
            self._answer.close()
        asked = [*self._messages, _message("user", text)]
        token_ids = check_token_ids(self._encode(asked), self._vocab_size)
        if not token_ids:
            raise ChatTemplateError("the chat template renders this conversation to nothing; use generate instead")
        if len(token_ids) > self._feed.limit:
            raise ContextLengthError(
                f"the conversation would have {len(token_ids)} tokens but its context holds {self._feed.limit}; "
                "send less, start over with /reset (reset() in Python), or use a larger max_seq_len"
            )
        common = self._feed.keep_common(token_ids)

        def keep(answer: Generation) -> None:
            if answer.text or answer.finish_reason != "interrupted":
                self._messages = [*asked, _message("assistant", answer.text)]

        self._answer = TextStream(
            self._feed,
            token_ids[common:],
            tokenizer=self._tokenizer,
            sampler=self._sampler,
            max_tokens=self._max_tokens,
            stop=self._stop,
            cached_tokens=common,
            on_end=keep,
        )
        return self._answer

    def reset(self) -> None:
        """Forget all messages but the system message, empty the KV cache, and start the seed again."""
        self._check_open()
        if self._answer is not None:
            self._answer.close()
        self._messages = list(self._system)
        self._feed.keep_common(())
        self._sampler = Sampler(self._sampler.params)

    def close(self) -> None:
        """End an open answer and free the KV cache and the held plan; the messages can still be read."""
        self._closed = True
        if self._answer is not None:
            self._answer.close()
        self._feed.close()

    def _encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens after which an answer to these messages comes."""
        return self._tokenizer.encode_chat(messages, add_generation_prompt=True)

    @staticmethod
    def _check_tokenizer(model: TokenModel) -> TextTokenizer:
        tokenizer = _tokenizer(model)
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                "this model came without a chat template, so it cannot chat; use generate, or chat --plain, which take "
                "a plain prompt"
            )
        return tokenizer

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the conversation is closed; make a new one")

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Continuation(Conversation):
    """Text that a model goes on with: what is sent is put behind what there is, without a chat template.

    For models that were not taught to chat. It takes what `Conversation` takes; `system` is the text that stands first.
    """

    def _encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self._tokenizer.encode("".join(message["content"] for message in messages))

    @staticmethod
    def _check_tokenizer(model: TokenModel) -> TextTokenizer:
        return _tokenizer(model)


def cache_size(model: TokenModel, max_seq_len: int | None) -> int:
    """Return the size for a KV cache, or raise `InvalidInputError` when the model's context is smaller."""
    positions = int(model.config.max_position_embeddings)
    if max_seq_len is None:
        return min(positions, DEFAULT_MAX_SEQ_LEN)
    if not isinstance(max_seq_len, int) or isinstance(max_seq_len, bool) or not 1 <= max_seq_len <= positions:
        raise InvalidInputError(f"max_seq_len is {max_seq_len!r:.40}; this model takes 1 to {positions} positions")
    return max_seq_len


def _tokenizer(model: TokenModel) -> TextTokenizer:
    if model.tokenizer is None:
        raise TokenizerError(f"{model.tokenizer_error}; without a tokenizer this model cannot chat")
    return model.tokenizer


def _message(role: str, content: str) -> dict[str, str]:
    if not isinstance(content, str):
        raise InvalidInputError(f"the {role} message is a {type(content).__name__}; give a text")
    return {"role": role, "content": check_text(f"the {role} message", content)}
