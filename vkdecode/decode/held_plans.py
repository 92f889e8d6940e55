"""Plans that a context holds: built once, taken for a step, checked, re-bound or dropped, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vkdecode.decode.candidates import host_copies, with_candidates
from vkdecode.decode.kv_cache import KvCache, KvGeometry
from vkdecode.decode.session import DecodeSession, PlanValidity
from vkdecode.decode.step_graph import DecodeModel, StepOptions
from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Storage, StorageKind
from vkdecode.graph import Graph, KvAttrs, NodeId, Op, WeightSpec, splice_host_copy
from vkdecode.runtime import InferenceContext, Plan, StorageCache, lower, optimize_for

# A prompt's submissions end with each attention: they are as alike as the layers, and share buffers and algorithms.
_PROMPT_CUTS = frozenset({Op.ATTENTION})


def held_session(model: DecodeModel, options: StepOptions, kv: KvCache, context: InferenceContext) -> DecodeSession:
    """A session for a step, out of the context while it runs: the held one if it may serve, else a new one.

    Raises:
        VkDecodeError: see `build_session`.

    """
    session = take_session(context, options)
    try:
        session = invalidate_decode_pair_if_stale(session, model, options.seq, kv, context)
    except BaseException:
        if session is not None:
            session.close()
        raise
    return session or build_session(model, options, kv, context)


def invalidate_decode_pair_if_stale(
    session: DecodeSession | None, model: DecodeModel, seq: int, kv: KvCache, context: InferenceContext
) -> DecodeSession | None:
    """The session if it may serve this step, re-bound if need be, else None with the session closed.

    The one place where a held plan and its capture are dropped: the capture always first, because it reads the plan's
    buffers. A plan whose graph was changed since it was optimized is dropped too.
    """
    if session is None:
        return None
    if session.graph.generation != session.optimized.generation:
        session.close()
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
    step = with_candidates(model.build_step(options, kv.geometry), options)
    cache = StorageCache()

    def bind(graph: Graph, constants: Sequence[NodeId]) -> StorageCache:
        for node in constants:
            cache[node] = _constant_storage(model, graph, node, kv)
        return cache

    try:
        prebuilt, cache = context.prebuild_optimized_as_with_env(
            step.graph,
            step.logits,
            (*step.effects, *host_copies(step)),
            bind,
            _cuts(options),
            share_activations=options.seq > 1,
        )
    except BaseException:
        for node in cache:
            if step.graph.node(node).op is Op.DATA:
                cache[node].close()
        raise
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


def plan_step(model: DecodeModel, options: StepOptions, geometry: KvGeometry) -> tuple[Graph, Plan]:
    """The optimized graph and the plan that `build_session` would realize; nothing is allocated.

    Raises:
        VkDecodeError: no kernel has a geometry, or not even a part of a weight fits a storage buffer.

    """
    step = with_candidates(model.build_step(options, geometry), options)
    target = splice_host_copy(step.graph, step.logits)
    optimized = optimize_for(model.device, step.graph, (target, *step.effects, *host_copies(step)))
    return step.graph, lower(step.graph, optimized, model.lanes, _cuts(options))


def take_session(context: InferenceContext, options: StepOptions) -> DecodeSession | None:
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


def put_session(context: InferenceContext, options: StepOptions, session: DecodeSession) -> None:
    """Keep a session for the next step with these options."""
    if options.seq > 1:
        context.held[options] = session
    else:
        context.put_decode_session(session)


def _cuts(options: StepOptions) -> frozenset[Op]:
    return frozenset() if options.seq == 1 else _PROMPT_CUTS


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
