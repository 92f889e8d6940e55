"""Realizing an optimized graph on a device: weights, plans, executables and the context that owns them."""

from vkdecode.runtime.context import InferenceContext, Prebuilt, Stats, optimize_for
from vkdecode.runtime.executable import Executable, StorageCache
from vkdecode.runtime.order import Hazard, OrderStep, plan_order
from vkdecode.runtime.plan import Dispatch, Plan, buffer_of, check_topology, lower
from vkdecode.runtime.weight_store import WeightStore

__all__ = [
    "Dispatch",
    "Executable",
    "Hazard",
    "InferenceContext",
    "OrderStep",
    "Plan",
    "Prebuilt",
    "Stats",
    "StorageCache",
    "WeightStore",
    "buffer_of",
    "check_topology",
    "lower",
    "optimize_for",
    "plan_order",
]
