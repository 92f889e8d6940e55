"""Realizing an optimized graph on a device: weights, plans, executables and the context that owns them."""

from vkdecode.runtime.context import InferenceContext, Prebuilt, Stats, optimize_for
from vkdecode.runtime.executable import Executable, StorageCache
from vkdecode.runtime.footprint import PlanFootprint, check_plan, footprint, weight_constants, weights_bytes
from vkdecode.runtime.order import Hazard, OrderStep, plan_order
from vkdecode.runtime.passes import attention_workgroup, check_cached_rows, most_cached_rows
from vkdecode.runtime.plan import Dispatch, Plan, buffer_of, check_topology, lower, steps_for
from vkdecode.runtime.weight_store import WeightStore

__all__ = [
    "Dispatch",
    "Executable",
    "Hazard",
    "InferenceContext",
    "OrderStep",
    "Plan",
    "PlanFootprint",
    "Prebuilt",
    "Stats",
    "StorageCache",
    "WeightStore",
    "attention_workgroup",
    "buffer_of",
    "check_cached_rows",
    "check_plan",
    "check_topology",
    "footprint",
    "lower",
    "most_cached_rows",
    "optimize_for",
    "plan_order",
    "steps_for",
    "weight_constants",
    "weights_bytes",
]
