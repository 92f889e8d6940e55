"""From kernels and storages to a Kompute sequence that can be submitted again and again.

A recording is a list of steps whose order the caller has planned: Kompute itself puts no barrier between two
dispatches. `Sync` is what orders them: it makes the writes of its storages available and copies them to their
host-visible twins, and
the transfer to shader barrier that Kompute records before each dispatch completes the chain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vkdecode.errors import ClosedError, DeviceError, ShaderError
from vkdecode.gpu.device import Device
from vkdecode.gpu.kernels import Kernel
from vkdecode.gpu.limits import UNIT_BYTES, check_dispatch
from vkdecode.gpu.storage import Storage, StorageKind


@dataclass(frozen=True)
class Upload:
    """Copy the host-visible twins of these storages to the device."""

    storages: tuple[Storage, ...]


@dataclass(frozen=True)
class Sync:
    """Order earlier writes of these storages before later dispatches, and copy them to their host-visible twins."""

    storages: tuple[Storage, ...]


@dataclass(frozen=True)
class Run:
    """Dispatch an algorithm with these push constants."""

    algorithm: Algorithm
    push: Mapping[str, int] = field(default_factory=dict)


Step = Upload | Sync | Run


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

    It is never recorded again (a command buffer that has run may not be), a new set of steps takes a new recording.
    """

    def __init__(self, device: Device, steps: Sequence[Step]) -> None:
        self._device = device
        self._steps = tuple(steps)
        kp = device.kp
        copied = [step for step in self._steps if not isinstance(step, Run)]
        self._staged = tuple({id(one): one for step in copied for one in step.storages}.values())
        self.synced = tuple(one for step in copied if isinstance(step, Sync) for one in step.storages)
        """The storages whose host-visible twins it brings up to date."""
        self.watched: tuple[Storage, ...] = ()
        """Those of them that whoever submits it looks at afterwards."""
        self._checked_at = -1  # the closings after which all of them were still open
        with device.lock:
            self._sequence: Any = device.manager.sequence()
            for step in self._steps:
                if isinstance(step, Run):
                    self._sequence.record(step.algorithm.operation(step.push))
                else:
                    operation = kp.OpTensorSyncDevice if isinstance(step, Upload) else kp.OpTensorSyncLocal
                    self._sequence.record(operation([_staged(storage).tensor for storage in step.storages]))

    @property
    def kernels(self) -> tuple[str, ...]:
        """The keys of the kernels that it runs, in order."""
        return tuple(step.algorithm.kernel.key for step in self._steps if isinstance(step, Run))

    def submit(self) -> None:
        """Run it and wait until it is done.

        Raises:
            ClosedError: the device or a storage was closed since.
            DeviceError: the driver reports an error; the device is lost.

        """
        with self._device.lock:
            _ = self._device.manager
            closings = Storage.closings
            if closings != self._checked_at:  # hundreds of storages, so not for each token
                for storage in self._staged:
                    _ = storage.tensor
                self._checked_at = closings
            started = time.perf_counter()
            try:
                self._sequence.eval()
            except RuntimeError as error:
                raise DeviceError(
                    f"device {self._device.info} failed during a submission: {error}; open it anew"
                ) from error
            finally:
                self._device.submission_seconds += time.perf_counter() - started


def _staged(storage: Storage) -> Storage:
    if storage.kind is not StorageKind.STAGED:
        raise ShaderError(f"{storage!r} has no host-visible twin, so it cannot be uploaded or used to order dispatches")
    return storage
