"""What the token loop needs of a model, and a KV cache that knows which tokens it holds.

Models, tokenizers and caches of any origin will do as long as they have these members; nothing here knows a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vkdecode.sampling import Sampler

if TYPE_CHECKING:
    from vkdecode.text.stream import StreamDecoder


class TextTokenizer(Protocol):
    """What the token loop and the conversation need of a tokenizer; `vkdecode.text.Tokenizer` has it."""

    @property
    def eos_token_ids(self) -> AbstractSet[int]: ...

    @property
    def chat_template(self) -> object | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]: ...

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> StreamDecoder: ...


class TokenKvCache(Protocol):
    """What the token loop needs of a KV cache; `vkdecode.KvCache` has it."""

    @property
    def cached_len(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    def truncate_to(self, length: int, /) -> Any: ...

    def close(self) -> None: ...


class TokenModel(Protocol):
    """What the token loop needs of a model; `vkdecode.Model` has it.

    `kv` and `context` are `Any` because a model takes only the caches and contexts of its own kind.
    """

    @property
    def config(self) -> Any: ...

    @property
    def tokenizer(self) -> TextTokenizer | None: ...

    @property
    def tokenizer_error(self) -> str | None:
        """Why there is no tokenizer, where there is none."""

    @property
    def device(self) -> Any: ...

    def new_kv_cache(self, max_seq_len: int) -> Any: ...

    def prepare(self, kv: Any, context: Any, tokens: int) -> None: ...

    def forward_with_kv_context_persistent(
        self, token_ids: Sequence[int], kv: Any, context: Any
    ) -> NDArray[np.float32]: ...


class CandidateModel(TokenModel, Protocol):
    """What a model may have besides, so that not all logits are read for each token; `vkdecode.Model` has it."""

    @property
    def max_candidates(self) -> int:
        """The largest `count` that `top_candidates` takes."""

    def prepare(self, kv: Any, context: Any, tokens: int, candidates: int = 0) -> None: ...

    def top_candidates(self, token_ids: Sequence[int], kv: Any, context: Any, count: int) -> Any:
        """The same step; `token_ids` and `logits` of the `count` highest, as `Sampler.sample_candidates` takes them."""


class KvFeed:
    """Feeds tokens into a KV cache and knows which tokens it put there (`token_ids`).

    A cache and a context that are not given are made by `open` and closed by `close`; given ones stay open.
    """

    def __init__(self, model: TokenModel, max_seq_len: int, kv: Any = None, context: Any = None) -> None:
        self.token_ids: list[int] = []
        self._model = model
        self._max_seq_len = max_seq_len
        self._kv: Any = kv
        self._context: Any = context
        self._own_kv = kv is None
        self._own_context = context is None

    @property
    def cached_len(self) -> int:
        """How many positions of the cache are taken, also by tokens that were there before."""
        return 0 if self._kv is None else int(self._kv.cached_len)

    @property
    def limit(self) -> int:
        """How many positions may be taken: the smaller of the cache's size and the model's context."""
        size = self._max_seq_len if self._kv is None else int(self._kv.max_seq_len)
        return min(size, int(self._model.config.max_position_embeddings))

    def open(self) -> None:
        """Make what was not given; does nothing when all is there."""
        if self._kv is None:
            self._kv = self._model.new_kv_cache(self._max_seq_len)
        if self._context is None:
            self._context = _new_context(self._model)

    def prepare(self, tokens: int, sampler: Sampler) -> None:
        """Build what a request of this many tokens (1 for decoding) needs with this sampler."""
        model, count = self._candidates(sampler)
        if model is None:
            self._model.prepare(self._kv, self._context, tokens)
        else:
            model.prepare(self._kv, self._context, tokens, candidates=count)

    def next_token(self, token_ids: Sequence[int], sampler: Sampler) -> int:
        """Append `token_ids` to the cache and choose the token after them; an exception leaves the cache as it was."""
        known, before = len(self.token_ids), self.cached_len
        try:
            model, count = self._candidates(sampler)
            if model is None:
                logits = self._model.forward_with_kv_context_persistent(token_ids, self._kv, self._context)
                self.token_ids.extend(token_ids)
                return sampler.sample(logits)
            best = model.top_candidates(token_ids, self._kv, self._context, count)
            self.token_ids.extend(token_ids)
            return sampler.sample_candidates(best.token_ids, best.logits)
        except BaseException:  # also Ctrl-C
            del self.token_ids[known:]
            self._truncate(before)
            raise

    def keep_common(self, token_ids: Sequence[int]) -> int:
        """Drop what differs from `token_ids` from the cache and return how many of them are cached, never all of them.

        The last one always has to be computed, for its logits. Needs a cache that held nothing when it was given.
        """
        limit = max(0, min(len(self.token_ids), self.cached_len, len(token_ids) - 1))
        common = next((i for i in range(limit) if self.token_ids[i] != token_ids[i]), limit)
        self._truncate(common)
        del self.token_ids[common:]
        return common

    def close(self) -> None:
        """Close what `open` made, the context first because its session holds the cache's buffers."""
        context, kv = self._context, self._kv
        if self._own_context:
            self._context = None
        if self._own_kv:
            self._kv = None
        try:
            if self._own_context and context is not None:
                context.close()
        finally:
            if self._own_kv and kv is not None:
                kv.close()

    def _candidates(self, sampler: Sampler) -> tuple[CandidateModel | None, int]:
        """The model as one that gives candidates, and how many; None where it takes the whole row of logits."""
        if not hasattr(self._model, "top_candidates"):
            return None, 0
        model = cast(CandidateModel, self._model)
        count = sampler.candidates_needed(int(model.config.vocab_size))
        return (model, count) if 0 < count <= model.max_candidates else (None, 0)

    def _truncate(self, length: int) -> None:
        if self.cached_len > length:
            self._kv.truncate_to(length)


def _new_context(model: TokenModel) -> Any:
    # Imported when needed: a model that brings its own context needs no Vulkan loader.
    from vkdecode.decode import InferenceContext

    return InferenceContext(model.device)
