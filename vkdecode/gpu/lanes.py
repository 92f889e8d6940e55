"""Which shape of the kernels a device gets: lanes of one subgroup, or a workgroup with shared memory."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from vkdecode.errors import DeviceError, VkDecodeWarning
from vkdecode.gpu.device import Device
from vkdecode.gpu.kernels import registry
from vkdecode.gpu.recorder import Algorithm, Recording, Run, Sync
from vkdecode.gpu.storage import StorageKind
from vkdecode.weights.dtypes import DType


@dataclass(frozen=True)
class Lanes:
    """How kernels spread over a device.

    Attributes:
        form: `subgroup` (a workgroup is one full subgroup) or `shared` (nothing is assumed about subgroups).
        tile: rows of a weight that lie side by side, and lanes along rows.
        workgroup: invocations of a linear kernel's workgroup; `workgroup / tile` lanes share a row's columns.
        row_tiles: tiles that one lane works on at a time (fixed in the shader for each form).
        wanted_workgroups: about how many workgroups a dispatch should have; 0 for as many as there is work.

    """

    form: str
    tile: int
    workgroup: int
    row_tiles: int
    wanted_workgroups: int

    @property
    def block_rows(self) -> int:
        """Rows that one workgroup computes at a time; weights are padded to a multiple of it."""
        return self.tile * self.row_tiles


def choose_lanes(device: Device, form: str = "auto") -> Lanes:
    """Pick the shape for a device: a CPU driver gets subgroups where they pass the check, a GPU shared memory.

    A CPU driver runs one workgroup per thread and has no shared memory of its own, so few one-subgroup workgroups are
    fastest there; a GPU hides latency with many, and Vulkan does not promise full subgroups without an extension
    Kompute
    cannot enable.

    Raises:
        DeviceError: `form` is `subgroup` and the device fails the check.

    """
    size = device.info.subgroup_size
    usable = device.info.subgroup_ops and 4 <= size <= 64 and size & (size - 1) == 0
    if form == "subgroup" or (form == "auto" and device.info.kind == "cpu" and usable):
        if usable and subgroup_check(device, size):
            return Lanes("subgroup", size, size, 4, 4 * (os.cpu_count() or 1))
        if form == "subgroup":
            raise DeviceError(
                f"device {device.info} does not run workgroups of {size} invocations as one full subgroup"
            )
        warnings.warn(
            f"subgroups of {device.info.name} fail the self-check, using shared memory", VkDecodeWarning, stacklevel=2
        )
    invocations = min(
        device.info.limits.max_compute_work_group_invocations, device.info.limits.max_compute_work_group_size[0], 256
    )
    tile = min(32, 1 << (invocations.bit_length() - 1))
    split = 1 << ((invocations // tile).bit_length() - 1)
    return Lanes("shared", tile, tile * split, 2, 4 * (os.cpu_count() or 1) if device.info.kind == "cpu" else 0)


def subgroup_check(device: Device, size: int) -> bool:
    """Whether a workgroup of `size` invocations is one full subgroup whose sum, maximum and shuffle are right."""
    result = device.allocate(4 * size, DType.U32, StorageKind.STAGED)
    result.data[:] = 0
    algorithm = Algorithm(device, registry().get("subgroup_check"), [result], {"WORKGROUP": size}, (1, 1, 1))
    Recording(device, [Run(algorithm), Sync((result,))]).submit()
    good = bool((result.data[:size] == 1).all())
    result.close()
    return good
