"""One step of a model over a KV cache, through plans that the caller's context holds.

The context belongs to the generate loop; models are read-only weights. A prompt runs in chunks, each size a plan of
its own that is held like the decode plan, since a prefill writes rows into the same buffers and changes nothing that
the decode
plan bakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.candidates import MOST_CANDIDATES, Candidates
from vkdecode.decode.captured import CapturedDecodeSession
from vkdecode.decode.held_plans import build_session, held_session, put_session
from vkdecode.decode.kv_cache import KvCache
from vkdecode.decode.session import DecodeSession, DecodeTokenData
from vkdecode.decode.step_graph import DecodeModel, StepOptions, check_token_ids
from vkdecode.errors import CaptureRefusedError, ContextLengthError, InvalidInputError
from vkdecode.graph import NodeId
from vkdecode.runtime import InferenceContext, Stats

RUNGS = ("captured", "held", "rebuild")
KV_OFFSETS = ("device", "symenv")
ARMS = ("bounded", "masked")
CHUNK_SIZES = (16, 64, 256)
_ALL_LOGITS_CHUNK = 16

T = TypeVar("T")


@dataclass(frozen=True)
class DecodeMode:
    """How steps are realized.

    Attributes:
        rung: `captured` (re-submit a held recording), `held` (record the held plan anew) or `rebuild` (everything
            anew).
        kv_offset: `device` or `symenv`; None for the model's default.
        arm: `bounded` or `masked` attention; None for bounded on the device-offset path and masked on the SymEnv
            path, where a recording can be held only if attention reads no push constant.

    """

    rung: str = "captured"
    kv_offset: str | None = None
    arm: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("rung", self.rung, RUNGS),
            ("kv_offset", self.kv_offset, (None, *KV_OFFSETS)),
            ("arm", self.arm, (None, *ARMS)),
        ):
            if value not in known:
                raise InvalidInputError(f"{name} must be one of {[one for one in known if one]}, not {value!r}")


def forward_with_kv_context_persistent(
    model: DecodeModel,
    token_ids: Sequence[int] | NDArray[np.integer],
    kv: KvCache,
    context: InferenceContext,
    mode: DecodeMode | None = None,
    logits: str = "last",
) -> NDArray[np.float32]:
    """Run tokens after what the cache holds and append their rows to it.

    A single token runs through the decode session that the context keeps, which is built on the first one and
    re-bound or dropped when `validity_for` says so. More tokens run as chunks of a prompt.

    Args:
        model: whose weights.
        token_ids: one or more ids.
        kv: a cache made for this model.
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
    parts = list(_run_steps(model, token_ids, kv, context, mode, logits, _LOGITS))
    if logits == "last":
        return parts[-1][0]
    return np.concatenate([result.reshape(-1, model.vocab_size)[:tokens] for result, tokens in parts])


def top_candidates(
    model: DecodeModel,
    token_ids: Sequence[int] | NDArray[np.integer],
    kv: KvCache,
    context: InferenceContext,
    count: int,
    mode: DecodeMode | None = None,
) -> Candidates:
    """The same step, but only the `count` highest logits of the last token are read, best first.

    Plans are shared with `forward_with_kv_context_persistent`: changing between the two builds nothing anew, and each
    plan is recorded once for each of a row, one candidate and up to 64.

    Args:
        model: whose weights.
        token_ids: one or more ids.
        kv: a cache made for this model.
        context: where plans are held.
        count: how many, from 1 to 64 and the size of the vocabulary.
        mode: how to realize; captured by default.

    Raises:
        InvalidInputError: `count` is out of its range; else like `forward_with_kv_context_persistent`.
        VkDecodeError: like `forward_with_kv_context_persistent`.

    """
    most = most_candidates(model)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise InvalidInputError(f"count must be a whole number from 1 to {most}, not {count!r}")
    wanted: _Wanted[Candidates] = _Wanted(
        count,
        lambda session, *step: session.realize_candidates(*step, count),
        lambda capture, *step: capture.replay_candidates(*step, count),
    )
    return _run_steps(model, token_ids, kv, context, mode, "last", wanted)[-1][0]


def most_candidates(model: DecodeModel) -> int:
    """The most candidates that a step of this model can be asked for."""
    return min(MOST_CANDIDATES, model.vocab_size)


def prepare(
    model: DecodeModel,
    kv: KvCache,
    context: InferenceContext,
    tokens: int,
    mode: DecodeMode | None = None,
    candidates: int = 0,
) -> None:
    """Build the plans for a request of this many tokens (1 for decoding) ahead of it, so that it need not wait.

    Each new plan runs once on no tokens, which makes the driver compile it and leaves the cache as it is. It is
    recorded for reading this many candidates, or all logits for 0.

    Raises:
        VkDecodeError: like `forward_with_kv_context_persistent`.

    """
    mode = mode or DecodeMode()
    if mode.rung == "rebuild":
        return
    _check_fits(model, tokens, kv, context)
    with model.device.lock:
        for options in dict.fromkeys(chunk.options for chunk in _chunks(model, tokens, mode, "last", context.held)):
            session = held_session(model, options, kv, context)
            try:
                wanted = session.wanted_node(candidates)
                if mode.rung == "captured" and _capture(session, wanted, context.stats):
                    _run_empty(model, session, wanted, kv.cached_len)
            except BaseException:
                session.close()
                raise
            put_session(context, options, session)


def prompt_steps(model: DecodeModel, tokens: int, mode: DecodeMode | None = None) -> tuple[StepOptions, ...]:
    """The steps, each once, that a prompt of this many tokens and the decoding after it take."""
    mode = mode or DecodeMode()
    chunks = [*_chunks(model, tokens, mode, "last"), *_chunks(model, 1, mode, "last")]
    return tuple(dict.fromkeys(chunk.options for chunk in chunks))


def step_data(model: DecodeModel, session: DecodeSession, ids: NDArray[np.uint32], cached_len: int) -> DecodeTokenData:
    """What a session binds for these tokens after `cached_len` rows; ids are padded to the session's room."""
    if ids.size == session.seq == 1:  # met at every token decoded
        padded, positions = ids, np.array([cached_len])
    else:
        padded = np.zeros(session.seq, np.uint32)
        padded[: ids.size] = ids
        # Padding repeats the last position: a model may know no further one.
        positions = np.minimum(np.arange(cached_len, cached_len + session.seq), max(cached_len + ids.size - 1, 0))
    cos, sin = model.rope_cos_sin(positions, session.max_seq_len)
    mask = None
    if session.mask_node is not None:
        mask = np.where(np.arange(session.max_seq_len) < cached_len, 0.0, -np.inf).astype(np.float32)
    offset = None
    if session.offset_node is not None:
        offset = np.array([cached_len, cached_len + session.seq], np.uint32)
    extras: dict[str, NDArray[np.generic]] = {}
    if "positions" in session.extra_nodes:
        extras["positions"] = positions.astype(np.uint32)
    if "ages" in session.extra_nodes:
        ages = cached_len - np.arange(session.max_seq_len)
        extras["ages"] = np.where(ages > 0, ages, -1).astype(np.float32)
    if "local_rope_cos" in session.extra_nodes:
        local = model.rope_cos_sin(positions, session.max_seq_len, local=True)
        extras["local_rope_cos"], extras["local_rope_sin"] = local
    return DecodeTokenData(padded, ids.size, cos, sin, mask, offset, extras)


@dataclass(frozen=True)
class _Wanted(Generic[T]):
    """What a step is read for: the logits (`candidates` 0) or so many of the highest, and how either is got.

    `realize` is called with a session, `replay` with a capture; both then take the device, the step's data and symbols.
    """

    candidates: int
    realize: Callable[..., T]
    replay: Callable[..., T]


_LOGITS: _Wanted[NDArray[np.float32]] = _Wanted(
    0, lambda session, *step: session.realize_token(*step), lambda capture, *step: capture.replay_token(*step)
)


def _run_steps(
    model: DecodeModel,
    token_ids: Sequence[int] | NDArray[np.integer],
    kv: KvCache,
    context: InferenceContext,
    mode: DecodeMode | None,
    logits: str,
    wanted: _Wanted[T],
) -> list[tuple[T, int]]:
    """Run a request's steps; what was wanted of each that has logits, and its number of tokens."""
    mode = mode or DecodeMode()
    ids = check_token_ids(token_ids, model.vocab_size)
    _check_fits(model, ids.size, kv, context)
    start = kv.cached_len
    results: list[tuple[T, int]] = []
    try:
        with model.device.lock:
            for chunk in _chunks(model, ids.size, mode, logits, context.held):
                part = ids[chunk.start : chunk.end]
                if chunk.options.logits == "none":
                    _run_step(model, part, chunk.options, kv, context, mode.rung, _LOGITS)
                else:
                    result = _run_step(model, part, chunk.options, kv, context, mode.rung, wanted)
                    results.append((result, part.size))
                kv.advance(part.size)
    except BaseException:
        if not kv.closed and kv.cached_len > start:
            kv.truncate_to(start)
        raise
    return results


def _run_step(
    model: DecodeModel,
    ids: NDArray[np.uint32],
    options: StepOptions,
    kv: KvCache,
    context: InferenceContext,
    rung: str,
    wanted: _Wanted[T],
) -> T:
    if rung == "rebuild":
        session = build_session(model, options, kv, context)
        try:
            return _realize(model, session, ids, kv, context, wanted, captured=False)
        finally:
            session.close()
    session = held_session(model, options, kv, context)
    try:
        result = _realize(model, session, ids, kv, context, wanted, captured=rung == "captured")
    except BaseException:
        # A plan whose step failed halfway is not trusted with another one.
        session.close()
        raise
    put_session(context, options, session)
    return result


def _run_empty(model: DecodeModel, session: DecodeSession, wanted: NodeId, cached_len: int) -> None:
    if session.capture is not None and not session.capture.has_run_for(wanted):
        session.capture.run_empty(model.device, step_data(model, session, np.zeros(0, np.uint32), cached_len), wanted)


def _realize(
    model: DecodeModel,
    session: DecodeSession,
    ids: NDArray[np.uint32],
    kv: KvCache,
    context: InferenceContext,
    wanted: _Wanted[T],
    captured: bool,
) -> T:
    data = step_data(model, session, ids, kv.cached_len)
    env = session.per_token_sym_env(kv.cached_len, ids.size)
    stats, executable = context.stats, session.executable
    read_before = executable.bytes_read
    node = session.wanted_node(wanted.candidates)
    if captured and _capture(session, node, stats) and session.capture is not None:
        result = wanted.replay(session.capture, model.device, data, env)
        if session.seq == 1:
            stats.tokens_replayed += 1
        else:
            stats.prefill_replays += 1
        stats.one_off_recordings += session.capture.needs_one_off
    else:
        _count_recording(stats, session.seq)
        result = wanted.realize(session, model.device, data, env)
    context.result_bytes_read += executable.bytes_read - read_before
    return result


def _capture(session: DecodeSession, wanted: NodeId, stats: Stats) -> bool:
    """Whether the session has a capture of the plan up to this node, made now if it can have one."""
    if session.capture is None:
        try:
            session.capture = CapturedDecodeSession.capture(session, wanted)
        except CaptureRefusedError:
            return False
        _count_recording(stats, session.seq)
    elif session.capture.record(wanted):
        _count_recording(stats, session.seq)
    return True


def _count_recording(stats: Stats, seq: int) -> None:
    if seq == 1:
        stats.recordings_made += 1
    else:
        stats.prefill_recordings_made += 1


@dataclass(frozen=True)
class _Chunk:
    """One step of a request: which plan, and the range of the request's tokens that it takes."""

    options: StepOptions
    start: int
    end: int


def _chunks(
    model: DecodeModel, tokens: int, mode: DecodeMode, logits: str, held: Collection[object] = ()
) -> Iterator[_Chunk]:
    """Cut a request into steps. A held plan with room to spare is preferred to building a smaller one."""
    kv_offset = mode.kv_offset or model.default_kv_offset
    arm = mode.arm or ("bounded" if kv_offset == "device" else "masked")
    most = model.most_step_tokens(logits)
    sizes = [size for size in ((_ALL_LOGITS_CHUNK,) if logits == "all" else CHUNK_SIZES) if size <= most]
    start = 0
    while start < tokens:
        remaining = tokens - start
        if remaining == 1 or not sizes:
            yield _Chunk(StepOptions(1, "last", kv_offset, arm), start, start + 1)
            start += 1
            continue
        wanted = logits if logits == "all" or remaining <= sizes[-1] else "none"
        fitting = [StepOptions(size, wanted, kv_offset, arm) for size in sizes if size >= remaining]
        fitting = fitting or [StepOptions(sizes[-1], wanted, kv_offset, arm)]
        options = next((one for one in fitting if one in held), fitting[0])
        end = min(start + options.seq, tokens)
        yield _Chunk(options, start, end)
        start = end


def _check_fits(model: DecodeModel, tokens: int, kv: KvCache, context: InferenceContext) -> None:
    model.check_open()
    if not isinstance(kv, KvCache):
        raise InvalidInputError(f"kv must be a KvCache made by model.new_kv_cache(), not {type(kv).__name__}")
    if not isinstance(context, InferenceContext):
        raise InvalidInputError(f"context must be an InferenceContext, not {type(context).__name__}")
    kv.check_open()
    if context.device is not model.device:
        raise InvalidInputError(f"the context is on {context.device!r}, the model on {model.device!r}")
    if not kv.is_on(model.device):
        raise InvalidInputError(
            f"the KV cache was made on {kv.device_location}, the model is on {model.device!r}; use model.new_kv_cache()"
        )
    expected = model.kv_geometry(kv.max_seq_len, kv.dtype)
    if kv.geometry != expected:
        raise InvalidInputError(f"the KV cache has {kv.geometry}, the model needs {expected}; use model.new_kv_cache()")
    if kv.cached_len + tokens > kv.max_seq_len:
        raise ContextLengthError(
            f"{tokens} tokens after {kv.cached_len} cached ones exceed the context of {kv.max_seq_len}; "
            "nothing was computed"
        )
    limit = model.most_positions
    if limit is not None and kv.cached_len + tokens > limit:
        raise ContextLengthError(
            f"{tokens} tokens after {kv.cached_len} cached ones exceed the {limit} positions that this model knows; "
            "nothing was computed"
        )
