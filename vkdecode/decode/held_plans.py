"""Plans that a context holds: built once, taken for a step, checked, re-bound or dropped, and put back."""

from __future__ import annotations

from collections.abc import Sequence

from vkdecode.decode.context import InferenceContext, optimize_for
from vkdecode.decode.kv_cache import KvCache, KvGeometry
from vkdecode.decode.session import DecodeSession, PlanValidity
from vkdecode.decode.step_graph import DecodeModel, PlannedModel, StepGraph, StepOptions
from vkdecode.decode.top_k import with_top_k
from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Device, Storage, StorageKind, lanes_of, storage_bytes
from vkdecode.graph import Graph, KvAttrs, NodeId, Op, WeightSpec, splice_host_copy
from vkdecode.runtime import Plan, StorageCache, data_bytes, lower, value_bytes
from vkdecode.weights.dtypes import DType


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
    step = with_top_k(model.build_step(options, kv.geometry), options)
    cache = StorageCache()

    def bind(graph: Graph, constants: Sequence[NodeId]) -> StorageCache:
        for node in constants:
            if graph.node(node).op is not Op.DATA:
                cache[node] = _baked_storage(model, graph, node, kv)
        _allocate_data(model.device, graph, [one for one in constants if graph.node(one).op is Op.DATA], cache)
        return cache

    try:
        prebuilt, cache = context.prebuild_optimized_as_with_env(step.graph, step.logits, _effects(step), bind)
    except BaseException:
        for node in cache:
            if step.graph.node(node).op is Op.DATA:
                cache[node].whole.close()
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


def plan_step(model: PlannedModel, options: StepOptions, geometry: KvGeometry) -> tuple[Graph, Plan]:
    """The optimized graph and the plan that `build_session` would realize; nothing is allocated.

    Raises:
        VkDecodeError: no kernel has a geometry, or not even a part of a weight fits a storage buffer.

    """
    device = model.device
    step = with_top_k(model.build_step(options, geometry), options)
    target = splice_host_copy(step.graph, step.logits)
    optimized = optimize_for(device, step.graph, (target, *_effects(step)))
    return step.graph, lower(step.graph, optimized, lanes_of(device), device.largest_buffer_bytes)


def take_session(context: InferenceContext, options: StepOptions) -> DecodeSession | None:
    """The held session for these options, out of the context while it runs."""
    if options.seq > 1:
        return context.held.pop(options, None)
    session = context.take_decode_session()
    if session is None:
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


def _effects(step: StepGraph) -> tuple[NodeId, ...]:
    """What is realized beside the logits: moves of rows, and a copy to the host of each list of the highest."""
    return *step.effects, *(splice_host_copy(step.graph, node) for node in step.top_k)


def _baked_storage(model: DecodeModel, graph: Graph, node_id: NodeId, kv: KvCache) -> Storage:
    if graph.node(node_id).op is Op.WEIGHT:
        return model.weight_store.get(graph.attrs(node_id, WeightSpec))
    attrs = graph.attrs(node_id, KvAttrs)
    storage = kv.rebind_slot(attrs.layer, attrs.which)
    if storage is None:
        raise InvalidInputError(f"the KV cache has no layer {attrs.layer}")
    return storage


def _allocate_data(device: Device, graph: Graph, nodes: Sequence[NodeId], cache: StorageCache) -> None:
    """Put the data of a step side by side into one storage, so that they are one upload."""
    whole = device.allocate(data_bytes(graph, nodes), DType.U32, StorageKind.STAGED)
    start = 0
    for node in nodes:
        nbytes = storage_bytes(value_bytes(graph, node))
        cache[node] = whole.part(start, nbytes)
        start += nbytes
