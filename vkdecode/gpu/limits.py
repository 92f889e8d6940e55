"""The device's limits, in one list of checks: a buffer, and a dispatch, from plain numbers alone.

Used before anything is allocated, on plans, and again where a storage or an algorithm is really made. Vulkan and
Kompute take what breaks a limit silently and get it wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vkdecode.errors import DeviceError, ShaderError
from vkdecode.gpu.kernels import Kernel
from vkdecode.gpu.vulkan_info import DeviceInfo

UNIT_BYTES = 16
"""Sizes of storages, and where a part of one begins, are multiples of this: a `vec4`."""

_KOMPUTE_BUFFER_BYTES = (1 << 32) - 1


def storage_bytes(nbytes: int) -> int:
    """Bytes that a storage of this size really has: a multiple of 16."""
    return -(-nbytes // UNIT_BYTES) * UNIT_BYTES


def buffer_limits(info: DeviceInfo) -> dict[str, int]:
    """What bounds the bytes of one storage buffer, by name."""
    return {
        "maxStorageBufferRange": info.limits.max_storage_buffer_range_bytes,
        "maxMemoryAllocationSize": info.limits.max_memory_allocation_bytes,
        "Kompute's buffer size": _KOMPUTE_BUFFER_BYTES,
    }


def largest_buffer(info: DeviceInfo) -> int:
    """Bytes that one storage buffer may have, by every limit."""
    return min(buffer_limits(info).values()) // UNIT_BYTES * UNIT_BYTES


def check_buffer(info: DeviceInfo, nbytes: int, what: str = "a buffer", instead: str = "") -> None:
    """Refuse a storage buffer that a limit forbids.

    Raises:
        DeviceError: which limit, both numbers, and what to do `instead` where that is known.

    """
    for name, limit in buffer_limits(info).items():
        if storage_bytes(nbytes) > limit:
            advice = f"; {instead}" if instead else ""
            raise DeviceError(f"{what} of {nbytes} bytes exceeds {name} of device {info}, {limit} bytes{advice}")


def check_dispatch(
    info: DeviceInfo,
    kernel: Kernel,
    spec: Mapping[str, int],
    workgroups: tuple[int, int, int],
    binding_bytes: Sequence[int],
) -> None:
    """Refuse a dispatch that a limit forbids.

    Args:
        info: the device, or a made-up one.
        kernel: what would run.
        spec: its specialization constants by name.
        workgroups: dispatch size.
        binding_bytes: bytes of the storage for each binding, in order.

    Raises:
        DeviceError: which limit, and both numbers.
        ShaderError: the dispatch does not match the kernel, or is empty.

    """
    limits = info.limits
    shared = kernel.shared_bytes(spec)  # refuses constants that are not the kernel's
    if len(binding_bytes) != len(kernel.bindings):
        raise ShaderError(
            f"kernel '{kernel.key}' binds {len(kernel.bindings)} storages, {len(binding_bytes)} were given"
        )
    wanted = [
        *(("maxStorageBufferRange", nbytes, limits.max_storage_buffer_range_bytes) for nbytes in binding_bytes),
        ("maxPerStageDescriptorStorageBuffers", len(binding_bytes), limits.max_storage_buffers_per_stage),
        ("maxPushConstantsSize", 4 * len(kernel.push), limits.max_push_constants_bytes),
        ("maxComputeWorkGroupInvocations", spec["WORKGROUP"], limits.max_compute_work_group_invocations),
        ("maxComputeWorkGroupSize[0]", spec["WORKGROUP"], limits.max_compute_work_group_size[0]),
        ("maxComputeSharedMemorySize", shared, limits.max_compute_shared_memory_bytes),
        *(
            (f"maxComputeWorkGroupCount[{axis}]", count, limits.max_compute_work_group_count[axis])
            for axis, count in enumerate(workgroups)
        ),
    ]
    for name, value, limit in wanted:
        if value > limit:
            raise DeviceError(f"kernel '{kernel.key}': {value} exceeds {name} of device {info}, which is {limit}")
    for axis, count in enumerate(workgroups):
        if count < 1:
            raise ShaderError(f"kernel '{kernel.key}': {count} work groups on axis {axis}")
