"""What a model takes of a device's memory, from plans and shapes, and what is refused because it cannot fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vkdecode.decode.held_plans import plan_step
from vkdecode.decode.kv_cache import KvGeometry
from vkdecode.decode.step import CHUNK_SIZES, prompt_steps
from vkdecode.decode.step_graph import PlannedModel, StepOptions
from vkdecode.errors import DeviceError, OutOfDeviceMemoryError
from vkdecode.gpu import Device, Lanes, lanes_of, largest_buffer, storage_bytes
from vkdecode.graph import Graph, WeightSpec
from vkdecode.runtime import Plan, check_cached_rows, check_plan, footprint, weight_constants, weights_bytes
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
        activations: of the plans that a prompt takes which fills the cache but for one row, and of the decode plan;
            with what each step binds and gives.
        staging: the staging buffers of the latter two; counted against the heap, since integrated devices have one.
        heap: the device's memory.

    """

    max_seq_len: int
    kv_dtype: str
    weights: int
    kv_cache: int
    activations: int
    staging: int
    heap: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv_cache + self.activations + self.staging

    @property
    def fits(self) -> bool:
        """Whether that is no more than the device has."""
        return self.total <= self.heap

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            (f"KV cache, {self.max_seq_len} rows of {self.kv_dtype}", self.kv_cache),
            ("activations", self.activations),
            ("staging buffers", self.staging),
            ("total", self.total),
            ("device memory", self.heap),
        )
        return "\n".join(f"{name:<36}{nbytes / (1 << 20):>10.1f} MiB" for name, nbytes in parts)


@dataclass(frozen=True)
class LoadPlan:
    """What is known of a model before anything is uploaded: its weights, and how wide a step may be.

    `steps` are the decode step and the smallest chunk of a prompt, over a cache of `MINIMAL_ROWS` rows.
    """

    weights: tuple[WeightSpec, ...]
    max_tokens: int
    max_tokens_of_all_logits: int
    steps: tuple[tuple[Graph, Plan], ...]


def plan_load(model: PlannedModel) -> LoadPlan:
    """Plan what every use of a model needs; nothing is checked, so that a device that is too small has numbers too."""
    geometry = model.kv_geometry(MINIMAL_ROWS, "f32")
    buffer = model.device.largest_buffer_bytes
    decode, chunk = (plan_step(model, _options(model, seq, "last"), geometry) for seq in (1, CHUNK_SIZES[0]))
    largest = buffer // (4 * _widest_activation(*chunk))
    steps = (decode, chunk) if largest >= CHUNK_SIZES[0] else (decode,)
    weights = tuple(dict.fromkeys(spec for one in steps for spec in weight_constants(*one)))
    return LoadPlan(weights, largest, min(largest, buffer // (4 * model.vocab_size)), steps)


def check_load(model: PlannedModel, plan: LoadPlan) -> None:
    """Hold a model's plans and their memory against the device.

    Raises:
        DeviceError: a limit of the device does not allow them; it is named with both numbers.
        OutOfDeviceMemoryError: weights, a cache of `MINIMAL_ROWS` rows and the plans do not fit its memory.

    """
    device, geometry = model.device, model.kv_geometry(MINIMAL_ROWS, "f32")
    for one in plan.steps:
        check_plan(*one, device.info, lanes_of(device))
    taken = footprint(*plan.steps)
    _check_memory(device, lanes_of(device), plan.weights, kv_bytes(geometry), taken.total)
    _check_allocations(device, len(plan.weights) + 2 * geometry.num_layers + taken.allocations)


def memory_report(model: PlannedModel, weights: Sequence[WeightSpec], max_seq_len: int, kv_dtype: str) -> MemoryReport:
    """The bytes of a model with a cache of this length and the plans of a prompt that fills it but for one row."""
    geometry = model.kv_geometry(max_seq_len, kv_dtype)
    taken = footprint(*(plan_step(model, one, geometry) for one in prompt_steps(model, max_seq_len - 1 or 1)))
    return MemoryReport(
        max_seq_len=max_seq_len,
        kv_dtype=kv_dtype,
        weights=weights_bytes(weights, lanes_of(model.device)),
        kv_cache=kv_bytes(geometry),
        activations=taken.activations,
        staging=taken.staging,
        heap=model.device.info.heap_bytes,
    )


def kv_bytes(geometry: KvGeometry) -> int:
    """Bytes of a whole cache."""
    return 2 * geometry.num_layers * storage_bytes(geometry.nbytes)


def check_kv_cache(model: PlannedModel, weights: Sequence[WeightSpec], geometry: KvGeometry) -> None:
    """Refuse a cache that the device cannot hold, before any of it is allocated.

    Raises:
        DeviceError: one layer's K or V exceeds what a storage buffer may have, or attention would not read it all.
        OutOfDeviceMemoryError: the whole does not fit the free memory.

    """
    device = model.device
    buffer = largest_buffer(device.info)
    if storage_bytes(geometry.nbytes) > buffer:
        advice = _advice(geometry.dtype, lambda dtype: replace(geometry, dtype=dtype).max_len_within(buffer))
        raise DeviceError(
            f"a layer's K of {geometry.nbytes} bytes exceeds the largest storage buffer of device {device.info}, "
            f"{buffer} bytes; {advice}"
        )
    check_cached_rows(device.info, lanes_of(device), geometry.head_dim, geometry.max_seq_len, geometry.rows)
    needed = kv_bytes(geometry)
    if needed > device.free_bytes:
        advice = _advice(geometry.dtype, lambda dtype: _max_rows(model, replace(geometry, dtype=dtype)))
        raise OutOfDeviceMemoryError(
            f"a KV cache of {geometry.max_seq_len} rows of {geometry.dtype.value} takes {needed} bytes, device "
            f"{device.info} has {device.free_bytes} of {device.info.heap_bytes} free; {advice}"
            f"{_lighter_weights(weights, lanes_of(model.device))}"
        )


def _max_rows(model: PlannedModel, geometry: KvGeometry) -> int:
    """The longest cache that fits the free memory together with the plans that a prompt as long takes."""
    best = 0
    for longest in (geometry.max_seq_len, *(size + 1 for size in CHUNK_SIZES)):
        report = memory_report(model, (), min(longest, geometry.max_seq_len), geometry.dtype.value)
        left = max(model.device.free_bytes - (report.total - report.kv_cache), 0)
        each = min(left // (2 * geometry.num_layers), model.device.largest_buffer_bytes) // 16 * 16
        best = max(best, min(geometry.max_len_within(each), report.max_seq_len))
    return best


def _advice(dtype: DType, max_rows: Callable[[DType], int]) -> str:
    most, half = max_rows(dtype), max_rows(DType.F16) if dtype is DType.F32 else 0
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


def _widest_activation(graph: Graph, plan: Plan) -> int:
    """Values of a token in the widest activation of a chunk of a prompt; the logits of its last token do not count."""
    shapes = [graph.node(node).shape for node in plan.spans]
    return max(features for tokens, features in shapes if tokens > 1)


def _options(model: PlannedModel, seq: int, logits: str) -> StepOptions:
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
