"""A model, tokenizer, KV cache and context of plain Python, for tests of everything above the engine.

Token ids 0 to 255 are bytes. The model answers with the tokens of its script, one per pass, whatever it is fed.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOS, END, START = 256, 257, 258
VOCAB_SIZE = 260


class FakeStreamDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(bytes([token_id])) if token_id < 256 else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class FakeTokenizer:
    eos_token_ids = frozenset({END})

    def __init__(self, chat_template: str | None = "fake") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        token_ids: list[int] = []
        for message in messages:
            token_ids += [START, *f"{message['role']}:{message['content']}".encode(), END]
        return token_ids + ([START, *b"assistant:"] if add_generation_prompt else [])

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> FakeStreamDecoder:
        return FakeStreamDecoder()


class FakeKvCache:
    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.token_ids: list[int] = []
        self.closed = False

    @property
    def cached_len(self) -> int:
        return len(self.token_ids)

    def truncate_to(self, length: int) -> None:
        assert 0 <= length <= len(self.token_ids)
        del self.token_ids[length:]

    def close(self) -> None:
        self.closed = True


class FakeContext:
    def __init__(self, device: object = None) -> None:
        self.device = device
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeModel:
    """Answers with `script` (text, or token ids), then with the end token for ever.

    `fed` holds the token ids of each pass. `failures[n]` is raised in pass n (from 0) after half of the tokens are in
    the cache; a callable is called there instead.
    """

    def __init__(
        self,
        script: str | Iterable[int] = "",
        *,
        positions: int = 1000,
        tokenizer: FakeTokenizer | None = None,
        failures: Mapping[int, BaseException | Callable[[], object]] | None = None,
    ) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE, max_position_embeddings=positions)
        self.tokenizer: FakeTokenizer | None = tokenizer or FakeTokenizer()
        self.tokenizer_error: str | None = "tokenizer.json is missing"
        self.device = SimpleNamespace(info=SimpleNamespace(name="Fake GPU", kind="discrete"))
        self.failures = dict(failures or {})
        self.fed: list[list[int]] = []
        self.caches: list[FakeKvCache] = []
        self.closed = False
        self._script: list[int] = []
        self.say(script)

    def say(self, script: str | Iterable[int]) -> None:
        """Replace what is left of the script."""
        self._script = list(script.encode() if isinstance(script, str) else script)

    def new_kv_cache(self, max_seq_len: int, dtype: str = "f32") -> FakeKvCache:
        self.caches.append(FakeKvCache(max_seq_len))
        return self.caches[-1]

    def prepare(self, kv: FakeKvCache, context: FakeContext, tokens: int) -> None:
        assert not kv.closed and not context.closed and not self.closed
        assert tokens and kv.cached_len + tokens <= kv.max_seq_len

    def forward_with_kv_context_persistent(
        self, token_ids: Sequence[int], kv: FakeKvCache, context: FakeContext
    ) -> NDArray[np.float32]:
        assert not kv.closed and not context.closed and not self.closed
        assert token_ids and kv.cached_len + len(token_ids) <= kv.max_seq_len
        number = len(self.fed)
        self.fed.append(list(token_ids))
        failure = self.failures.get(number)
        if isinstance(failure, BaseException):
            kv.token_ids += token_ids[: (len(token_ids) + 1) // 2]
            raise failure
        if failure is not None:
            failure()
        kv.token_ids += token_ids
        logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
        logits[self._script.pop(0) if self._script else END] = 1
        return logits

    def close(self) -> None:
        self.closed = True


def fake_modules(model: FakeModel | BaseException, devices: Sequence[Any] = ()) -> dict[str, ModuleType]:
    """Return stand-ins for the floors below, by name, for `sys.modules`; `load` raises a model that is an error."""

    def load(path: object, device: object = None, weights: object = None, progress: Any = None) -> FakeModel:
        if isinstance(model, BaseException):
            raise model
        loading.loaded = SimpleNamespace(path=path, device=device, weights=weights)  # type: ignore[attr-defined]  # for tests
        progress(50, 100)
        progress(100, 100)
        return model

    loading, decode, gpu = (ModuleType(f"vkdecode.{name}") for name in ("loading", "decode", "gpu"))
    vars(loading)["load"] = load
    vars(decode)["InferenceContext"] = FakeContext
    vars(gpu)["list_devices"] = lambda: list(devices)
    return {module.__name__: module for module in (loading, decode, gpu)}


def install(model: FakeModel | BaseException, devices: Sequence[Any] = ()) -> None:
    """Put the stand-ins in place for the rest of the process; for tests that start a process of their own."""
    sys.modules.update(fake_modules(model, devices))
