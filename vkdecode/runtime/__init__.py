"""Realizing an optimized graph on a device: weights, plans and executables."""

from vkdecode.runtime.arena import ArenaPool, arena_place, place_activations
from vkdecode.runtime.executable import Executable, StorageCache
from vkdecode.runtime.footprint import (
    PlanFootprint,
    check_plan,
    data_bytes,
    footprint,
    weight_constants,
    weights_bytes,
)
from vkdecode.runtime.order import OrderStep, Span, plan_order
from vkdecode.runtime.passes import attention_workgroup, check_cached_rows, max_cached_rows
from vkdecode.runtime.plan import (
    WORK_PER_SUBMISSION,
    Dispatch,
    Plan,
    buffer_of,
    check_topology,
    lower,
    steps_for,
    value_bytes,
)
from vkdecode.runtime.weight_layout import max_units
from vkdecode.runtime.weight_store import WeightStore

__all__ = [
    "WORK_PER_SUBMISSION",
    "ArenaPool",
    "Dispatch",
    "Executable",
    "OrderStep",
    "Plan",
    "PlanFootprint",
    "Span",
    "StorageCache",
    "WeightStore",
    "arena_place",
    "attention_workgroup",
    "buffer_of",
    "check_cached_rows",
    "check_plan",
    "check_topology",
    "data_bytes",
    "footprint",
    "lower",
    "max_cached_rows",
    "max_units",
    "place_activations",
    "plan_order",
    "steps_for",
    "value_bytes",
    "weight_constants",
    "weights_bytes",
]
