"""The two shapes of the kernels: lanes of one subgroup, or a workgroup with shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

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
