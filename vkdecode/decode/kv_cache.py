"""The KV cache of one conversation: two storages per layer, and how many rows of them count."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from vkdecode.decode.keys import KvAllocId, new_kv_alloc_id
from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu import Device, DeviceLocation, Storage
from vkdecode.weights.dtypes import DType

MAX_LANDING_ROWS = 64
"""Rows behind the conversation's, where a recording that cannot know the offset puts a step's rows."""


@dataclass(frozen=True)
class KvGeometry:
    """Shape of a cache: each of K and V is [num_key_value_heads, rows, head_dim] per layer.

    Rows are the `max_seq_len` of the conversation, and the landing rows behind them.
    """

    num_layers: int
    num_key_value_heads: int
    max_seq_len: int
    head_dim: int
    dtype: DType

    @property
    def rows(self) -> int:
        """Rows that are allocated for each head."""
        return self.max_seq_len + min(self.max_seq_len, MAX_LANDING_ROWS)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[num_key_value_heads, rows, head_dim]."""
        return self.num_key_value_heads, self.rows, self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one layer's K or V."""
        return self.num_key_value_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's K or V."""
        return self.rows * self.row_bytes

    def max_len_within(self, nbytes: int) -> int:
        """The largest `max_seq_len` with which one layer's K or V takes no more than so many bytes."""
        rows = nbytes // self.row_bytes
        return max(rows - MAX_LANDING_ROWS, min(rows // 2, MAX_LANDING_ROWS))


@dataclass(frozen=True)
class KvLayer:
    """K and V of one layer."""

    k: Storage
    v: Storage


class KvCache:
    """Keys and values of the tokens so far, on one device.

    `alloc_id` names the allocation, not the conversation: making a cache, `clear` and `set_layer` mint a new one,
    `truncate_to` does not, because a plan bakes the buffers and reads the length anew for each token. Rows from
    `cached_len` on hold anything.

    Args:
        device: where it lives.
        geometry: its shape and element type (f32 or f16).

    Raises:
        InvalidInputError: the geometry is not one that a cache can have.
        OutOfDeviceMemoryError: it does not fit; what was taken has been given back.

    """

    def __init__(self, device: Device, geometry: KvGeometry) -> None:
        if geometry.dtype not in (DType.F32, DType.F16):
            raise InvalidInputError(f"a KV cache is f32 or f16, not {geometry.dtype.value}")
        if geometry.max_seq_len < 1:
            raise InvalidInputError(f"max_seq_len must be at least 1, not {geometry.max_seq_len}")
        self.geometry = geometry
        self._cached_len = 0
        self._alloc_id = new_kv_alloc_id()
        # K of all layers lies together, and V: plans bind each once for the layers that are alike.
        kinds: list[list[Storage]] = []
        try:
            for _ in range(2):
                kinds.append(device.allocate_parts(geometry.num_layers, geometry.nbytes, geometry.dtype))
        except BaseException:
            for storage in itertools.chain(*kinds):
                storage.whole.close()
            raise
        self._layers = [KvLayer(*pair) for pair in zip(*kinds, strict=True)]
        self._closed = False
        self._device = weakref.ref(device)

    @property
    def cached_len(self) -> int:
        """Number of rows that count."""
        return self._cached_len

    @property
    def max_seq_len(self) -> int:
        """Number of rows there is room for."""
        return self.geometry.max_seq_len

    @property
    def dtype(self) -> str:
        """Element type, `f32` or `f16`."""
        return self.geometry.dtype.value

    @property
    def alloc_id(self) -> KvAllocId:
        """Names the allocation that a plan bakes."""
        return self._alloc_id

    @property
    def closed(self) -> bool:
        """Whether the cache was closed, or its device."""
        device = self._device()
        return self._closed or device is None or device.closed

    def is_on(self, device: Device) -> bool:
        """Whether the cache was made on this opening of a device."""
        return self._device() is device

    @property
    def device_location(self) -> DeviceLocation | None:
        """Where all of its storages are proven to live, or None where that is not proven for each of them."""
        places = {storage.location for layer in self._layers for storage in (layer.k, layer.v)}
        return places.pop() if len(places) == 1 else None

    @property
    def layers(self) -> Sequence[KvLayer]:
        """K and V of each layer."""
        return tuple(self._layers)

    def rebind_location(self) -> DeviceLocation | None:
        """The same as `device_location`; what `KvRebindSource` asks for."""
        return self.device_location

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        """The storage of a layer's K (0) or V (1), or None where there is no such layer."""
        if not 0 <= layer < len(self._layers) or which not in (0, 1):
            return None
        return self._layers[layer].v if which else self._layers[layer].k

    def truncate_to(self, length: int) -> None:
        """Forget the rows from `length` on; plans stay valid.

        Raises:
            InvalidInputError: the cache has fewer rows, or the length is negative.

        """
        self.check_open()
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self._cached_len:
            raise InvalidInputError(f"cannot truncate to {length!r} rows: the cache holds {self._cached_len}")
        self._cached_len = length

    def advance(self, tokens: int) -> None:
        """Count rows that a step has just written."""
        self._cached_len += tokens

    def clear(self) -> None:
        """Forget everything, under a new allocation id."""
        self.check_open()
        self._cached_len = 0
        self._alloc_id = new_kv_alloc_id()

    def set_layer(self, index: int, layer: KvLayer) -> None:
        """Put other storages into a layer, under a new allocation id; their rows must be laid out as this cache's are.

        Raises:
            InvalidInputError: there is no such layer, or a storage differs in element type or size or serves another
                slot.
            ClosedError: the cache or a storage was closed.

        """
        self.check_open()
        if not 0 <= index < len(self._layers):
            raise InvalidInputError(f"there is no layer {index}; the cache has {len(self._layers)}")
        held = self._layers[index].k
        for name, storage in (("K", layer.k), ("V", layer.v)):
            if storage.closed:
                raise ClosedError(f"the {name} storage for layer {index} was closed")
            if storage.dtype is not held.dtype or storage.nbytes != held.nbytes:
                raise InvalidInputError(f"layer {index} needs a {name} storage like {held!r}, not {storage!r}")
        others = [one for at, pair in enumerate(self._layers) if at != index for one in (pair.k, pair.v)]
        if layer.k.overlaps(layer.v) or any(layer.k.overlaps(one) or layer.v.overlaps(one) for one in others):
            raise InvalidInputError(
                f"layer {index} needs storages of its own; one of these holds bytes of another slot"
            )
        self._layers[index] = layer
        self._alloc_id = new_kv_alloc_id()

    def check_open(self) -> None:
        """Raise `ClosedError` where the cache or its device was closed."""
        if self.closed:
            raise ClosedError("this KV cache was closed, or its device was; make a new one with model.new_kv_cache()")

    def close(self) -> None:
        """Give the memory back; a plan that still binds it keeps it alive until the plan is dropped."""
        self._closed = True
        self._layers.clear()

    def __repr__(self) -> str:
        rows = f"{self._cached_len} of {self.max_seq_len} rows"
        return f"KvCache({rows}, {self.dtype}, id {self._alloc_id}, {self.device_location})"
