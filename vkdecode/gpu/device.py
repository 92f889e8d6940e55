"""Opening a device, and allocating on it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import numpy as np

from vkdecode.errors import ClosedError, DeviceError, InvalidInputError, OutOfDeviceMemoryError
from vkdecode.gpu.kompute import load_kompute
from vkdecode.gpu.lanes import Lanes
from vkdecode.gpu.limits import check_buffer, largest_buffer, storage_bytes
from vkdecode.gpu.storage import DeviceLocation, Storage, StorageKind
from vkdecode.gpu.vulkan_info import DeviceInfo, list_devices
from vkdecode.weights.dtypes import DType

# A buffer of several parts is no larger, so that a fragmented device still has room for it.
_MAX_BYTES_TOGETHER = 1 << 30
LANES_FORMS = ("auto", "subgroup", "shared")
_open_devices: weakref.WeakSet[Device] = weakref.WeakSet()
_FORKED = (
    "this process was forked after a Vulkan device was opened, and the driver's threads stay with the parent; "
    "start it with multiprocessing's spawn method"
)


class _Driver:
    """What this process may still do with Vulkan drivers."""

    opened = False
    lost = False


def _after_fork() -> None:
    """In a child: keep Kompute's destructors from waiting for driver threads that only the parent has."""
    _Driver.lost = _Driver.opened
    for device in _open_devices:
        device._abandon()


os.register_at_fork(after_in_child=_after_fork)


class Device:
    """A Vulkan device opened by its ordinal; a context manager.

    `submission_seconds` is the time that all submissions so far took, from handing one to the driver until it was done.

    Args:
        ordinal: position in `list_devices()`.
        lanes: the kernels' form, `subgroup` or `shared`; `auto` picks by the device.

    Raises:
        DeviceError: no loader, no driver, no such ordinal, or the device does not open.

    """

    def __init__(self, ordinal: int, lanes: str = "auto") -> None:
        if _Driver.lost:
            raise DeviceError(_FORKED)
        devices = list_devices()
        if not devices:
            raise DeviceError(
                "no Vulkan device on this machine; install a driver (on Debian without a GPU: mesa-vulkan-drivers)"
            )
        if isinstance(ordinal, bool) or not isinstance(ordinal, int) or not 0 <= ordinal < len(devices):
            found = "; ".join(map(str, devices))
            raise DeviceError(f"there is no Vulkan device with ordinal {ordinal}; devices: {found}")
        self.info: DeviceInfo = devices[ordinal]
        self.location = DeviceLocation("vulkan", ordinal)
        if lanes not in LANES_FORMS:
            raise InvalidInputError(f"lanes must be one of {list(LANES_FORMS)}, not {lanes!r}")
        self.lock = threading.RLock()
        self._forked = False
        self.lanes_form = lanes
        self.lanes: Lanes | None = None  # decided by `lanes_of` on first use
        self._allocated = 0
        self._allocations = 0
        self.submission_seconds = 0.0
        self.kp = load_kompute()
        try:
            self._manager: Any = self.kp.Manager(ordinal)
            opened = self._manager.get_device_properties()["device_name"]
        except RuntimeError as error:
            raise DeviceError(f"Vulkan device {self.info} does not open: {error}") from error
        if opened != self.info.name:
            self.close()
            raise DeviceError(
                f"ordinal {ordinal} is {self.info.name!r} to the loader but {opened!r} to Kompute; restart the program"
            )
        _open_devices.add(self)
        _Driver.opened = True

    def _abandon(self) -> None:
        self._forked = True
        self.lock = threading.RLock()
        # One reference too many: the manager is never destroyed in this process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._manager))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._manager is None

    @property
    def manager(self) -> Any:
        """The Kompute manager.

        Raises:
            ClosedError: the device was closed.

        """
        if self._forked:
            raise DeviceError(_FORKED)
        if self._manager is None:
            raise ClosedError(f"device {self.info} was closed; open a new Device")
        return self._manager

    @property
    def allocated_bytes(self) -> int:
        """Bytes that live storages hold on the device, their staging buffers included."""
        return self._allocated

    @property
    def largest_buffer_bytes(self) -> int:
        """Bytes that one storage buffer may have, by every limit."""
        return largest_buffer(self.info)

    @property
    def free_allocations(self) -> int:
        """Allocations that the device still allows; a storage with a staging buffer takes two."""
        return max(self.info.limits.max_memory_allocation_count - self._allocations, 0)

    @property
    def free_bytes(self) -> int:
        """Bytes of the device's memory that this package has not taken."""
        return max(self.info.heap_bytes - self._allocated, 0)

    def allocate(
        self, nbytes: int, dtype: DType, kind: StorageKind = StorageKind.DEVICE, encoding: str = "plain"
    ) -> Storage:
        """Allocate uninitialised memory, rounded up to 16 bytes.

        Raises:
            InvalidInputError: the size is not positive.
            DeviceError: it exceeds a limit of the device for one buffer.
            OutOfDeviceMemoryError: it does not fit the device's memory.

        """
        if nbytes <= 0:
            raise InvalidInputError(f"a storage needs a positive size, not {nbytes} bytes")
        nbytes = storage_bytes(nbytes)
        check_buffer(self.info, nbytes)
        most_allocations = self.info.limits.max_memory_allocation_count
        with self.lock:
            manager = self.manager
            copies = 2 if kind is StorageKind.STAGED else 1
            if self._allocated + nbytes * copies > self.info.heap_bytes:
                raise OutOfDeviceMemoryError(
                    f"{nbytes * copies} bytes do not fit device {self.info}: "
                    f"{self._allocated} of {self.info.heap_bytes} bytes "
                    "are taken; use a smaller context or a smaller model"
                )
            if self._allocations + copies > most_allocations:
                raise OutOfDeviceMemoryError(
                    f"device {self.info} allows {most_allocations} allocations and all are taken"
                )
            element = np.float32 if dtype is DType.F32 else np.uint32
            shape_only = np.empty(nbytes // 4, element)
            try:
                tensor = manager.tensor_t(shape_only, getattr(self.kp.TensorTypes, kind.value))
            except (RuntimeError, MemoryError) as error:
                raise OutOfDeviceMemoryError(
                    f"{nbytes} bytes cannot be allocated on device {self.info}: {error}"
                ) from error
            self._allocated += nbytes * copies
            self._allocations += copies
            return Storage(tensor, self, dtype, nbytes, kind, encoding)

    def allocate_parts(
        self,
        count: int,
        nbytes: int,
        dtype: DType,
        encoding: str = "plain",
        kind: StorageKind = StorageKind.DEVICE,
    ) -> list[Storage]:
        """Allocate memory of one size several times, side by side in as few buffers as are not too large.

        Raises:
            VkDecodeError: like `allocate`; what was taken has been given back.

        """
        each = storage_bytes(nbytes)
        most = max(min(self.largest_buffer_bytes, _MAX_BYTES_TOGETHER) // max(each, 1), 1)
        parts: list[Storage] = []
        try:
            while len(parts) < count:
                together = min(count - len(parts), most)
                whole = self.allocate(each * together, dtype, kind, encoding)
                parts += [whole.part(number * each, each) for number in range(together)]
        except BaseException:
            for part in parts:
                part.whole.close()
            raise
        return parts

    def _give_back(self, kind: StorageKind, nbytes: int) -> None:
        # A storage may be collected in any thread.
        with self.lock:
            copies = 2 if kind is StorageKind.STAGED else 1
            self._allocated -= nbytes * copies
            self._allocations -= copies

    def close(self) -> None:
        """Free everything on the device; using what lived there raises `ClosedError` from then on."""
        with self.lock:
            manager, self._manager = self._manager, None
            if manager is not None and not self._forked:
                manager.destroy()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Device({self.info}{', closed' if self.closed else ''})"
