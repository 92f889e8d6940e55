"""From kernels and storages to a Kompute sequence that can be submitted again and again.

Nothing is ordered unless a command says so: two dispatches with no barrier between them may run at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vkdecode.errors import ClosedError, DeviceError, DeviceLostError, ShaderError
from vkdecode.gpu.device import Device
from vkdecode.gpu.kernels import Kernel
from vkdecode.gpu.limits import UNIT_BYTES, check_dispatch
from vkdecode.gpu.storage import Storage, StorageKind

# VkAccessFlagBits and VkPipelineStageFlagBits, by their numbers in the specification.
_SHADER_READ, _SHADER_WRITE, _TRANSFER_WRITE, _HOST_READ = 0x20, 0x40, 0x1000, 0x2000
_COMPUTE, _TRANSFER, _HOST = 0x800, 0x1000, 0x4000

# A NaN that no arithmetic gives: quiet NaNs from a shader carry no such payload.
_UNWRITTEN = 0x7FEDDEAD


@dataclass(frozen=True)
class Upload:
    """Copy the staging buffers of these storages to the device, before all dispatches behind it."""

    storages: tuple[Storage, ...]


@dataclass(frozen=True)
class Barrier:
    """Let all dispatches before it end before those behind it begin, which then see what was written to these."""

    storages: tuple[Storage, ...]


@dataclass(frozen=True)
class Run:
    """Dispatch an algorithm with these push constants."""

    algorithm: Algorithm
    push: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Download:
    """Copy these storages to their staging buffers, behind all dispatches before it."""

    storages: tuple[Storage, ...]


Command = Upload | Barrier | Run | Download


class Algorithm:
    """A kernel with its storages, constants and work-group count, ready to be recorded.

    Args:
        device: where it runs.
        kernel: what runs.
        storages: one for each binding, in order.
        spec: specialization constants by name; `WORKGROUP` is the number of invocations.
        workgroups: dispatch size.

    Raises:
        DeviceError: a limit of the device would be exceeded.
        ShaderError: the storages do not match the kernel.
        ClosedError: a storage or the device was closed.

    """

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        storages: Sequence[Storage],
        spec: Mapping[str, int],
        workgroups: tuple[int, int, int],
    ) -> None:
        _check_storages(device, kernel, storages)
        check_dispatch(device.info, kernel, spec, workgroups, [storage.whole.nbytes for storage in storages])
        self.kernel = kernel
        self.storages = tuple(storage.whole for storage in storages)
        self._first = first_units(kernel, storages)
        kp = device.kp
        self._push_size = len(kernel.push)
        try:
            self.handle: Any = device.manager.algorithm(
                [storage.tensor for storage in storages],
                kernel.code,
                list(workgroups),
                kernel.spec_values(spec),
                np.zeros(self._push_size, np.uint32),
            )
        except RuntimeError as error:
            raise DeviceError(f"device {device.info} refuses kernel '{kernel.key}': {error}") from error
        self._kp = kp

    def operation(self, push: Mapping[str, int]) -> Any:
        """The Kompute operation that dispatches this algorithm with these push constants.

        Where its storages begin may be left out.
        """
        values = self.kernel.push_values({**self._first, **push})
        if not self._push_size:
            return self._kp.OpAlgoDispatch(self.handle)
        return self._kp.OpAlgoDispatch(self.handle, values)


def first_units(kernel: Kernel, storages: Sequence[Storage]) -> dict[str, int]:
    """The push constants that say where bound parts begin: `<binding>_first`, in units of 16 bytes.

    Raises:
        ShaderError: a part is bound to a kernel that would read from the start of its buffer.

    """
    first = {}
    for binding, storage in zip(kernel.bindings, storages, strict=False):
        name = f"{binding.name}_first"
        if name in kernel.push:
            first[name] = storage.first_byte // UNIT_BYTES
        elif storage.first_byte:
            raise ShaderError(f"kernel '{kernel.key}' cannot bind a part of a buffer as '{binding.name}': {storage!r}")
    return first


def _check_storages(device: Device, kernel: Kernel, storages: Sequence[Storage]) -> None:
    for binding, storage in zip(kernel.bindings, storages, strict=False):
        if storage.closed:
            raise ClosedError(f"kernel '{kernel.key}': the storage for '{binding.name}' was closed")
        if storage.device is not None and storage.device is not device:
            raise DeviceError(f"kernel '{kernel.key}': '{binding.name}' lives on {storage.device!r}, not on {device!r}")


class Recording:
    """A held Kompute sequence: recorded once, submitted any number of times.

    It is never recorded again (a command buffer that has run may not be), other commands take a new recording.
    """

    def __init__(self, device: Device, commands: Sequence[Command]) -> None:
        self._device = device
        self._commands = tuple(commands)
        copied = [command for command in self._commands if isinstance(command, Upload | Download)]
        self._staged = tuple({id(one): one for command in copied for one in command.storages}.values())
        self.downloads = tuple(one for command in copied if isinstance(command, Download) for one in command.storages)
        """The storages whose staging buffers it brings up to date."""
        uploads = [one.whole for command in copied if isinstance(command, Upload) for one in command.storages]
        # A mark must not be uploaded: the staging buffer of what is uploaded holds what is wanted on the device.
        self._marked = tuple(one for one in self.downloads if one.whole not in uploads)
        self._checked_at = -1  # the closings after which all of them were still open
        with device.lock:
            self._sequence: Any = device.manager.sequence()
            for command in self._commands:
                for operation in self._operations(command):
                    self._sequence.record(operation)

    def _operations(self, command: Command) -> list[Any]:
        kp = self._device.kp
        if isinstance(command, Run):
            return [command.algorithm.operation(command.push)]
        tensors = list({id(one.tensor): one.tensor for one in command.storages}.values())
        both = _SHADER_READ | _SHADER_WRITE
        if isinstance(command, Barrier):
            return [kp.OpMemoryBarrier(tensors, _SHADER_WRITE, both, _COMPUTE, _COMPUTE)]
        for storage in command.storages:
            if storage.kind is not StorageKind.STAGED:
                raise ShaderError(f"{storage!r} has no staging buffer, so it can be neither uploaded nor downloaded")
        if isinstance(command, Upload):
            barrier = kp.OpMemoryBarrier(tensors, _TRANSFER_WRITE, both, _TRANSFER, _COMPUTE)
            return [kp.OpTensorSyncDevice(tensors), barrier]
        # Kompute orders the copy behind the dispatches, but not what the host reads behind the copy.
        barrier = kp.OpMemoryBarrier(tensors, _TRANSFER_WRITE, _HOST_READ, _TRANSFER, _HOST, False)
        return [kp.OpTensorSyncLocal(tensors), barrier]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The keys of the kernels that it runs, in order."""
        return tuple(command.algorithm.kernel.key for command in self._commands if isinstance(command, Run))

    def submit(self) -> None:
        """Run it and wait until it is done.

        Kompute does not report a lost device. So the staging buffers of what it downloads are marked before, and must
        have been written over afterwards.

        Raises:
            ClosedError: the device or a storage was closed since.
            DeviceError: the driver reports an error; the device is lost.
            DeviceLostError: it reported none, but what was recorded did not run to its end.

        """
        with self._device.lock:
            _ = self._device.manager
            closings = Storage.closings
            if closings != self._checked_at:  # hundreds of storages, so not for each token
                for storage in self._staged:
                    _ = storage.tensor
                self._checked_at = closings
            marks = [storage.words for storage in self._marked]
            for words in marks:
                words[0] = _UNWRITTEN
            started = time.perf_counter()
            try:
                self._sequence.eval()
            except RuntimeError as error:
                raise DeviceError(
                    f"device {self._device.info} failed during a submission: {error}; open it anew"
                ) from error
            finally:
                self._device.submission_seconds += time.perf_counter() - started
            if any(words[0] == _UNWRITTEN for words in marks):
                kernels = self.kernels
                raise DeviceLostError(
                    f"device {self._device.info} did not finish a submission of {len(kernels)} dispatches, the last of "
                    f"them '{kernels[-1] if kernels else 'none'}'; close the device and open a new one"
                )
