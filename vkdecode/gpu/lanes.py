"""Which shape of the kernels a device gets: lanes of one subgroup, or a workgroup with shared memory."""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass

from vkdecode.errors import DeviceError, VkDecodeWarning
from vkdecode.gpu.device import Device
from vkdecode.gpu.self_check import run_self_check, subgroups_usable
from vkdecode.gpu.vulkan_info import DeviceInfo

ROW_TILES = 4
"""Tiles of rows that one lane works on at a time, as `shaders/weights.glsl` has it."""


@dataclass(frozen=True)
class Lanes:
    """How kernels spread over a device.

    Attributes:
        form: `subgroup` (a workgroup is one full subgroup) or `shared` (nothing is assumed about subgroups).
        tile: rows of a weight that lie side by side, and lanes along rows.
        workgroup: most invocations of a linear kernel's workgroup for one token; `workgroup / tile` lanes share a row's
            columns.
        prompt_workgroup: the same for several tokens, which bring work enough and need more shared memory.
        row_tiles: `ROW_TILES`.
        token_tile: tokens of a prompt that a linear kernel takes at a time.
        wanted_workgroups: about how many workgroups a dispatch should have; 0 for as many as there is work.

    """

    form: str
    tile: int
    workgroup: int
    prompt_workgroup: int
    row_tiles: int
    token_tile: int
    wanted_workgroups: int

    @property
    def block_rows(self) -> int:
        """Rows that one workgroup computes at a time; weights are padded to a multiple of it."""
        return self.tile * self.row_tiles


_lanes: weakref.WeakKeyDictionary[Device, Lanes] = weakref.WeakKeyDictionary()


def lanes_of(device: Device) -> Lanes:
    """How kernels spread over an open device; decided on first use, where a self-check runs. Raises as it does."""
    with device.lock:
        if device not in _lanes:
            _lanes[device] = choose_lanes(device, device.lanes_form)
        return _lanes[device]


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


def subgroup_lanes(info: DeviceInfo) -> Lanes:
    """The shape of kernels whose workgroup is one subgroup."""
    size = info.subgroup_size
    return Lanes("subgroup", size, size, size, ROW_TILES, 16, 4 * (os.cpu_count() or 1))


def shared_lanes(info: DeviceInfo) -> Lanes:
    """The shape of kernels that assume nothing about subgroups, within the device's limits."""
    invocations = min(info.limits.max_compute_work_group_invocations, info.limits.max_compute_work_group_size[0], 256)
    invocations = 1 << (invocations.bit_length() - 1)
    # Eight lanes, 16 bytes each, read 128 bytes in a row: a whole memory transaction of any GPU.
    tile = min(8, invocations)
    wanted = 4 * (os.cpu_count() or 1) if info.kind == "cpu" else 0
    return Lanes("shared", tile, invocations, min(invocations, 64), ROW_TILES, 8, wanted)
