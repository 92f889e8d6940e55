"""What is refused before Vulkan or Kompute would take it silently."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vkdecode.errors import ClosedError, DeviceError, InvalidInputError, OutOfDeviceMemoryError, ShaderError
from vkdecode.gpu import (
    Algorithm,
    Device,
    Download,
    Recording,
    Run,
    Storage,
    StorageKind,
    Upload,
    list_devices,
    registry,
)
from vkdecode.weights.dtypes import DType


@pytest.fixture
def fresh() -> Iterator[Device]:
    """A device that nothing was allocated on."""
    best = min(list_devices(), key=lambda info: (info.kind != "cpu", info.ordinal))
    with Device(best.ordinal) as opened:
        yield opened


@pytest.fixture
def device(device: Device) -> Iterator[Device]:
    """The shared device; a test may replace what is known of it."""
    info = device.info
    yield device
    device.info = info


def limit(device: Device, **limits: Any) -> None:
    device.info = dataclasses.replace(device.info, limits=dataclasses.replace(device.info.limits, **limits))


def staged(device: Device, words: int = 16) -> Storage:
    return device.allocate(4 * words, DType.U32, StorageKind.STAGED)


def copy(device: Device, *storages: Storage, groups: tuple[int, int, int] = (1, 1, 1)) -> Algorithm:
    return Algorithm(device, registry().get("copy_words"), storages, {"WORKGROUP": 64}, groups)


PUSH = {"source_start": 0, "target_start": 0, "count": 16}


def test_a_good_dispatch_runs_as_often_as_wanted(device: Device) -> None:
    source, target = staged(device), staged(device)
    recording = Recording(device, [Upload((source,)), Run(copy(device, source, target), PUSH), Download((target,))])
    for number in range(3):
        source.write(np.arange(16, dtype=np.uint32) + number)
        recording.submit()
        np.testing.assert_array_equal(target.data.view(np.uint32), np.arange(16) + number)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_storage_buffer_range_bytes": 32}, "maxStorageBufferRange"),
        ({"max_storage_buffers_per_stage": 1}, "maxPerStageDescriptorStorageBuffers"),
        ({"max_push_constants_bytes": 8}, "maxPushConstantsSize"),
        ({"max_compute_work_group_invocations": 63}, "maxComputeWorkGroupInvocations"),
        ({"max_compute_work_group_size": (63, 1, 1)}, r"maxComputeWorkGroupSize\[0\]"),
        ({"max_compute_work_group_count": (2, 4, 4)}, r"maxComputeWorkGroupCount\[0\]"),
        ({"max_compute_work_group_count": (4, 2, 4)}, r"maxComputeWorkGroupCount\[1\]"),
        ({"max_compute_work_group_count": (4, 4, 2)}, r"maxComputeWorkGroupCount\[2\]"),
    ],
)
def test_each_limit_is_kept(device: Device, limits: dict[str, Any], name: str) -> None:
    source, target = staged(device), staged(device)
    copy(device, source, target, groups=(3, 3, 3))
    limit(device, **limits)
    with pytest.raises(DeviceError, match=f"exceeds {name} of device 0"):
        copy(device, source, target, groups=(3, 3, 3))


def test_shared_memory_is_kept_to(device: Device) -> None:
    """16 logits and 16 ranks of 4 bytes each."""
    kernel, storages = registry().get("route"), [staged(device) for _ in range(3)]
    spec = {"WORKGROUP": 8, "EXPERTS": 16, "USED": 2, "NORMALIZED": 0}
    limit(device, max_compute_shared_memory_bytes=128)
    Algorithm(device, kernel, storages, spec, (1, 1, 1))
    limit(device, max_compute_shared_memory_bytes=127)
    with pytest.raises(DeviceError, match="128 exceeds maxComputeSharedMemorySize of device 0"):
        Algorithm(device, kernel, storages, spec, (1, 1, 1))


def test_a_limit_may_be_reached(device: Device) -> None:
    source, target = staged(device), staged(device)
    limit(
        device,
        max_storage_buffer_range_bytes=64,
        max_storage_buffers_per_stage=2,
        max_push_constants_bytes=12,
        max_compute_work_group_invocations=64,
        max_compute_work_group_size=(64, 1, 1),
        max_compute_work_group_count=(3, 3, 3),
    )
    copy(device, source, target, groups=(3, 3, 3))


@pytest.mark.parametrize("groups", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_an_empty_dispatch_is_refused(device: Device, groups: tuple[int, int, int]) -> None:
    with pytest.raises(ShaderError, match="work groups on axis"):
        copy(device, staged(device), staged(device), groups=groups)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_storages_is_refused(device: Device, count: int) -> None:
    with pytest.raises(ShaderError, match=f"binds 2 storages, {count} were given"):
        copy(device, *(staged(device) for _ in range(count)))


def test_a_closed_storage_is_refused_and_named(device: Device) -> None:
    source, target = staged(device), staged(device)
    target.close()
    with pytest.raises(ClosedError, match="'target' was closed"):
        copy(device, source, target)


def test_a_storage_of_another_device_is_refused(device: Device) -> None:
    """Even of the same ordinal: each opened device has handles of its own."""
    with Device(device.info.ordinal) as other:
        assert other.location == device.location
        with pytest.raises(DeviceError, match="'target' lives on"):
            copy(device, staged(device), staged(other))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"WORKGROUP": 64, "COLUMNS": 4}, "X_OFFSET"),
        ({"WORKGROUP": 64, "COLUMNS": 4, "X_OFFSET": 0, "X_STRIDE": 4, "ROWS": 1}, "ROWS"),
        ({"WORKGROUP": 64, "COLUMNS": -1, "X_OFFSET": 0, "X_STRIDE": 4}, "COLUMNS = -1"),
        ({"WORKGROUP": 64, "COLUMNS": 1 << 32, "X_OFFSET": 0, "X_STRIDE": 4}, "COLUMNS = 4294967296"),
    ],
)
def test_wrong_specialization_constants_are_refused(device: Device, spec: dict[str, int], words: str) -> None:
    with pytest.raises(ShaderError, match=f"kernel 'contiguize'.*{words}"):
        Algorithm(device, registry().get("contiguize"), [staged(device), staged(device)], spec, (1, 1, 1))


def test_a_missing_workgroup_size_is_refused(device: Device) -> None:
    with pytest.raises(ShaderError, match="WORKGROUP"):
        Algorithm(device, registry().get("copy_words"), [staged(device), staged(device)], {}, (1, 1, 1))


@pytest.mark.parametrize(
    "push", [{}, {**PUSH, "offset": 1}, {"source_start": 0, "target_start": 0}, {**PUSH, "count": -1}]
)
def test_wrong_push_constants_are_refused(device: Device, push: dict[str, int]) -> None:
    algorithm = copy(device, staged(device), staged(device))
    with pytest.raises(ShaderError, match="kernel 'copy_words'"):
        Recording(device, [Run(algorithm, push)])


def test_push_constants_for_a_kernel_without_them_are_refused(device: Device) -> None:
    algorithm = Algorithm(device, registry().get("subgroup_check"), [staged(device)], {"WORKGROUP": 64}, (1, 1, 1))
    with pytest.raises(ShaderError, match="kernel 'subgroup_check'"):
        Recording(device, [Run(algorithm, {"count": 1})])


@pytest.mark.parametrize("kind", [StorageKind.DEVICE, StorageKind.HOST])
def test_only_staged_storage_is_uploaded_or_downloaded(device: Device, kind: StorageKind) -> None:
    storage = device.allocate(64, DType.U32, kind)
    for step in (Upload((storage,)), Download((storage,))):
        with pytest.raises(ShaderError, match="no staging buffer"):
            Recording(device, [step])


def test_a_recording_is_not_submitted_after_its_device_or_storage_was_closed(fresh: Device) -> None:
    source, target = staged(fresh), staged(fresh)
    recording = Recording(fresh, [Upload((source,)), Run(copy(fresh, source, target), PUSH), Download((target,))])
    recording.submit()
    source.close()
    with pytest.raises(ClosedError, match="closed"):
        recording.submit()
    fresh.close()
    with pytest.raises(ClosedError, match="closed"):
        recording.submit()
    with pytest.raises(ClosedError, match="closed"):
        Recording(fresh, [])


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_storage_buffer_range_bytes": 1024}, "maxStorageBufferRange"),
        ({"max_memory_allocation_bytes": 1024}, "maxMemoryAllocationSize"),
        (
            {"max_storage_buffer_range_bytes": 1 << 40, "max_memory_allocation_bytes": 1 << 40},
            "Kompute's buffer size",
        ),
    ],
)
def test_a_buffer_beyond_a_limit_is_refused(fresh: Device, limits: dict[str, Any], name: str) -> None:
    limit(fresh, **limits)
    size = 1040 if 1024 in limits.values() else 1 << 32
    with pytest.raises(DeviceError, match=f"{size} bytes exceeds {name}"):
        fresh.allocate(size, DType.F32)
    assert fresh.allocated_bytes == 0


def test_memory_that_is_not_there_is_refused_with_both_numbers(fresh: Device) -> None:
    fresh.info = dataclasses.replace(fresh.info, heap_bytes=4096)
    held = fresh.allocate(2048, DType.F32)
    with pytest.raises(OutOfDeviceMemoryError, match=r"2080 bytes do not fit .* 2048 of 4096 bytes are taken"):
        fresh.allocate(1040, DType.F32, StorageKind.STAGED)
    # Device memory alone takes its size once.
    fresh.allocate(2048, DType.F32, StorageKind.DEVICE)
    assert not held.closed


def test_the_number_of_allocations_is_kept(fresh: Device) -> None:
    limit(fresh, max_memory_allocation_count=3)
    storages = [fresh.allocate(16, DType.F32, StorageKind.STAGED), fresh.allocate(16, DType.F32)]
    with pytest.raises(OutOfDeviceMemoryError, match="allows 3 allocations"):
        fresh.allocate(16, DType.F32)
    storages.pop().close()
    fresh.allocate(16, DType.F32)


@pytest.mark.parametrize("size", [0, -4])
def test_a_size_that_is_not_positive_is_refused(device: Device, size: int) -> None:
    with pytest.raises(InvalidInputError, match=f"not {size} bytes"):
        device.allocate(size, DType.F32)
