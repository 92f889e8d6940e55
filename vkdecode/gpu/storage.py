"""Device memory: what a storage holds, how large it is, and where it is known to live."""

from __future__ import annotations

import enum
import threading
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu.limits import UNIT_BYTES, storage_bytes
from vkdecode.weights.dtypes import DType


@dataclass(frozen=True)
class DeviceLocation:
    """Where a storage lives. Known only for what this package allocated on a device that it opened by ordinal."""

    backend: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.backend}:{self.ordinal}"


class StorageKind(enum.Enum):
    """How the memory can be reached.

    DEVICE is device memory alone: the cheapest, for weights and KV caches; filled and read by copy kernels.
    STAGED is device memory with a host-visible staging buffer of the same size: for the data of a step and its results.
    HOST is mapped memory that shaders read directly: the source of an upload.
    """

    DEVICE = "storage"
    STAGED = "device"
    HOST = "host"


class StorageOwner(Protocol):
    """What a storage asks of the opened device that it was allocated on."""

    @property
    def location(self) -> DeviceLocation:
        """Which device it is."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it was closed, and with it all that lives there."""
        ...

    def _give_back(self, kind: StorageKind, nbytes: int) -> None: ...


_closing = threading.Lock()


class Storage:
    """One allocation on a device.

    Attributes:
        dtype: element type as the shaders read it.
        encoding: how the elements are arranged, e.g. `plain` or `tiles8`.
        nbytes: byte extent of the device buffer.
        location: where it lives, or None for a tensor that was handed in from outside.
        bundled: whether it shares its allocation with other storages.
        first_byte: where it begins in `whole`.

    """

    closings: ClassVar[int] = 0
    """How often any storage was closed; where it has not risen, what was open still is, unless its device closed."""

    def __init__(
        self,
        tensor: Any,
        device: StorageOwner | None,
        dtype: DType,
        nbytes: int,
        kind: StorageKind,
        encoding: str = "plain",
        bundled: bool = False,
    ) -> None:
        self._tensor = tensor
        self._device = device
        self._whole: Storage | None = None  # not itself: a cycle would keep memory until a collection
        self.first_byte = 0
        self.dtype = dtype
        self.nbytes = nbytes
        self.kind = kind
        self.encoding = encoding
        self.bundled = bundled
        self._data: NDArray[Any] | None = None
        self._words: memoryview | None = None
        self._release = weakref.finalize(self, device._give_back, kind, nbytes) if device is not None else None

    @classmethod
    def from_tensor(cls, tensor: Any, dtype: DType, encoding: str = "plain") -> Storage:
        """Wrap a Kompute tensor made elsewhere; its location is unknown, for a tensor does not name its device."""
        kind = {"TensorTypes.device": StorageKind.STAGED, "TensorTypes.host": StorageKind.HOST}
        return cls(
            tensor, None, dtype, tensor.size() * 4, kind.get(str(tensor.tensor_type()), StorageKind.DEVICE), encoding
        )

    @property
    def whole(self) -> Storage:
        """The storage that it is a part of, or itself."""
        return self if self._whole is None else self._whole

    def part(self, first_byte: int, nbytes: int) -> Storage:
        """A part of this storage, which stays allocated as long as a part of it is in use.

        Args:
            first_byte: where the part begins, a multiple of 16.
            nbytes: its size, rounded up to 16 bytes.

        Raises:
            InvalidInputError: the part does not lie in whole units inside of this storage, or this is itself a part.

        """
        nbytes = storage_bytes(nbytes)
        if self._whole is not None:
            raise InvalidInputError(f"{self!r} is a part itself, so it has no parts")
        if first_byte % UNIT_BYTES or not 0 <= first_byte <= self.nbytes - nbytes:
            raise InvalidInputError(f"{nbytes} bytes from byte {first_byte} on are not whole units of {self!r}")
        part = Storage(self._tensor, None, self.dtype, nbytes, self.kind, self.encoding, bundled=True)
        part._device = self._device
        part._whole = self
        part.first_byte = first_byte
        return part

    def overlaps(self, other: Storage) -> bool:
        """Whether a byte of memory belongs to both."""
        ends = self.first_byte + self.nbytes, other.first_byte + other.nbytes
        return self.whole is other.whole and self.first_byte < ends[1] and other.first_byte < ends[0]

    @property
    def device(self) -> StorageOwner | None:
        """The opened device that it was allocated on, or None for a tensor that was handed in from outside."""
        return self._device

    @property
    def location(self) -> DeviceLocation | None:
        """Device and ordinal, where that is proven."""
        return self._device.location if self._device is not None else None

    @property
    def closed(self) -> bool:
        """Whether the memory has been given back."""
        if self._tensor is None or self._device is None:
            return self._tensor is None
        return self._device.closed if self._whole is None else self._whole.closed

    @property
    def tensor(self) -> Any:
        """The Kompute tensor.

        Raises:
            ClosedError: the storage or its device was closed.

        """
        if self.closed:
            raise ClosedError("this storage was closed, or its device was; make a new one")
        return self._tensor

    @property
    def data(self) -> NDArray[Any]:
        """The host-visible words (a flat view, not a copy); not for DEVICE storage.

        Raises:
            InvalidInputError: the storage has no host-visible memory.
            ClosedError: it was closed.

        """
        if self.kind is StorageKind.DEVICE:
            raise InvalidInputError(
                "device-only storage has no host-visible memory; read it with gpu.transfer.read_words"
            )
        tensor = self.tensor
        if self._data is None:
            start = self.first_byte // 4
            self._data = tensor.data()[start : start + self.nbytes // 4]  # mapped once and for all
        return self._data

    @property
    def words(self) -> memoryview:
        """The host-visible words as unsigned integers, cheaper than `data` for a few; raises like `data`."""
        if self._words is None or self.closed:
            self._words = memoryview(cast(Any, self.data.view(np.uint32)))
        return self._words

    def write(self, values: NDArray[Any]) -> None:
        """Put values (as many bytes as the storage has, or fewer from its start) into the host-visible words."""
        data = np.ascontiguousarray(values)
        count, rest = divmod(data.nbytes, 4)
        if rest or data.nbytes > self.nbytes:
            raise InvalidInputError(f"{data.nbytes} bytes do not fit a storage of {self.nbytes} bytes as whole words")
        if count:
            # Few arrays are met at every token, and views of bytes cost less than views of arrays.
            self.words[:count] = memoryview(cast(Any, data)).cast("B").cast("I")

    def close(self) -> None:
        """Drop this handle; the memory is freed once no recording names it any more."""
        if self._release is not None:
            self._release()
        self._tensor = self._data = self._words = None
        with _closing:
            Storage.closings += 1

    def __repr__(self) -> str:
        return f"Storage({self.dtype.value}, {self.encoding}, {self.nbytes} bytes, {self.kind.name}, {self.location})"
