"""A loaded model: read-only weights on a device, its config, and the steps it can run.

Plans and sessions do not live here: they belong to the generate loop's `InferenceContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode import (
    Candidates,
    DecodeMode,
    KvCache,
    KvGeometry,
    StepGraph,
    StepOptions,
    forward_with_kv_context_persistent,
    make_shape_key,
    most_candidates,
    new_model_instance_id,
    prepare,
    top_candidates,
)
from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu import Device, Lanes, open_device
from vkdecode.graph import WeightSpec
from vkdecode.models.config import DecoderConfig
from vkdecode.models.memory import MemoryReport, check_kv_cache, memory_report, plan_load
from vkdecode.models.registry import architecture_of
from vkdecode.models.rope import RopeRows
from vkdecode.models.tensors import TensorTable
from vkdecode.runtime import InferenceContext, WeightStore
from vkdecode.weights import DType, WeightSource, open_weights
from vkdecode.weights.recode import asked_dtype

Progress = Callable[[int, int], None]
OpenSource = Callable[[], WeightSource]


class Model:
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
        load: bool = True,
    ) -> None:
        """Plan a model and put its weights on the device; without `load` it stays a plan, which can only be asked."""
        model_type, self._architecture = architecture_of(source.config)
        self.path: Path = source.path
        self.config: DecoderConfig = self._architecture.parse_config(source.config)
        self._rope = self._architecture.rope(source.config, self.config)
        pairs = self.config.head_dim // 2
        self._rope_rows = [RopeRows(self._rope, pairs), RopeRows(self._rope.local or self._rope, pairs)]
        c = self.config
        self._kv_geometry = KvGeometry(c.num_hidden_layers, c.num_key_value_heads, 1, c.head_dim, DType.F32)
        self._tensors = TensorTable(source, dtype)
        self._tensors.check_layers(self._architecture.layers, self.config.num_hidden_layers)
        self._architecture.check_tensors(self.config, self._tensors)
        self.device = device
        self.tokenizer: Any = None
        self.tokenizer_error: str | None = None
        self.instance_id = new_model_instance_id()
        structure = {
            **asdict(self.config),
            "rotary_dim": self._rope.rotary_dim,
            "dtype": dtype.value if dtype else None,
        }
        self.shape_key = make_shape_key(model_type, structure, self.instance_id)
        self.weight_store = WeightStore(device, device.lanes, open_source or partial(open_weights, source.path))
        self._owns_device = False
        self._closed = False
        self._loaded = load
        self._plan = plan_load(self, check=load)
        self._tensors.check_all_used()
        if load:
            self.weight_store.load(self._plan.weights, progress, source if open_source is None else None)

    @property
    def lanes(self) -> Lanes:
        """The kernel shape that the weights are packed for."""
        return self.weight_store.lanes

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token."""
        return int(self.config.vocab_size)

    @property
    def default_kv_offset(self) -> str:
        """`device` or `symenv`: where the KV write takes its offset from unless asked otherwise."""
        return self._architecture.default_kv_offset

    def weight_specs(self) -> list[WeightSpec]:
        """The weight constants of the optimized decode step; every other step uses the same ones."""
        return list(self._plan.weights)

    def most_step_tokens(self, logits: str) -> int:
        """How many tokens a step may have room for, so that no activation exceeds the device's storage buffers."""
        return self._plan.most_tokens_of_all_logits if logits == "all" else self._plan.most_tokens

    def memory_report(self, max_seq_len: int | None = None, kv_dtype: str = "f32") -> MemoryReport:
        """The bytes that the model takes on its device, part by part; computed from plans, nothing is allocated.

        Args:
            max_seq_len: rows of the KV cache; None for the model's max_position_embeddings.
            kv_dtype: `f32` or `f16`.

        Raises:
            InvalidInputError: the length is not positive or the dtype unknown.

        """
        rows = self.config.max_position_embeddings if max_seq_len is None else max_seq_len
        _check_cache(rows, kv_dtype)
        return memory_report(self, self._plan.weights, rows, kv_dtype)

    def kv_geometry(self, max_seq_len: int, dtype: str) -> KvGeometry:
        """The shape of a cache for this model."""
        known = self._kv_geometry  # every step asks for that of its cache
        if (known.max_seq_len, known.dtype.value) != (max_seq_len, dtype):
            self._kv_geometry = known = replace(known, max_seq_len=max_seq_len, dtype=DType(dtype))
        return known

    def build_step(self, options: StepOptions, geometry: KvGeometry) -> StepGraph:
        """A new, unoptimized graph of one step."""
        return self._architecture.build_step(self.config, self._tensors, self._rope.rotary_dim, options, geometry)

    @property
    def most_positions(self) -> int | None:
        """How many positions the model can tell apart; None where it takes any."""
        return self._rope.max_positions

    def rope_cos_sin(
        self, positions: NDArray[np.int64], max_seq_len: int | None = None, local: bool = False
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines [positions, head_dim / 2]; pairs that are not turned get 1 and 0.

        Args:
            positions: from 0 on.
            max_seq_len: rows of the cache that they are for; long-context scaling can depend on it.
            local: those of the windowed layers, for a model whose layers differ.

        """
        return self._rope_rows[local].cos_sin(positions, max_seq_len)

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
        _check_cache(max_seq_len, dtype)
        geometry = self.kv_geometry(max_seq_len, dtype)
        with self.device.lock:
            check_kv_cache(self, self._plan.weights, geometry)
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
            return forward_with_kv_context_persistent(self, token_ids, kv, context, DecodeMode(rung="rebuild"), logits)

    def forward_with_kv_context_persistent(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        kv: KvCache,
        context: InferenceContext,
        mode: DecodeMode | None = None,
        logits: str = "last",
    ) -> NDArray[np.float32]:
        """The same as `forward`, through the plans that the context holds; see `vkdecode.decode`."""
        return forward_with_kv_context_persistent(self, token_ids, kv, context, mode, logits)

    @property
    def most_candidates(self) -> int:
        """The largest `count` of `top_candidates`."""
        return most_candidates(self)

    def top_candidates(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        kv: KvCache,
        context: InferenceContext,
        count: int,
        mode: DecodeMode | None = None,
    ) -> Candidates:
        """The same step, of whose logits only the `count` highest are read; see `vkdecode.decode.top_candidates`."""
        return top_candidates(self, token_ids, kv, context, count, mode)

    def prepare(self, kv: KvCache, context: InferenceContext, tokens: int, candidates: int = 0) -> None:
        """Build the plans for a request of this many tokens (1 for decoding) ahead of it, so that it need not wait.

        `candidates` is the `count` that `top_candidates` will be called with, 0 where all logits will be read.
        """
        prepare(self, kv, context, tokens, candidates=candidates)

    def check_open(self) -> None:
        """Raise `ClosedError` where the model or its device was closed, or its weights were never loaded."""
        if not self._loaded:
            raise ClosedError(f"the model {self.path.name} was only planned, so it cannot run; load it")
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


def _check_cache(max_seq_len: int, dtype: str) -> None:
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 1:
        raise InvalidInputError(f"max_seq_len must be a positive integer, not {max_seq_len!r}")
    if dtype not in ("f32", "f16"):
        raise InvalidInputError(f"a KV cache is 'f32' or 'f16', not {dtype!r}")


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
