"""One step of a model over a KV cache, through plans that the caller's context holds.

The context belongs to the generate loop; models are read-only weights. A prompt runs in chunks, each size a plan of
its own that is held like the decode plan, since a prefill writes rows into the same buffers and changes nothing that
the decode
plan bakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.captured import CapturedDecodeSession
from vkdecode.decode.kv_cache import KvCache
from vkdecode.decode.session import DecodeSession, DecodeTokenData, PlanValidity
from vkdecode.decode.step_graph import DecodeModel, StepOptions, check_token_ids
from vkdecode.errors import CaptureRefusedError, ContextLengthError, InvalidInputError
from vkdecode.gpu import Storage, StorageKind
from vkdecode.graph import Graph, KvAttrs, NodeId, Op, WeightSpec
from vkdecode.runtime import InferenceContext, StorageCache

RUNGS = ("captured", "held", "rebuild")
KV_OFFSETS = ("device", "symenv")
ARMS = ("bounded", "masked")
CHUNK_SIZES = (16, 64, 256)
_ALL_LOGITS_CHUNK = 16
_PREFILL_DISPATCHES = 10


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
    mode = mode or DecodeMode()
    ids = check_token_ids(token_ids, model.vocab_size)
    _check_fits(model, ids.size, kv, context)
    start = kv.cached_len
    parts: list[NDArray[np.float32]] = []
    try:
        with model.device.lock:
            done = 0
            while done < ids.size:
                size, count = _chunk(ids.size - done, logits)
                last = done + count == ids.size
                wanted = "last" if size == 1 else logits if logits == "all" or last else "none"
                result = _run_step(model, ids[done : done + count], size, wanted, kv, context, mode)
                kv.advance(count)
                done += count
                if logits == "all":
                    parts.append(result.reshape(-1, model.vocab_size)[:count])
    except BaseException:
        if not kv.closed and kv.cached_len > start:
            kv.truncate_to(start)
        raise
    return np.concatenate(parts) if logits == "all" else result


def invalidate_decode_pair_if_stale(
    session: DecodeSession | None, model: DecodeModel, seq: int, kv: KvCache, context: InferenceContext
) -> DecodeSession | None:
    """The session if it may serve this step, re-bound if need be, else None with the session closed.

    The one place where a held plan and its capture are dropped: the capture always first, because it reads the plan's
    buffers.
    """
    if session is None:
        return None
    geometry = kv.geometry
    validity = session.validity_for(
        seq, geometry.max_seq_len, geometry.num_layers, geometry.dtype, model.shape_key, kv.alloc_id
    )
    if validity is PlanValidity.VALID:
        return session
    session.capture = None
    if validity is PlanValidity.ALLOCATION_CHANGED:
        if session.rebind_kv(kv) is None:
            context.stats.rebinds += 1
            return session
        context.stats.rebinds_refused += 1
    session.close()
    return None


def build_session(model: DecodeModel, options: StepOptions, kv: KvCache, context: InferenceContext) -> DecodeSession:
    """Build a step's graph, prepare, optimize and plan it, and make its kernels ready.

    Raises:
        VkDecodeError: a weight cannot be read, memory runs out, or a limit of the device is exceeded.

    """
    step = model.build_step(options, kv.geometry)

    def bind(graph: Graph, constants: Sequence[NodeId]) -> StorageCache:
        return StorageCache({node: _constant_storage(model, graph, node, kv) for node in constants})

    per_segment = 0 if options.seq == 1 else _PREFILL_DISPATCHES
    prebuilt, cache = context.prebuild_optimized_as_with_env(step.graph, step.logits, step.effects, bind, per_segment)
    geometry = kv.geometry
    if options.seq == 1:
        context.stats.plans_built += 1
    else:
        context.stats.prefill_plans_built += 1
    return DecodeSession(
        model.device,
        step,
        prebuilt,
        cache,
        geometry.max_seq_len,
        geometry.num_layers,
        geometry.dtype,
        model.shape_key,
        kv,
    )


def step_data(model: DecodeModel, session: DecodeSession, ids: NDArray[np.uint32], cached_len: int) -> DecodeTokenData:
    """What a session binds for these tokens after `cached_len` rows; ids are padded to the session's room."""
    padded = np.zeros(session.seq, np.uint32)
    padded[: ids.size] = ids
    cos, sin = model.rope_cos_sin(np.arange(cached_len, cached_len + session.seq))
    mask = None
    if session.mask_node is not None:
        mask = np.where(np.arange(session.max_seq_len) < cached_len, 0.0, -np.inf).astype(np.float32)
    offset = None
    if session.offset_node is not None:
        offset = np.array([cached_len, cached_len + session.seq], np.uint32)
    return DecodeTokenData(padded, ids.size, cos, sin, mask, offset)


def _run_step(
    model: DecodeModel,
    ids: NDArray[np.uint32],
    seq: int,
    wanted: str,
    kv: KvCache,
    context: InferenceContext,
    mode: DecodeMode,
) -> NDArray[np.float32]:
    kv_offset = mode.kv_offset or model.default_kv_offset
    arm = mode.arm or ("bounded" if kv_offset == "device" else "masked")
    options = StepOptions(seq, wanted, kv_offset, arm)
    if mode.rung == "rebuild":
        session = build_session(model, options, kv, context)
        try:
            return _realize(model, session, ids, kv, context, captured=False)
        finally:
            session.close()
    session = _take(context, options)
    try:
        session = invalidate_decode_pair_if_stale(session, model, seq, kv, context)
        if session is None:
            session = build_session(model, options, kv, context)
        result = _realize(model, session, ids, kv, context, captured=mode.rung == "captured")
    except BaseException:
        # A plan whose step failed halfway is not trusted with another one.
        if session is not None:
            session.close()
        raise
    _put(context, options, session)
    return result


def _realize(
    model: DecodeModel,
    session: DecodeSession,
    ids: NDArray[np.uint32],
    kv: KvCache,
    context: InferenceContext,
    captured: bool,
) -> NDArray[np.float32]:
    data = step_data(model, session, ids, kv.cached_len)
    env = session.per_token_sym_env(kv.cached_len, ids.size)
    stats = context.stats
    if captured and session.capture is None:
        try:
            session.capture = CapturedDecodeSession.capture(session)
            _count_recording(stats, session.seq)
        except CaptureRefusedError:
            captured = False
    if captured and session.capture is not None:
        result = session.capture.replay_token(model.device, data, env)
        if session.seq == 1:
            stats.tokens_replayed += 1
        else:
            stats.prefill_replays += 1
        stats.one_off_recordings += session.capture.needs_one_off
        return result
    _count_recording(stats, session.seq)
    return session.realize_token(model.device, data, env)


def _count_recording(stats: Any, seq: int) -> None:
    if seq == 1:
        stats.recordings_made += 1
    else:
        stats.prefill_recordings_made += 1


def _take(context: InferenceContext, options: StepOptions) -> DecodeSession | None:
    """The held session for these options, out of the context while it runs."""
    if options.seq > 1:
        held: Any = context.held.pop(options, None)
        return held if isinstance(held, DecodeSession) else None
    session = context.take_decode_session()
    if not isinstance(session, DecodeSession):
        return None
    offset = "device" if session.offset_node is not None else "symenv"
    arm = "masked" if session.mask_node is not None else "bounded"
    if (offset, arm) == (options.kv_offset, options.arm):
        return session
    session.close()
    return None


def _put(context: InferenceContext, options: StepOptions, session: DecodeSession) -> None:
    if options.seq > 1:
        context.held[options] = session
    else:
        context.put_decode_session(session)


def _chunk(remaining: int, logits: str) -> tuple[int, int]:
    """Room and number of tokens of the next chunk: the smallest size that holds all, else the largest."""
    if remaining == 1:
        return 1, 1
    sizes = (_ALL_LOGITS_CHUNK,) if logits == "all" else CHUNK_SIZES
    size = next((one for one in sizes if one >= remaining), sizes[-1])
    return size, min(size, remaining)


def _check_fits(model: DecodeModel, tokens: int, kv: KvCache, context: InferenceContext) -> None:
    model.check_open()
    kv.check_open()
    if context.device is not model.device:
        raise InvalidInputError(f"the context is on {context.device!r}, the model on {model.device!r}")
    expected = model.kv_geometry(kv.max_seq_len, kv.dtype)
    if kv.geometry != expected:
        raise InvalidInputError(f"the KV cache has {kv.geometry}, the model needs {expected}; use model.new_kv_cache()")
    if kv.cached_len + tokens > kv.max_seq_len:
        raise ContextLengthError(
            f"{tokens} tokens after {kv.cached_len} cached ones exceed the context of {kv.max_seq_len}; "
            "nothing was computed"
        )


def _constant_storage(model: DecodeModel, graph: Graph, node_id: NodeId, kv: KvCache) -> Storage:
    node = graph.node(node_id)
    if node.op is Op.WEIGHT:
        return model.weight_store.get(graph.attrs(node_id, WeightSpec))
    if node.op is Op.KV:
        slot = graph.attrs(node_id, KvAttrs)
        storage = kv.rebind_slot(slot.layer, slot.which)
        if storage is None:
            raise InvalidInputError(f"the KV cache has no layer {slot.layer}")
        return storage
    size = int(np.prod(node.shape)) * node.dtype.itemsize
    return model.device.allocate(size, node.dtype, StorageKind.STAGED)
