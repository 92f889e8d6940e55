"""One step of a model over a KV cache, through plans that the caller's context holds.

The context belongs to the generate loop; models are read-only weights. A prompt runs in chunks, each size a plan of
its own that is held like the decode plan, since a prefill writes rows into the same buffers and changes nothing that
the decode plan bakes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.captured import CapturedDecodeSession
from vkdecode.decode.context import InferenceContext, Stats
from vkdecode.decode.held_plans import build_session, held_session, put_session
from vkdecode.decode.kv_cache import MAX_LANDING_ROWS, KvCache
from vkdecode.decode.session import Capture, DecodeSession, DecodeTokenData, StepResult
from vkdecode.decode.step_graph import DecodeModel, PlannedModel, StepOptions, check_token_ids
from vkdecode.decode.top_k import MAX_TOP_K
from vkdecode.errors import CaptureRefusedError, ContextLengthError, InvalidInputError

RUNGS = ("captured", "held", "rebuild")
KV_OFFSETS = ("device", "symenv")
ARMS = ("bounded", "masked")
CHUNK_SIZES = (16, 64, 256)
_ALL_LOGITS_CHUNK = 16


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


def run_steps(
    model: DecodeModel,
    token_ids: Sequence[int] | NDArray[np.integer],
    kv: KvCache,
    context: InferenceContext,
    mode: DecodeMode | None = None,
    logits: str = "last",
    want: int = 0,
) -> list[tuple[StepResult, int]]:
    """Run tokens after what the cache holds and append their rows to it.

    A single token runs through the decode session that the context keeps, which is built on the first one and re-bound
    or dropped when `validity_for` says so. More tokens run as chunks of a prompt.

    Args:
        model: whose weights.
        token_ids: one or more ids.
        kv: a cache made for this model.
        context: where plans are held.
        mode: how to realize; captured by default.
        logits: `last` or `all` rows of them.
        want: 0 for whole rows, else how many of the last row's highest, up to `max_top_k(model)`.

    Returns:
        What was wanted of each step that has logits, and its number of tokens.

    Raises:
        InvalidInputError: ids outside the vocabulary, a cache of another geometry, or another argument out of range.
        ContextLengthError: the cache has no room for all of them; nothing was computed.
        ClosedError: model, cache or context was closed.

    """
    mode = mode or DecodeMode()
    ids = check_token_ids(token_ids, model.vocab_size)
    _check_fits(model, ids.size, kv, context)
    start = kv.cached_len
    results: list[tuple[StepResult, int]] = []
    try:
        with model.device.lock:
            for chunk in _chunks(model, ids.size, mode, logits, context.held):
                part = ids[chunk.start : chunk.end]
                has_logits = chunk.options.logits != "none"
                result = _run_step(model, part, chunk.options, kv, context, mode.rung, want if has_logits else 0)
                if has_logits:
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
    want: int,
) -> StepResult:
    """One step through a plan: bind its data, submit what was recorded, read what is wanted."""
    build = build_session if rung == "rebuild" else held_session
    session, stats = build(model, options, kv, context), context.stats
    try:
        data = step_data(model, session, ids, kv.cached_len)
        env = session.per_token_sym_env(kv.cached_len, ids.size)
        read_before = session.executable.bytes_read
        capture = _captured(session, want, stats) if rung == "captured" else None
        if capture is not None:
            result = capture.run(model.device, data, env, want)
            stats.count_replay(session.seq, capture.needs_one_off)
        else:
            stats.count_recording(session.seq)
            result = session.run(model.device, data, env, want)
        context.result_bytes_read += session.executable.bytes_read - read_before
    except BaseException:
        # A plan whose step failed halfway is not trusted with another one.
        session.close()
        raise
    if rung == "rebuild":
        session.close()
    else:
        put_session(context, options, session)
    return result


def _captured(session: DecodeSession, want: int, stats: Stats) -> Capture | None:
    """The session's capture, recorded for what is wanted, or None where it cannot have one; decided here only."""
    try:
        if session.capture is None:
            session.capture = CapturedDecodeSession.capture(session, want)
            stats.count_recording(session.seq)
        elif session.capture.record(want):
            stats.count_recording(session.seq)
    except CaptureRefusedError:
        return None
    return session.capture


def max_top_k(model: PlannedModel) -> int:
    """How many of the highest logits a step of this model can be asked for at most."""
    return min(MAX_TOP_K, model.vocab_size)


def prepare(
    model: DecodeModel,
    kv: KvCache,
    context: InferenceContext,
    tokens: int,
    mode: DecodeMode | None = None,
    want: int = 0,
) -> None:
    """Build the plans for a request of this many tokens (1 for decoding) ahead of it, so that it need not wait.

    Each new plan runs once on no tokens, which makes the driver compile it and leaves the cache as it is. It is
    recorded for reading so many of the highest logits, or all logits for 0.

    Raises:
        VkDecodeError: like `run_steps`.

    """
    mode = mode or DecodeMode()
    if mode.rung == "rebuild":
        return
    _check_fits(model, tokens, kv, context)
    with model.device.lock:
        for options in dict.fromkeys(chunk.options for chunk in _chunks(model, tokens, mode, "last", context.held)):
            session = held_session(model, options, kv, context)
            wanted = want if options.logits == "last" else 0
            try:
                capture = _captured(session, wanted, context.stats) if mode.rung == "captured" else None
                if capture is not None:
                    data = step_data(model, session, np.zeros(0, np.uint32), kv.cached_len)
                    capture.run_empty(model.device, data, wanted)
            except BaseException:
                session.close()
                raise
            put_session(context, options, session)


def prompt_steps(model: PlannedModel, tokens: int, mode: DecodeMode | None = None) -> tuple[StepOptions, ...]:
    """The steps, each once, that a prompt of this many tokens and the decoding after it take."""
    mode = mode or DecodeMode()
    largest = CHUNK_SIZES[-1]
    tokens = min(tokens, largest + (tokens - 1) % largest + 1)  # one full chunk is like the next
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
class _Chunk:
    """One step of a request: which plan, and the range of the request's tokens that it takes."""

    options: StepOptions
    start: int
    end: int


def _chunks(
    model: PlannedModel, tokens: int, mode: DecodeMode, logits: str, held: Collection[object] = ()
) -> Iterator[_Chunk]:
    """Cut a request into steps. A held plan with room to spare is preferred to building a smaller one."""
    kv_offset = mode.kv_offset or model.default_kv_offset
    arm = mode.arm or ("bounded" if kv_offset == "device" else "masked")
    largest = model.max_step_tokens(logits)
    if kv_offset == "symenv" and arm == "masked":
        largest = min(largest, MAX_LANDING_ROWS)
    sizes = [size for size in ((_ALL_LOGITS_CHUNK,) if logits == "all" else CHUNK_SIZES) if size <= largest]
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
    limit = model.max_positions
    if limit is not None and kv.cached_len + tokens > limit:
        raise ContextLengthError(
            f"{tokens} tokens after {kv.cached_len} cached ones exceed the {limit} positions that this model knows; "
            "nothing was computed"
        )
