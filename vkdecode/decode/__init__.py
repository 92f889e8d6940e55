"""Plans held between tokens: KV caches, sessions, keys, re-binding and capture."""

from vkdecode.decode.candidates import MOST_CANDIDATES, Candidates
from vkdecode.decode.captured import CapturedDecodeSession
from vkdecode.decode.held_plans import build_session, invalidate_decode_pair_if_stale, plan_step
from vkdecode.decode.keys import KvAllocId, ModelInstanceId, make_shape_key, new_kv_alloc_id, new_model_instance_id
from vkdecode.decode.kv_cache import KvCache, KvGeometry, KvLayer
from vkdecode.decode.rebind import KvRebindSource, RebindRefusal
from vkdecode.decode.session import DecodeSession, DecodeTokenData, PlanValidity
from vkdecode.decode.step import (
    ARMS,
    CHUNK_SIZES,
    KV_OFFSETS,
    RUNGS,
    DecodeMode,
    forward_with_kv_context_persistent,
    most_candidates,
    prepare,
    prompt_steps,
    step_data,
    top_candidates,
)
from vkdecode.decode.step_graph import DecodeModel, StepGraph, StepOptions

__all__ = [
    "ARMS",
    "CHUNK_SIZES",
    "KV_OFFSETS",
    "MOST_CANDIDATES",
    "RUNGS",
    "Candidates",
    "CapturedDecodeSession",
    "DecodeMode",
    "DecodeModel",
    "DecodeSession",
    "DecodeTokenData",
    "KvAllocId",
    "KvCache",
    "KvGeometry",
    "KvLayer",
    "KvRebindSource",
    "ModelInstanceId",
    "PlanValidity",
    "RebindRefusal",
    "StepGraph",
    "StepOptions",
    "build_session",
    "forward_with_kv_context_persistent",
    "invalidate_decode_pair_if_stale",
    "make_shape_key",
    "most_candidates",
    "new_kv_alloc_id",
    "new_model_instance_id",
    "plan_step",
    "prepare",
    "prompt_steps",
    "step_data",
    "top_candidates",
]
