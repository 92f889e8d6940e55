"""Vulkan devices, storages, kernels and recordings; the only package that touches Kompute."""

from vkdecode.gpu.choice import best_device, find_device, open_device
from vkdecode.gpu.device import Device
from vkdecode.gpu.kernels import Binding, Kernel, KernelRegistry, registry
from vkdecode.gpu.lane_choice import choose_lanes, lanes_of
from vkdecode.gpu.lanes import ROW_TILES, Lanes, shared_lanes, subgroup_lanes
from vkdecode.gpu.limits import check_buffer, check_dispatch, largest_buffer, storage_bytes
from vkdecode.gpu.recorder import Algorithm, Barrier, Command, Download, Recording, Run, Upload, first_units
from vkdecode.gpu.self_check import SelfCheck, run_self_check
from vkdecode.gpu.storage import DeviceLocation, Storage, StorageKind
from vkdecode.gpu.transfer import Uploader, copy_algorithm, read_words
from vkdecode.gpu.vulkan_info import DeviceInfo, Limits, list_devices

__all__ = [
    "ROW_TILES",
    "Algorithm",
    "Barrier",
    "Binding",
    "Command",
    "Device",
    "DeviceInfo",
    "DeviceLocation",
    "Download",
    "Kernel",
    "KernelRegistry",
    "Lanes",
    "Limits",
    "Recording",
    "Run",
    "SelfCheck",
    "Storage",
    "StorageKind",
    "Upload",
    "Uploader",
    "best_device",
    "check_buffer",
    "check_dispatch",
    "choose_lanes",
    "copy_algorithm",
    "find_device",
    "first_units",
    "lanes_of",
    "largest_buffer",
    "list_devices",
    "open_device",
    "read_words",
    "registry",
    "run_self_check",
    "shared_lanes",
    "storage_bytes",
    "subgroup_lanes",
]
