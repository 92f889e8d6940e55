"""A loaded model: read-only weights on a device, and the steps it can run.

Plans and sessions do not live here: they belong to the generate loop's `InferenceContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode import (
    Candidates,
    DecodeMode,
    InferenceContext,
    KvCache,
    check_kv_cache,
    check_load,
    max_top_k,
    prepare,
    run_steps,
)
from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu import Device, lanes_of, open_device
from vkdecode.models.model_plan import ModelPlan, check_cache
from vkdecode.models.registry import architecture_of
from vkdecode.runtime import WeightStore
from vkdecode.weights import DType, WeightSource, open_weights
from vkdecode.weights.recode import asked_dtype

Progress = Callable[[int, int], None]
OpenSource = Callable[[], WeightSource]


class Model(ModelPlan):
    """A model on a device; a context manager.

    Made by `vkdecode.load`. Attributes: `config` (the architecture's dataclass), `device`, `tokenizer` (None where
    the files hold none), `shape_key`, `path`.
    """

    def __init__(
        self,
        source: WeightSource,
        device: Device,
        dtype: DType | None = None,
        progress: Progress | None = None,
        open_source: OpenSource | None = None,
    ) -> None:
        """Plan a model, check it against its device, and put its weights there."""
        super().__init__(source, device, dtype)
        check_load(self, self.load_plan)
        self.tokenizer: Any = None
        self.tokenizer_error: str | None = None
        self.weight_store = WeightStore(device, lanes_of(device), open_source or partial(open_weights, source.path))
        self._owns_device = False
        self._closed = False
        self.weight_store.load(self.load_plan.weights, progress, source if open_source is None else None)

    def new_kv_cache(self, max_seq_len: int, dtype: str = "f32") -> KvCache:
        """An empty KV cache on the model's device.

        Args:
            max_seq_len: rows, that is prompt and generated tokens together. It may exceed the model's
                max_position_embeddings; `generate` and `Conversation` stop there, `forward` does not.
            dtype: `f32` or `f16` (half the memory).

        Raises:
            InvalidInputError: the length is not positive or the dtype unknown.
            DeviceError: one layer's rows exceed what a storage buffer may have; the largest length is named.
            OutOfDeviceMemoryError: it does not fit the memory; the largest length that does is named.

        """
        self.check_open()
        check_cache(max_seq_len, dtype)
        geometry = self.kv_geometry(max_seq_len, dtype)
        with self.device.lock:
            check_kv_cache(self, self.load_plan.weights, geometry)
            return KvCache(self.device, geometry)

    def forward(
        self, token_ids: Sequence[int] | NDArray[np.integer], kv: KvCache, logits: str = "last"
    ) -> NDArray[np.float32]:
        """Run tokens after what the cache holds, building everything anew; the reference for the held plans.

        Args:
            token_ids: one or more ids.
            kv: a cache made by `new_kv_cache`; the tokens' rows are appended to it.
            logits: `last` for float32 [vocab], `all` for [len(token_ids), vocab].

        Raises:
            VkDecodeError: see `forward_with_kv_context_persistent`.

        """
        with InferenceContext(self.device) as context:
            return self.forward_with_kv_context_persistent(token_ids, kv, context, DecodeMode("rebuild"), logits)

    def forward_with_kv_context_persistent(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        kv: KvCache,
        context: InferenceContext,
        mode: DecodeMode | None = None,
        logits: str = "last",
    ) -> NDArray[np.float32]:
        """The same as `forward`, through the plans that the context holds.

        Args:
            token_ids: one or more ids.
            kv: a cache made by `new_kv_cache`; the tokens' rows are appended to it.
            context: where plans are held.
            mode: how to realize; captured by default.
            logits: `last` for float32 [vocab], `all` for [len(token_ids), vocab].

        Raises:
            InvalidInputError: ids outside the vocabulary, or a cache of another geometry.
            ContextLengthError: the cache has no room for all of them; nothing was computed.
            ClosedError: model, cache or context was closed.

        """
        if logits not in ("last", "all"):
            raise InvalidInputError(f"logits must be 'last' or 'all', not {logits!r}")
        parts = run_steps(self, token_ids, kv, context, mode, logits)
        if logits == "last":
            return cast(NDArray[np.float32], parts[-1][0])
        rows = [cast(NDArray[np.float32], result).reshape(-1, self.vocab_size)[:tokens] for result, tokens in parts]
        return np.concatenate(rows)

    @property
    def max_candidates(self) -> int:
        """The largest `count` of `top_candidates`."""
        return max_top_k(self)

    def top_candidates(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        kv: KvCache,
        context: InferenceContext,
        count: int,
        mode: DecodeMode | None = None,
    ) -> Candidates:
        """The same step, but only the `count` highest logits of the last token are read, best first.

        Plans are shared with `forward_with_kv_context_persistent`: changing between the two builds nothing anew, and
        each plan is recorded once for each of a row, the best token and the best 64.

        Args:
            token_ids: one or more ids.
            kv: a cache made by `new_kv_cache`.
            context: where plans are held.
            count: how many, from 1 to `max_candidates`.
            mode: how to realize; captured by default.

        Raises:
            InvalidInputError: `count` is out of its range.
            VkDecodeError: like `forward_with_kv_context_persistent`.

        """
        most = self.max_candidates
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
            raise InvalidInputError(f"count must be a whole number from 1 to {most}, not {count!r}")
        return cast(Candidates, run_steps(self, token_ids, kv, context, mode, "last", count)[-1][0])

    def prepare(self, kv: KvCache, context: InferenceContext, tokens: int, candidates: int = 0) -> None:
        """Build the plans for a request of this many tokens (1 for decoding) ahead of it, so that it need not wait.

        `candidates` is the `count` that `top_candidates` will be called with, 0 where all logits will be read.
        """
        prepare(self, kv, context, tokens, want=candidates)

    def check_open(self) -> None:
        """Raise `ClosedError` where the model or its device was closed."""
        if self._closed or self.device.closed:
            raise ClosedError(f"the model {self.path.name} was closed, or its device was; load it again")

    def close(self) -> None:
        """Let go of the weights, and close the device if it was opened for this model."""
        if not self._closed:
            self._closed = True
            self.weight_store.close()
            if self._owns_device:
                self.device.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Model({self.path.name}, {self.device.info.name}{', closed' if self._closed else ''})"


def load_model(
    source: WeightSource,
    device: Device | int | str | None = None,
    weights: str | None = None,
    progress: Progress | None = None,
    open_source: OpenSource | None = None,
) -> Model:
    """Put an open file's model on a device.

    Args:
        source: the file; it may be closed afterwards.
        device: an open device, or what `open_device` takes.
        weights: `f32`, `f16`, `bf16`, `q8_0` or `q4_0` to hold matrices so; None for what the file has.
        progress: called with bytes uploaded and bytes in all.
        open_source: opens the same weights again, now and for what a later step needs; None opens `source.path`.

    Raises:
        DeviceError: the device's limits or memory do not allow it, with the numbers; nothing was uploaded.
        VkDecodeError: the model or its tensors do not allow it; what was taken is given back.

    """
    asked = asked_dtype(weights)
    architecture_of(source.config)
    opened = device if isinstance(device, Device) else open_device(device)
    try:
        model = Model(source, opened, asked, progress, open_source)
    except BaseException:
        if not isinstance(device, Device):
            opened.close()
        raise
    model._owns_device = not isinstance(device, Device)
    return model
