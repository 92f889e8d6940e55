"""Plans held between tokens: KV caches, sessions, keys, re-binding and capture."""

from vkdecode.decode.captured import CapturedDecodeSession
from vkdecode.decode.context import InferenceContext, Stats, optimize_for
from vkdecode.decode.held_plans import build_session, invalidate_decode_pair_if_stale, plan_step
from vkdecode.decode.keys import KvAllocId, ModelInstanceId, make_shape_key, new_kv_alloc_id, new_model_instance_id
from vkdecode.decode.kv_cache import MAX_LANDING_ROWS, KvCache, KvGeometry, KvLayer
from vkdecode.decode.memory import LoadPlan, MemoryReport, check_kv_cache, check_load, memory_report, plan_load
from vkdecode.decode.rebind import KvRebindSource, RebindRefusal
from vkdecode.decode.session import DecodeSession, DecodeTokenData, PlanValidity, Prebuilt, StepResult
from vkdecode.decode.step import (
    ARMS,
    CHUNK_SIZES,
    KV_OFFSETS,
    RUNGS,
    DecodeMode,
    max_top_k,
    prepare,
    prompt_steps,
    run_steps,
    step_data,
)
from vkdecode.decode.step_graph import DecodeModel, PlannedModel, StepGraph, StepOptions
from vkdecode.decode.top_k import MAX_TOP_K, Candidates

__all__ = [
    "ARMS",
    "CHUNK_SIZES",
    "KV_OFFSETS",
    "MAX_LANDING_ROWS",
    "MAX_TOP_K",
    "RUNGS",
    "Candidates",
    "CapturedDecodeSession",
    "DecodeMode",
    "DecodeModel",
    "DecodeSession",
    "DecodeTokenData",
    "InferenceContext",
    "KvAllocId",
    "KvCache",
    "KvGeometry",
    "KvLayer",
    "KvRebindSource",
    "LoadPlan",
    "MemoryReport",
    "ModelInstanceId",
    "PlanValidity",
    "PlannedModel",
    "Prebuilt",
    "RebindRefusal",
    "Stats",
    "StepGraph",
    "StepOptions",
    "StepResult",
    "build_session",
    "check_kv_cache",
    "check_load",
    "invalidate_decode_pair_if_stale",
    "make_shape_key",
    "max_top_k",
    "memory_report",
    "new_kv_alloc_id",
    "new_model_instance_id",
    "optimize_for",
    "plan_load",
    "plan_step",
    "prepare",
    "prompt_steps",
    "run_steps",
    "step_data",
]
