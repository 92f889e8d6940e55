"""The one loop that turns chosen tokens into text, behind `generate`, `stream` and `Conversation`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from vkdecode.errors import InvalidInputError
from vkdecode.sampling import Sampler
from vkdecode.token_model import KvFeed, TextTokenizer

FinishReason = Literal["stop", "length", "context", "interrupted"]


@dataclass(frozen=True)
class Usage:
    """What a request cost; seconds are spent in the model and the sampler, not in the code that reads the text.

    `prompt_tokens` were computed and `cached_tokens` were found in the KV cache. The first token comes out of the
    prompt's pass, so `completion_seconds` covers the `decode_steps` passes of one token each that followed.
    `preparation_seconds` went into plans that later requests use again.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    decode_steps: int
    prompt_seconds: float
    completion_seconds: float
    preparation_seconds: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Computed prompt tokens per second; 0 when none was computed."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def completion_tokens_per_second(self) -> float:
        """Decode steps per second; 0 when there was none."""
        return self.decode_steps / self.completion_seconds if self.completion_seconds > 0 else 0.0

    def __str__(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        prepared = f" | plans built in {self.preparation_seconds:.1f} s" if self.preparation_seconds >= 0.1 else ""
        return (
            f"prompt {self.prompt_tokens} tokens{cached}, {self.prompt_tokens_per_second:.1f} tok/s | "
            f"generated {self.completion_tokens} tokens, {self.completion_tokens_per_second:.1f} tok/s{prepared}"
        )


@dataclass(frozen=True)
class Generation:
    """The outcome of a request.

    `text` ends before the stop string; `token_ids` are all chosen tokens but the end token. `finish_reason` is "stop"
    (end token or stop string), "length" (`max_tokens`), "context" (the KV cache is full) or "interrupted" (stopped,
    closed or failed).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage


class StopMatcher:
    """Finds stop strings in text that comes in pieces, and holds back what may still become one.

    Where several match, the one that is complete first ends the text, so that the result does not depend on the pieces.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take the next piece; return the text that may be shown now, and whether a stop string ended it."""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return what is still held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop` without being all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream(Iterator[str]):
    """The pieces of a text while it is generated; `result` holds the `Generation` once it has ended.

    The pieces never split a character, and their sum is `result.text`. The stream ends early with `stop` (before the
    next token; safe to call from a signal handler or another thread) or `close`, and leaves the KV cache usable.
    """

    def __init__(
        self,
        feed: KvFeed,
        prompt: list[int],
        *,
        tokenizer: TextTokenizer | None,
        sampler: Sampler,
        max_tokens: int | None,
        stop: Sequence[str],
        cached_tokens: int = 0,
        on_end: Callable[[Generation], None] | None = None,
    ) -> None:
        self._result: Generation | None = None
        self._feed = feed
        self._prompt = prompt
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._matcher = StopMatcher(stop)
        self._decoder = None if tokenizer is None else tokenizer.stream_decoder(skip_special_tokens=True)
        self._end_tokens: AbstractSet[int] = frozenset() if tokenizer is None else tokenizer.eos_token_ids
        self._cached_tokens = cached_tokens
        self._on_end = on_end
        self._stop_requested = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_tokens = 0
        self._decode_steps = 0
        self._prompt_seconds = 0.0
        self._completion_seconds = 0.0
        self._preparation_seconds = 0.0

    @property
    def result(self) -> Generation:
        """The outcome; raises `InvalidInputError` while the stream has not ended."""
        if self._result is None:
            raise InvalidInputError("the stream has not ended; read it to the end or close it, then ask for the result")
        return self._result

    @property
    def stop_requested(self) -> bool:
        """Whether `stop` was called."""
        return self._stop_requested

    def stop(self) -> None:
        """Ask the stream to end before it computes another token, with finish reason "interrupted"."""
        self._stop_requested = True

    def close(self) -> None:
        """End the stream now; does nothing when it has ended."""
        if self._result is None:
            self._end("interrupted")

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        while self._result is None:
            try:
                piece, reason = self._step()
            except BaseException:
                self.close()
                raise
            if piece:
                self._text.append(piece)
            if reason is not None:
                self._end(reason)
            if piece:
                return piece
        raise StopIteration

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # an abandoned stream frees its cache, as a generator would
            self.close()

    def _step(self) -> tuple[str, FinishReason | None]:
        """Compute one token; return the text that it frees, and why the stream ends if it does."""
        if self._stop_requested:
            return self._matcher.flush(), "interrupted"
        if not self._token_ids:
            self._feed.open()
            self._prepare(len(self._prompt))
            started = time.perf_counter()
            token_id = self._feed.next_token(self._prompt, self._sampler)
            self._prompt_seconds = time.perf_counter() - started
            self._prompt_tokens = len(self._prompt)
        elif self._feed.cached_len >= self._feed.limit:
            return self._rest("context")
        else:
            if self._decode_steps == 0:  # only now, so that the first token does not wait for it
                self._prepare(1)
            started = time.perf_counter()
            token_id = self._feed.next_token(self._token_ids[-1:], self._sampler)
            self._completion_seconds += time.perf_counter() - started
            self._decode_steps += 1
        if token_id in self._end_tokens:
            return self._rest("stop")
        self._token_ids.append(token_id)
        piece, stopped = self._matcher.push("" if self._decoder is None else self._decoder.push(token_id))
        if stopped:
            return piece, "stop"
        if self._max_tokens is not None and len(self._token_ids) >= self._max_tokens:
            rest, reason = self._rest("length")
            return piece + rest, reason
        return piece, None

    def _prepare(self, tokens: int) -> None:
        started = time.perf_counter()
        self._feed.prepare(tokens, self._sampler)
        self._preparation_seconds += time.perf_counter() - started

    def _rest(self, reason: FinishReason) -> tuple[str, FinishReason]:
        """Return the text that was held back when the tokens ended for `reason`."""
        piece, stopped = self._matcher.push("" if self._decoder is None else self._decoder.finish())
        return (piece, "stop") if stopped else (piece + self._matcher.flush(), reason)

    def _end(self, reason: FinishReason) -> None:
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=len(self._token_ids),
            decode_steps=self._decode_steps,
            prompt_seconds=self._prompt_seconds,
            completion_seconds=self._completion_seconds,
            preparation_seconds=self._preparation_seconds,
        )
        self._result = Generation("".join(self._text), list(self._token_ids), reason, usage)
        if self._on_end is not None:
            self._on_end(self._result)
