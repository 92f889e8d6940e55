"""Which shape of the kernels a device gets, by what it is and by what it was found to do right."""

from __future__ import annotations

import warnings

from vkdecode.errors import DeviceError, VkDecodeWarning
from vkdecode.gpu.device import Device
from vkdecode.gpu.lanes import Lanes, shared_lanes, subgroup_lanes
from vkdecode.gpu.self_check import run_self_check, subgroups_usable


def lanes_of(device: Device) -> Lanes:
    """How kernels spread over an open device; decided on first use, where a self-check runs. Raises as it does."""
    with device.lock:
        if device.lanes is None:
            device.lanes = choose_lanes(device, device.lanes_form)
        return device.lanes


def choose_lanes(device: Device, form: str = "auto") -> Lanes:
    """Pick the shape for a device: a CPU driver gets subgroups where they pass the check, a GPU shared memory.

    A CPU driver runs one workgroup per thread and has no shared memory of its own, so few one-subgroup workgroups are
    fastest there; a GPU hides latency with many, and Vulkan does not promise full subgroups without an extension
    Kompute cannot enable.

    Raises:
        DeviceError: the device fails the self-check in what every kernel relies on, or `form` is `subgroup` and
            subgroups fail it.

    """
    shared = shared_lanes(device.info)
    check = run_self_check(device, shared.workgroup)
    if not (check.shared and check.numbers):
        wrong = "; ".join(line for line in check.details if not line.startswith("subgroup"))
        raise DeviceError(
            f"device {device.info} fails the self-check and would give wrong answers ({wrong}); update its driver "
            "or choose another device"
        )
    if form == "subgroup" and not check.subgroup:
        size = device.info.subgroup_size
        raise DeviceError(f"device {device.info} does not run workgroups of {size} invocations as one full subgroup")
    if form == "subgroup" or (form == "auto" and device.info.kind == "cpu" and subgroups_usable(device.info)):
        if check.subgroup:
            return subgroup_lanes(device.info)
        warnings.warn(
            f"subgroups of {device.info.name} fail the self-check, using shared memory", VkDecodeWarning, stacklevel=2
        )
    return shared
