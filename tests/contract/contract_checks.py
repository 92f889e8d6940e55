"""The decode contract as checks that can each fail; here those that need no device.

A check takes a `Bench`, and raises where the package does not keep the contract. The tests run them on the package as
it is, and on the package with one comparison taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_llama import step_graph

from vkdecode.decode import (
    DecodeSession,
    KvAllocId,
    KvCache,
    PlanValidity,
    Prebuilt,
    RebindRefusal,
    make_shape_key,
)
from vkdecode.decode.rebind import check_rebind, interchange_key
from vkdecode.errors import ClosedError, DeviceError, InvalidInputError, SymbolConflict
from vkdecode.gpu import Device, DeviceLocation, Storage, StorageKind
from vkdecode.graph import NodeId, SymEnv, SymId
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.runtime import StorageCache
from vkdecode.weights import DType

HERE = DeviceLocation("vulkan", 0)
ELSEWHERE = DeviceLocation("vulkan", 1)
NODES = ((NodeId(0), NodeId(1)), (NodeId(2), NodeId(3)))
ROWS, LAYERS, KEY = 40, 2, 7


class FakeDevice:
    """As much of a device as a storage needs."""

    def __init__(self, location: DeviceLocation = HERE) -> None:
        self.location = location
        self.closed = False

    def _give_back(self, kind: StorageKind, nbytes: int) -> None:
        pass


HERE_DEVICE = FakeDevice()


def fake_storage(
    device: FakeDevice | None = HERE_DEVICE,
    dtype: DType = DType.F32,
    nbytes: int = 64,
    encoding: str = "plain",
    bundled: bool = False,
) -> Storage:
    """A storage without memory."""
    return Storage(object(), cast(Any, device), dtype, nbytes, StorageKind.DEVICE, encoding, bundled)


class Offer:
    """A re-bind source that says what it is told to say."""

    def __init__(
        self,
        storages: Mapping[tuple[int, int], Storage | None],
        location: DeviceLocation | None = HERE,
        alloc_id: int = 99,
    ) -> None:
        self._storages = dict(storages)
        self._location = location
        self._alloc_id = KvAllocId(alloc_id)

    @property
    def alloc_id(self) -> KvAllocId:
        return self._alloc_id

    def rebind_location(self) -> DeviceLocation | None:
        return self._location

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self._storages.get((layer, which))


def four_slots(**changed: Any) -> dict[tuple[int, int], Storage | None]:
    """Storages for two layers that fit; `l1k=...` replaces one of them."""
    slots = {(layer, which): fake_storage() for layer in range(LAYERS) for which in range(2)}
    return {**slots, **{(int(name[1]), "kv".index(name[2])): one for name, one in changed.items()}}


@dataclass
class Bench:
    """The device and models that the checks share; made only when a check needs them."""

    device: Device
    models: Callable[[str], Model]

    @cached_property
    def opened_again(self) -> Device:
        return Device(self.device.location.ordinal)

    @property
    def model(self) -> Model:
        return self.models("llama")

    def load_again(self) -> Model:
        """The same model once more, for a test that closes it."""
        return load(self.model.path, device=self.device)

    def cache_of_another_opening(self, rows: int) -> KvCache:
        """A cache that fits the model, on the same physical device opened a second time."""
        return KvCache(self.opened_again, self.model.kv_geometry(rows, "f32"))

    def close(self) -> None:
        if "opened_again" in self.__dict__:
            self.opened_again.close()


def answer(offer: Offer, location: DeviceLocation | None = HERE, **baked: Any) -> object:
    """The kind of refusal, or the storages that would be bound."""
    slots = four_slots(**baked).items()
    cache = StorageCache({NODES[layer][which]: one for (layer, which), one in slots if one is not None})
    found = check_rebind(offer, location, NODES, cache)
    return found.kind if isinstance(found, RebindRefusal) else found


def a_fitting_offer_is_taken_whole(bench: Bench) -> None:
    slots = four_slots()
    expected = {NODES[layer][which]: storage for (layer, which), storage in slots.items()}
    assert answer(Offer(slots)) == expected


def an_unknown_location_of_either_side_is_refused(bench: Bench) -> None:
    assert answer(Offer(four_slots(), None)) == "RESIDENCY_UNKNOWN"
    assert answer(Offer(four_slots()), None) == "RESIDENCY_UNKNOWN"
    assert answer(Offer(four_slots(), None), None) == "RESIDENCY_UNKNOWN"


def residency_comes_before_slots(bench: Bench) -> None:
    assert answer(Offer({}, None)) == "RESIDENCY_UNKNOWN"
    assert answer(Offer({}, ELSEWHERE)) == "RESIDENCY_DIFFERS"


def another_location_is_refused_with_both(bench: Bench) -> None:
    found = check_rebind(Offer(four_slots(), ELSEWHERE), HERE, NODES, StorageCache())
    assert found == RebindRefusal("RESIDENCY_DIFFERS", baked=HERE, incoming=ELSEWHERE)


def a_missing_or_closed_slot_is_refused(bench: Bench) -> None:
    closed = fake_storage()
    closed.close()
    for name in ("l0k", "l0v", "l1k", "l1v"):
        assert answer(Offer(four_slots(**{name: None}))) == "MISSING_SLOT"
        assert answer(Offer(four_slots(**{name: closed}))) == "MISSING_SLOT"


def an_unbaked_slot_is_refused(bench: Bench) -> None:
    for name in ("l0k", "l0v", "l1k", "l1v"):
        assert answer(Offer(four_slots()), **{name: None}) == "UNBAKED_SLOT"


def each_storage_is_asked_where_it_lives(bench: Bench) -> None:
    cache = StorageCache({node: fake_storage() for pair in NODES for node in pair})
    for place, kind in ((None, "RESIDENCY_UNKNOWN"), (FakeDevice(ELSEWHERE), "RESIDENCY_DIFFERS")):
        found = check_rebind(Offer(four_slots(l1v=fake_storage(place))), HERE, NODES, cache)
        assert found == RebindRefusal(kind, 1, 1, HERE, place and place.location)


def another_opening_of_the_ordinal_is_another_place(bench: Bench) -> None:
    again = FakeDevice()
    slots = {slot: fake_storage(again) for slot in four_slots()}
    assert answer(Offer(slots)) == "RESIDENCY_DIFFERS"


def storages_must_be_interchangeable(bench: Bench) -> None:
    different = {
        "dtype": fake_storage(dtype=DType.F16),
        "encoding": fake_storage(encoding="tiles8"),
        "bundling": fake_storage(bundled=True),
        "less": fake_storage(nbytes=48),
        "more": fake_storage(nbytes=80),
    }
    for storage in different.values():
        assert answer(Offer(four_slots(l1k=storage))) == "STORAGE_DIFFERS"
        assert answer(Offer(four_slots()), l1k=storage) == "STORAGE_DIFFERS"


def the_backend_is_compared(bench: Bench) -> None:
    other = fake_storage(FakeDevice(DeviceLocation("other", 0)))
    assert interchange_key(other) != interchange_key(fake_storage())
    assert interchange_key(fake_storage()) == interchange_key(fake_storage(FakeDevice(ELSEWHERE)))


def what_is_baked_is_compared_not_what_is_claimed(bench: Bench) -> None:
    assert answer(Offer(four_slots()), l0k=fake_storage(None)) in ("STORAGE_DIFFERS", "RESIDENCY_DIFFERS")


def one_storage_for_two_slots_is_refused(bench: Bench) -> None:
    shared = fake_storage()
    assert answer(Offer(four_slots(l0k=shared, l0v=shared))) == "STORAGE_DIFFERS"
    assert answer(Offer(four_slots(l0k=shared, l1k=shared))) == "STORAGE_DIFFERS"


class FakeExecutable:
    """Notes what it is asked to re-bind."""

    def __init__(self) -> None:
        self.bound: list[Mapping[NodeId, Storage]] = []
        self.error: Exception | None = None

    def rebind(self, storages: Mapping[NodeId, Storage]) -> None:
        if self.error is not None:
            raise self.error
        self.bound.append(dict(storages))

    def close(self) -> None:
        pass


def held(alloc_id: int = 1) -> tuple[DecodeSession, FakeExecutable]:
    """A session over fake storages."""
    step = step_graph(max_seq_len=ROWS)
    slots = four_slots()
    cache = StorageCache({step.kv[layer][which]: one for (layer, which), one in slots.items() if one is not None})
    executable = FakeExecutable()
    prebuilt = cast(Prebuilt, SimpleNamespace(executable=executable))
    device = cast(Device, HERE_DEVICE)
    offer = Offer(slots, alloc_id=alloc_id)
    return DecodeSession(device, step, prebuilt, cache, ROWS, LAYERS, DType.F32, KEY, offer), executable


def validity(session: DecodeSession, **changed: Any) -> PlanValidity:
    """What a session answers about a step that fits, but for the named parts."""
    question = {
        "seq": 1,
        "max_seq_len": ROWS,
        "n_layers": LAYERS,
        "cache_dtype": "f32",
        "shape_key": KEY,
        "alloc_id": 1,
        **changed,
    }
    found = session.validity_for(**question)
    assert session.is_valid_for(**question) == (found is PlanValidity.VALID)
    return found


def a_plan_that_fits_is_valid(bench: Bench) -> None:
    assert validity(held()[0]) is PlanValidity.VALID
    assert validity(held()[0], cache_dtype=DType.F32) is PlanValidity.VALID


def each_part_of_the_key_makes_a_plan_stale(bench: Bench) -> None:
    session, _ = held()
    others = {"seq": 2, "max_seq_len": ROWS + 1, "n_layers": LAYERS + 1, "cache_dtype": "f16", "shape_key": KEY + 1}
    for name, value in others.items():
        assert validity(session, **{name: value}) is PlanValidity.STALE, name
        assert validity(session, **{name: value}, alloc_id=2) is PlanValidity.STALE, name


def another_allocation_is_worth_a_rebind(bench: Bench) -> None:
    assert validity(held()[0], alloc_id=2) is PlanValidity.ALLOCATION_CHANGED


def a_closed_session_is_stale(bench: Bench) -> None:
    session, _ = held()
    session.close()
    assert validity(session) is PlanValidity.STALE
    with pytest.raises(ClosedError):
        session.rebind_kv(Offer(four_slots()))


def a_rebind_changes_everything_at_once(bench: Bench) -> None:
    session, executable = held()
    slots = four_slots()
    assert session.rebind_kv(Offer(slots, alloc_id=5)) is None
    nodes = {session.kv_nodes[layer][which]: one for (layer, which), one in slots.items()}
    assert executable.bound == [nodes]
    assert {node: session.base_cache[node] for node in nodes} == nodes
    assert session.alloc_id == 5
    assert validity(session, alloc_id=5) is PlanValidity.VALID
    assert validity(session) is PlanValidity.ALLOCATION_CHANGED
    assert session.binding_epoch == 1


def a_refused_rebind_changes_nothing(bench: Bench) -> None:
    session, executable = held()
    before = {node: session.base_cache[node] for node in session.base_cache}
    refusal = session.rebind_kv(Offer(four_slots(l1v=fake_storage(nbytes=48))))
    assert refusal is not None
    assert (refusal.kind, refusal.layer, refusal.which) == ("STORAGE_DIFFERS", 1, 1)
    executable.error = DeviceError("no more memory")
    with pytest.raises(DeviceError):
        session.rebind_kv(Offer(four_slots()))
    assert executable.bound == []
    assert {node: session.base_cache[node] for node in session.base_cache} == before
    assert (session.alloc_id, session.binding_epoch) == (1, 0)


def a_plan_with_storages_in_two_places_has_no_location(bench: Bench) -> None:
    session, _ = held()
    assert session.location == HERE
    session.base_cache[session.kv_nodes[1][0]] = fake_storage(FakeDevice(ELSEWHERE))
    assert session.location is None
    refusal = session.rebind_kv(Offer(four_slots()))
    assert refusal is not None
    assert refusal.kind == "RESIDENCY_UNKNOWN"


def a_plan_that_lacks_a_slot_says_so(bench: Bench) -> None:
    session, _ = held()
    node = session.kv_nodes[1][1]
    without = {one: session.base_cache[one] for one in session.base_cache if one != node}
    session._base_cache = StorageCache(without)
    refusal = session.rebind_kv(Offer(four_slots()))
    assert refusal is not None
    assert (refusal.kind, refusal.layer, refusal.which) == ("UNBAKED_SLOT", 1, 1)


def symbols_of_a_step_are_bound_once(bench: Bench) -> None:
    session, _ = held()
    env = session.per_token_sym_env(11)
    assert env.resolve(session.cached_len_sym) == 11
    assert env.resolve(session.attended_len_sym) == 12
    assert env.resolve(session._step.token_count_sym) == 1
    assert env.resolve(5) == 5
    env.bind(session.cached_len_sym, 11)
    with pytest.raises(SymbolConflict):
        env.bind(session.cached_len_sym, 12)
    assert env.resolve(session.cached_len_sym) == 11
    for value in (-1, 1 << 32):
        with pytest.raises(InvalidInputError):
            SymEnv().bind(SymId(0, "x"), value)
    with pytest.raises(InvalidInputError):
        SymEnv().resolve(SymId(0, "x"))


def the_shape_key_names_architecture_structure_and_instance(bench: Bench) -> None:
    key = cast(Any, make_shape_key)
    keys = [key("a", {"x": 1}, 1), key("b", {"x": 1}, 1), key("a", {"x": 2}, 1), key("a", {"x": 1}, 2)]
    assert len(set(keys)) == 4
    assert key("a", {"x": 1}, 1) == keys[0]
    assert all(0 <= one < 1 << 64 for one in keys)
