"""Whether a held plan may be pointed at another KV allocation: each check, in order, before anything is changed.

Accepting a wrong allocation would decode one request over another's context at full speed, with nothing to report it.
Refusing costs a rebuild. So what cannot be proven is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vkdecode.decode.keys import KvAllocId
from vkdecode.gpu import DeviceLocation, Storage
from vkdecode.graph import NodeId
from vkdecode.runtime import StorageCache

RESIDENCY_UNKNOWN = "RESIDENCY_UNKNOWN"
RESIDENCY_DIFFERS = "RESIDENCY_DIFFERS"
MISSING_SLOT = "MISSING_SLOT"
UNBAKED_SLOT = "UNBAKED_SLOT"
STORAGE_DIFFERS = "STORAGE_DIFFERS"


class KvRebindSource(Protocol):
    """Anything that can offer a KV allocation to a held plan."""

    @property
    def alloc_id(self) -> KvAllocId:
        """Names the allocation."""
        ...

    def rebind_location(self) -> DeviceLocation | None:
        """Where the storages live, or None where that is not proven."""
        ...

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        """The storage of a layer's K (`which` 0) or V (1), or None where there is none."""
        ...


@dataclass(frozen=True)
class RebindRefusal:
    """Why a plan was not re-bound; an ordinary answer, after which the caller rebuilds.

    `kind` is RESIDENCY_UNKNOWN, RESIDENCY_DIFFERS, MISSING_SLOT, UNBAKED_SLOT or STORAGE_DIFFERS. `baked` and
    `incoming` say what
    differs: locations, or descriptions of the storages.
    """

    kind: str
    layer: int | None = None
    which: int | None = None
    baked: object = None
    incoming: object = None

    def __str__(self) -> str:
        where = (
            f" at layer {self.layer} {'KV'[self.which]}" if self.layer is not None and self.which is not None else ""
        )
        return f"{self.kind}{where}: the plan has {self.baked}, the cache {self.incoming}"


def check_rebind(
    source: KvRebindSource,
    location: DeviceLocation | None,
    kv_nodes: Sequence[tuple[NodeId, NodeId]],
    baked: StorageCache,
) -> dict[NodeId, Storage] | RebindRefusal:
    """The storages to bind to each KV node, or the first reason not to.

    Args:
        source: the allocation that is offered.
        location: where the plan's own KV storages live, or None where that is not proven.
        kv_nodes: the plan's K and V node of each layer.
        baked: the storages that the plan binds now; they, not the cache's description of itself, are what is compared.

    """
    incoming = source.rebind_location()
    if incoming is None or location is None:
        return RebindRefusal(RESIDENCY_UNKNOWN, baked=location, incoming=incoming)
    if incoming != location:
        return RebindRefusal(RESIDENCY_DIFFERS, baked=location, incoming=incoming)
    bound: dict[NodeId, Storage] = {}
    for layer, pair in enumerate(kv_nodes):
        for which, node in enumerate(pair):
            offered = source.rebind_slot(layer, which)
            if offered is None or offered.closed:
                return RebindRefusal(MISSING_SLOT, layer, which)
            if node not in baked:
                return RebindRefusal(UNBAKED_SLOT, layer, which, incoming=repr(offered))
            # The source vouches for all of its storages at once; each one is asked as well.
            if offered.location is None:
                return RebindRefusal(RESIDENCY_UNKNOWN, layer, which, location, None)
            if offered.location != location:
                return RebindRefusal(RESIDENCY_DIFFERS, layer, which, location, offered.location)
            # A device opened twice is two devices to Vulkan, at one location.
            if offered.device is not baked[node].device:
                return RebindRefusal(RESIDENCY_DIFFERS, layer, which, location, f"{location}, opened again")
            if interchange_key(offered) != interchange_key(baked[node]):
                return RebindRefusal(STORAGE_DIFFERS, layer, which, repr(baked[node]), repr(offered))
            if any(offered.overlaps(one) for one in bound.values()):
                return RebindRefusal(STORAGE_DIFFERS, layer, which, repr(baked[node]), "bytes of another slot")
            bound[node] = offered
    return bound


def interchange_key(storage: Storage) -> tuple[object, ...]:
    """What two storages must share to serve the same kernel: dtype, encoding, backend, bundling and byte extent."""
    backend = storage.location.backend if storage.location is not None else None
    return storage.dtype, storage.encoding, backend, storage.bundled, storage.nbytes
