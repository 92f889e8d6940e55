"""What the Vulkan loader says about the physical devices of this machine.

Read through the `vulkan` package, because Kompute reports a name and work-group limits only. Nothing is allocated here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vkdecode.errors import DeviceError

_KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
_VENDORS = {
    0x1002: "AMD",
    0x106B: "Apple",
    0x10DE: "NVIDIA",
    0x13B5: "Arm",
    0x14E4: "Broadcom",
    0x1010: "Imagination",
    0x5143: "Qualcomm",
    0x8086: "Intel",
    0x10005: "Mesa",
}
_API_1_1 = (1 << 22) | (1 << 12)
_STAGE_COMPUTE = 0x20
_SUBGROUP_BASIC, _SUBGROUP_ARITHMETIC, _SUBGROUP_SHUFFLE = 0x1, 0x4, 0x10
_HEAP_DEVICE_LOCAL = 0x1


@dataclass(frozen=True)
class Limits:
    """The Vulkan limits that plans are checked against; bytes where a name says so, otherwise counts."""

    max_storage_buffer_range_bytes: int
    max_memory_allocation_bytes: int
    max_memory_allocation_count: int
    max_compute_work_group_count: tuple[int, int, int]
    max_compute_work_group_size: tuple[int, int, int]
    max_compute_work_group_invocations: int
    max_compute_shared_memory_bytes: int
    max_push_constants_bytes: int
    max_storage_buffers_per_stage: int


@dataclass(frozen=True)
class DeviceInfo:
    """One physical device. Only the ordinal tells two equal devices apart: name and UUID can be the same.

    `timestamp_nanoseconds` is the length of one tick of its timestamps; 0 where its compute queues have none.
    """

    ordinal: int
    name: str
    vendor: str
    kind: str
    driver: str
    api_version: str
    heap_bytes: int
    heaps: tuple[tuple[int, bool], ...]
    subgroup_size: int
    subgroup_ops: bool
    limits: Limits
    timestamp_nanoseconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.ordinal}: {self.name} ({self.vendor}, {self.kind})"


def list_devices() -> list[DeviceInfo]:
    """All Vulkan devices in ordinal order.

    Returns an empty list where the loader finds no driver.

    Raises:
        DeviceError: the Vulkan loader is missing or does not answer.

    """
    vulkan = _vulkan()
    application = vulkan.VkApplicationInfo(pApplicationName="vkdecode", apiVersion=_API_1_1)
    try:
        instance = vulkan.vkCreateInstance(vulkan.VkInstanceCreateInfo(pApplicationInfo=application), None)
    except (vulkan.VkError, vulkan.VkException) as error:
        raise _no_driver(error) from error
    try:
        handles = vulkan.vkEnumeratePhysicalDevices(instance)
        return [_describe(vulkan, ordinal, handle) for ordinal, handle in enumerate(handles)]
    except (vulkan.VkError, vulkan.VkException) as error:
        raise _no_driver(error) from error
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _no_driver(error: Exception) -> DeviceError:
    return DeviceError(
        f"the Vulkan loader found no working driver ({type(error).__name__}); install one (on Debian without a GPU: "
        "mesa-vulkan-drivers) and check VK_DRIVER_FILES and VK_ICD_FILENAMES"
    )


def _vulkan() -> Any:
    try:
        import vulkan
    except OSError as error:
        raise DeviceError(
            "no Vulkan loader (libvulkan.so.1) on this machine; install it (on Debian: libvulkan1)"
        ) from error
    except ImportError as error:
        raise DeviceError(
            "the Python package 'vulkan' is not installed; run `make setup` or `pip install vulkan`"
        ) from error
    return vulkan


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).split(b"\0", 1)[0].decode("utf-8", "replace")


def _describe(vulkan: Any, ordinal: int, handle: Any) -> DeviceInfo:
    ffi = vulkan.ffi
    subgroup = ffi.new(
        "VkPhysicalDeviceSubgroupProperties*", {"sType": vulkan.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES}
    )
    maintenance = ffi.new(
        "VkPhysicalDeviceMaintenance3Properties*",
        {"sType": vulkan.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES, "pNext": subgroup},
    )
    driver = ffi.new(
        "VkPhysicalDeviceDriverProperties*",
        {"sType": vulkan.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES, "pNext": maintenance},
    )
    both = ffi.new(
        "VkPhysicalDeviceProperties2*",
        {"sType": vulkan.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, "pNext": driver},
    )
    basic = vulkan.vkGetPhysicalDeviceProperties(handle)
    if basic.apiVersion >= _API_1_1:
        vulkan.vkGetPhysicalDeviceProperties2(handle, both)
    memory = vulkan.vkGetPhysicalDeviceMemoryProperties(handle)
    heaps = tuple(
        (int(memory.memoryHeaps[i].size), bool(memory.memoryHeaps[i].flags & _HEAP_DEVICE_LOCAL))
        for i in range(memory.memoryHeapCount)
    )
    kind = _KINDS.get(basic.deviceType, "other")
    raw = basic.limits
    needed_ops = _SUBGROUP_BASIC | _SUBGROUP_ARITHMETIC | _SUBGROUP_SHUFFLE
    driver_text = " ".join(
        part for part in (_text(ffi.string(driver.driverName)), _text(ffi.string(driver.driverInfo))) if part
    )
    return DeviceInfo(
        ordinal=ordinal,
        name=_text(basic.deviceName),
        vendor=_VENDORS.get(basic.vendorID, f"vendor {basic.vendorID:#06x}"),
        kind=kind,
        driver=driver_text or f"driver version {basic.driverVersion}",
        api_version=f"{basic.apiVersion >> 22}.{basic.apiVersion >> 12 & 0x3FF}.{basic.apiVersion & 0xFFF}",
        heap_bytes=_usable_heap(kind, heaps),
        heaps=heaps,
        subgroup_size=int(subgroup.subgroupSize),
        subgroup_ops=bool(
            subgroup.supportedStages & _STAGE_COMPUTE and subgroup.supportedOperations & needed_ops == needed_ops
        ),
        limits=Limits(
            max_storage_buffer_range_bytes=int(raw.maxStorageBufferRange),
            # Absent before Vulkan 1.1; 2^30 is the least that the specification allows.
            max_memory_allocation_bytes=int(maintenance.maxMemoryAllocationSize) or 1 << 30,
            max_memory_allocation_count=int(raw.maxMemoryAllocationCount),
            max_compute_work_group_count=_three(raw.maxComputeWorkGroupCount),
            max_compute_work_group_size=_three(raw.maxComputeWorkGroupSize),
            max_compute_work_group_invocations=int(raw.maxComputeWorkGroupInvocations),
            max_compute_shared_memory_bytes=int(raw.maxComputeSharedMemorySize),
            max_push_constants_bytes=int(raw.maxPushConstantsSize),
            max_storage_buffers_per_stage=int(raw.maxPerStageDescriptorStorageBuffers),
        ),
        timestamp_nanoseconds=float(raw.timestampPeriod) if raw.timestampComputeAndGraphics else 0.0,
    )


def _three(values: Any) -> tuple[int, int, int]:
    return int(values[0]), int(values[1]), int(values[2])


def _usable_heap(kind: str, heaps: tuple[tuple[int, bool], ...]) -> int:
    """Bytes of the largest device-local heap; a CPU driver's memory is the machine's, whatever heap size it reports."""
    if kind == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max((size for size, local in heaps if local), default=max((size for size, _ in heaps), default=0))
