"""Text from a prompt: `generate` returns it whole, `stream` in pieces.

Both check all that can be checked before the model computes anything. Knows no architecture and no device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vkdecode.errors import ContextLengthError, InvalidInputError, TokenizerError
from vkdecode.sampling import Sampler, SamplingParams
from vkdecode.token_loop import Generation, TextStream
from vkdecode.token_model import KvFeed, TokenModel

DEFAULT_MAX_TOKENS = 256
# Room for new tokens in a cache that is made for one request without `max_tokens`.
_OPEN_END_TOKENS = 4096


def stream(
    model: TokenModel,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = DEFAULT_MAX_TOKENS,
    sampling: SamplingParams | None = None,
    stop: str | Sequence[str] | None = None,
    context: Any = None,
    kv: Any = None,
    add_special_tokens: bool = True,
) -> TextStream:
    """Return the text that follows `prompt` as an iterator of pieces; the first `next` starts the computation.

    - `prompt`: text, or token ids, which are taken as they are. It is appended to what `kv` holds already.
    - `max_tokens`: at most so many new tokens; None ends only with an end token, a stop string or a full cache.
    - `sampling`: None is greedy.
    - `stop`: one or more strings that end the text; they are never part of it.
    - `context`: the `InferenceContext` whose held plan to use; None makes one for this call.
    - `kv`: the `KvCache` to append to; None makes one for this call. Afterwards a given one holds the prompt and all
      new tokens but the last one.
    - `add_special_tokens`: whether the tokenizer may add its beginning-of-sequence token to a text prompt.

    Raises `ContextLengthError` when the prompt does not fit, `InvalidInputError` for a prompt, limit or stop string
    that means nothing, `SamplingError` and `TokenizerError`, all before anything is computed.
    """
    token_ids = prompt_token_ids(model, prompt, add_special_tokens)
    check_max_tokens(max_tokens)
    positions = int(model.config.max_position_embeddings)
    room = _OPEN_END_TOKENS if max_tokens is None else max_tokens
    feed = KvFeed(model, min(positions, len(token_ids) + room), kv, context)
    limit = positions if kv is None else feed.limit
    if feed.cached_len + len(token_ids) > limit:
        after = f" after {feed.cached_len} cached ones" if feed.cached_len else ""
        larger = " or use a larger KV cache" if limit < positions else ""
        raise ContextLengthError(
            f"the prompt has {len(token_ids)} tokens{after} but the context holds {limit}; shorten the prompt{larger}"
        )
    return TextStream(
        feed,
        token_ids,
        tokenizer=model.tokenizer,
        sampler=Sampler(sampling),
        max_tokens=max_tokens,
        stop=stop_strings(stop, model),
        on_end=lambda _: feed.close(),
    )


def generate(
    model: TokenModel,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = DEFAULT_MAX_TOKENS,
    sampling: SamplingParams | None = None,
    stop: str | Sequence[str] | None = None,
    context: Any = None,
    kv: Any = None,
    add_special_tokens: bool = True,
) -> Generation:
    """Return the text that follows `prompt`; arguments and errors are those of `stream`."""
    pieces = stream(
        model,
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        context=context,
        kv=kv,
        add_special_tokens=add_special_tokens,
    )
    for _ in pieces:
        pass
    return pieces.result


def prompt_token_ids(model: TokenModel, prompt: str | Sequence[int], add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a prompt, or raise `InvalidInputError` when it has none or one outside the vocabulary."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise TokenizerError(f"{model.tokenizer_error}; this model takes no text, give the prompt as token ids")
        token_ids = model.tokenizer.encode(check_text("the prompt", prompt), add_special_tokens=add_special_tokens)
    else:
        token_ids = _integers(prompt)
    if not token_ids:
        raise InvalidInputError("the prompt is empty; give at least one token")
    return check_token_ids(token_ids, int(model.config.vocab_size))


def check_token_ids(token_ids: list[int], vocab_size: int) -> list[int]:
    """Return `token_ids`, or raise `InvalidInputError` that names the first one outside the vocabulary."""
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidInputError(
                f"token id {token_id} at position {position} is not in the vocabulary (0 to {vocab_size - 1})"
            )
    return token_ids


def check_text(what: str, text: str) -> str:
    """Return `text`, or raise `InvalidInputError` when it is not Unicode, as after reading bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{what} is not valid Unicode at character {error.start}; give UTF-8 text") from None
    return text


def check_max_tokens(max_tokens: int | None) -> int | None:
    """Return `max_tokens`, or raise `InvalidInputError` when it is neither None nor 1 or more."""
    if max_tokens is None or (isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens >= 1):
        return max_tokens
    raise InvalidInputError(f"max_tokens is {max_tokens!r:.40}; it must be 1 or more, or None for no limit")


def stop_strings(stop: str | Sequence[str] | None, model: TokenModel) -> tuple[str, ...]:
    """Return the stop strings as a tuple, or raise `InvalidInputError` for an empty one or a model without text."""
    if stop is None:
        return ()
    if not isinstance(stop, Iterable):
        raise InvalidInputError(f"stop is {stop!r:.40}; it must be None, one text or several")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidInputError(f"stop string {string!r:.40} is not a text of one or more characters")
    if strings and model.tokenizer is None:
        raise InvalidInputError("stop strings need text, and this model came without a tokenizer; leave them out")
    return strings


def _integers(prompt: Sequence[int]) -> list[int]:
    if not hasattr(prompt, "__getitem__") or isinstance(prompt, Mapping):
        kind = type(prompt).__name__
        raise InvalidInputError(f"the prompt is neither text nor a sequence of token ids, but a {kind}")
    if isinstance(prompt, bytes | bytearray):
        raise InvalidInputError("the prompt is bytes; decode it to str, or give a sequence of token ids")
    try:
        token_ids = list(prompt)
        if any(isinstance(token_id, bool) for token_id in token_ids):
            raise TypeError("a bool is no token id")
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"the prompt is neither text nor a sequence of token ids ({reason})") from None
