"""What a model takes of a device's memory, from plans and shapes, and what is refused because it cannot fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vkdecode.decode import CHUNK_SIZES, DecodeModel, KvGeometry, StepOptions, plan_step, prompt_steps
from vkdecode.errors import DeviceError, OutOfDeviceMemoryError
from vkdecode.gpu import Device, Lanes, largest_buffer, storage_bytes
from vkdecode.graph import Graph, WeightSpec
from vkdecode.runtime import (
    Plan,
    PlanFootprint,
    check_cached_rows,
    check_plan,
    footprint,
    weight_constants,
    weights_bytes,
)
from vkdecode.weights import DType

# Rows of the smallest cache that loading a model makes sure of: one chunk of a prompt.
MINIMAL_ROWS = CHUNK_SIZES[0]
_UPLOAD_BYTES = 4 << 20


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a model takes on its device, part by part; computed, not measured.

    Attributes:
        max_seq_len: rows of the KV cache.
        kv_dtype: its element type.
        weights: the weights as they are held, padding included.
        kv_cache: K and V of all layers.
        decode_activations: the decode plan's activations and per-step data.
        prefill_activations: the same of the plans that a prompt takes which fills the cache but for one row.
        staging: host-visible twins of all activations; counted against the heap, since integrated devices have one.
        heap: the device's memory.

    """

    max_seq_len: int
    kv_dtype: str
    weights: int
    kv_cache: int
    decode_activations: int
    prefill_activations: int
    staging: int
    heap: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv_cache + self.decode_activations + self.prefill_activations + self.staging

    @property
    def fits(self) -> bool:
        """Whether that is no more than the device has."""
        return self.total <= self.heap

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            (f"KV cache, {self.max_seq_len} rows of {self.kv_dtype}", self.kv_cache),
            ("decode activations", self.decode_activations),
            ("prefill activations", self.prefill_activations),
            ("host-visible twins", self.staging),
            ("total", self.total),
            ("device memory", self.heap),
        )
        return "\n".join(f"{name:<36}{nbytes / (1 << 20):>10.1f} MiB" for name, nbytes in parts)


@dataclass(frozen=True)
class LoadPlan:
    """What is known of a model before anything is uploaded: its weights, and how wide a step may be."""

    weights: tuple[WeightSpec, ...]
    most_tokens: int
    most_tokens_of_all_logits: int


def plan_load(model: DecodeModel, check: bool = True) -> LoadPlan:
    """Plan the decode step and the smallest chunk of a prompt, and check both and their memory against the device.

    Without `check` it only plans, so that there are numbers for a device that is too small.

    Raises:
        DeviceError: a limit of the device does not allow them; it is named with both numbers.
        OutOfDeviceMemoryError: weights, a cache of `MINIMAL_ROWS` rows and the plans do not fit its memory.

    """
    device, geometry = model.device, model.kv_geometry(MINIMAL_ROWS, "f32")
    buffer = largest_buffer(device.info)
    most = buffer // (4 * _widest_activation(model, geometry))
    most_all = min(most, buffer // (4 * model.vocab_size))
    sizes = (1, CHUNK_SIZES[0]) if most >= CHUNK_SIZES[0] else (1,)
    plan_one = _checked_plan if check else plan_step
    made = [plan_one(model, _options(model, seq, "last"), geometry) for seq in sizes]
    weights = tuple(dict.fromkeys(spec for one in made for spec in weight_constants(*one)))
    plans = sum((footprint(one) for one in made), PlanFootprint())
    if check:
        _check_memory(device, model.lanes, weights, kv_bytes(geometry), plans.total)
        _check_allocations(device, len(weights) + 2 * geometry.num_layers + plans.allocations)
    return LoadPlan(weights, most, most_all)


def memory_report(model: DecodeModel, weights: Sequence[WeightSpec], max_seq_len: int, kv_dtype: str) -> MemoryReport:
    """The bytes of a model with a cache of this length and the plans of a prompt that fills it but for one row."""
    geometry = model.kv_geometry(max_seq_len, kv_dtype)
    steps = prompt_steps(model, max_seq_len - 1 or 1)
    decode = footprint(*(plan_step(model, one, geometry) for one in steps if one.seq == 1))
    prefill = footprint(*(plan_step(model, one, geometry) for one in steps if one.seq > 1))
    return MemoryReport(
        max_seq_len=max_seq_len,
        kv_dtype=kv_dtype,
        weights=weights_bytes(weights, model.lanes),
        kv_cache=kv_bytes(geometry),
        decode_activations=decode.activations,
        prefill_activations=prefill.activations,
        staging=decode.staging + prefill.staging,
        heap=model.device.info.heap_bytes,
    )


def kv_bytes(geometry: KvGeometry) -> int:
    """Bytes of a whole cache."""
    return 2 * geometry.num_layers * storage_bytes(geometry.slot_bytes)


def check_kv_cache(model: DecodeModel, weights: Sequence[WeightSpec], geometry: KvGeometry) -> None:
    """Refuse a cache that the device cannot hold, before any of it is allocated.

    Raises:
        DeviceError: one layer's K or V exceeds what a storage buffer may have, or attention would not read it all.
        OutOfDeviceMemoryError: the whole does not fit the free memory.

    """
    device = model.device
    buffer = largest_buffer(device.info)
    if storage_bytes(geometry.slot_bytes) > buffer:
        raise DeviceError(
            f"a layer's K of {geometry.slot_bytes} bytes exceeds the largest storage buffer of device {device.info}, "
            f"{buffer} bytes; {_advice(geometry.dtype, lambda dtype: buffer // _row_bytes(geometry, dtype))}"
        )
    check_cached_rows(device.info, model.lanes, geometry.head_dim, geometry.max_seq_len)
    needed = kv_bytes(geometry)
    if needed > device.free_bytes:
        advice = _advice(geometry.dtype, lambda dtype: _most_rows(model, replace(geometry, dtype=dtype)))
        raise OutOfDeviceMemoryError(
            f"a KV cache of {geometry.max_seq_len} rows of {geometry.dtype.value} takes {needed} bytes, device "
            f"{device.info} has {device.free_bytes} of {device.info.heap_bytes} free; {advice}"
            f"{_lighter_weights(weights, model.lanes)}"
        )


def _row_bytes(geometry: KvGeometry, dtype: DType) -> int:
    return replace(geometry, max_seq_len=1, dtype=dtype).slot_bytes


def _most_rows(model: DecodeModel, geometry: KvGeometry) -> int:
    """The longest cache that fits the free memory together with the plans that a prompt as long takes."""
    best = 0
    for longest in (geometry.max_seq_len, *(size + 1 for size in CHUNK_SIZES)):
        report = memory_report(model, (), min(longest, geometry.max_seq_len), geometry.dtype.value)
        left = max(model.device.free_bytes - (report.total - report.kv_cache), 0)
        slot = min(left // (2 * geometry.num_layers), largest_buffer(model.device.info)) // 16 * 16
        best = max(best, min(slot // _row_bytes(geometry, geometry.dtype), report.max_seq_len))
    return best


def _advice(dtype: DType, most_rows: Callable[[DType], int]) -> str:
    most, half = most_rows(dtype), most_rows(DType.F16) if dtype is DType.F32 else 0
    fits = f"max_seq_len up to {most} fits" if most else "not even one row fits now"
    return f"use a smaller context ({fits}{f', up to {half} with dtype={DType.F16.value!r}' if half else ''})"


def _lighter_weights(weights: Sequence[WeightSpec], lanes: Lanes) -> str:
    halved, saved = _at_16_bits(weights, lanes)
    return f", or load with weights='f16', which frees {saved} bytes" if halved and saved > 0 else ""


def _at_16_bits(weights: Sequence[WeightSpec], lanes: Lanes) -> tuple[int, int]:
    """Bytes of the weights with their float32 matrices held at 16 bits, and how many fewer that is."""
    lighter = [replace(one, dtype=DType.F16) if one.dtype is DType.F32 and not one.vector else one for one in weights]
    halved = weights_bytes(lighter, lanes)
    return halved, weights_bytes(weights, lanes) - halved


def _checked_plan(model: DecodeModel, options: StepOptions, geometry: KvGeometry) -> tuple[Graph, Plan]:
    graph, plan = plan_step(model, options, geometry)
    check_plan(graph, plan, model.device.info, model.lanes)
    return graph, plan


def _widest_activation(model: DecodeModel, geometry: KvGeometry) -> int:
    """Values of a token in the widest activation of a step that leaves the logits out."""
    graph, plan = plan_step(model, _options(model, CHUNK_SIZES[0], "none"), geometry)
    return max(graph.node(node).shape[1] for node in plan.slots)


def _options(model: DecodeModel, seq: int, logits: str) -> StepOptions:
    arm = "bounded" if model.default_kv_offset == "device" else "masked"
    return StepOptions(seq, logits, model.default_kv_offset, arm)


def _check_memory(device: Device, lanes: Lanes, weights: Sequence[WeightSpec], kv_cache: int, activations: int) -> None:
    held = weights_bytes(weights, lanes)
    beside = max(kv_cache + activations, min(_UPLOAD_BYTES, device.largest_buffer_bytes))
    if held + beside <= device.free_bytes:
        return
    lighter, saved = _at_16_bits(weights, lanes)
    if saved > 0 and lighter + beside <= device.free_bytes:
        advice = f"load with weights='f16' ({lighter} bytes of weights), which fits"
    else:
        advice = "use a smaller model or one stored at fewer bits"
    raise OutOfDeviceMemoryError(
        f"the model needs {held + beside} bytes, device {device.info} has {device.free_bytes} of "
        f"{device.info.heap_bytes} free: weights {held}, a KV cache of {MINIMAL_ROWS} rows {kv_cache}, activations "
        f"{activations}; {advice}"
    )


def _check_allocations(device: Device, needed: int) -> None:
    if needed > device.free_allocations:
        raise DeviceError(
            f"the model needs {needed} allocations, more than the {device.free_allocations} that "
            f"maxMemoryAllocationCount of device {device.info} leaves, which is "
            f"{device.info.limits.max_memory_allocation_count}"
        )
