"""Re-binding a held plan: every reason to refuse, in its order, and nothing changed by a refusal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepping import Logits, furthest, run, taken, token_ids
from tiny_llama import PATHS, TINY

from vkdecode.decode import (
    DecodeSession,
    InferenceContext,
    KvAllocId,
    KvCache,
    KvLayer,
    RebindRefusal,
    StepOptions,
    build_session,
    new_kv_alloc_id,
    step_data,
)
from vkdecode.errors import DeviceError, InvalidInputError
from vkdecode.gpu import Device, DeviceLocation, Storage, StorageKind, list_devices, read_words
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.weights import DType

ROWS = 16
EXACT = 1e-4


class Offer:
    """A cache's storages, some of them replaced, as a source for a re-bind."""

    def __init__(
        self,
        kv: KvCache,
        replaced: dict[tuple[int, int], Storage | None] | None = None,
        location: DeviceLocation | None = None,
        known: bool = True,
    ) -> None:
        self.alloc_id: KvAllocId = new_kv_alloc_id()
        self._kv, self._replaced = kv, replaced or {}
        self._location = (location or kv.device_location) if known else None

    def rebind_location(self) -> DeviceLocation | None:
        return self._location

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self._replaced.get((layer, which), self._kv.rebind_slot(layer, which))


@pytest.fixture
def kv(llama: Model) -> Iterator[KvCache]:
    with closing(llama.new_kv_cache(ROWS)) as made:
        yield made


@pytest.fixture
def other(llama: Model) -> Iterator[KvCache]:
    with closing(llama.new_kv_cache(ROWS)) as made:
        yield made


@pytest.fixture
def context(device: Device) -> Iterator[InferenceContext]:
    with InferenceContext(device) as opened:
        yield opened


@pytest.fixture
def session(llama: Model, kv: KvCache, context: InferenceContext) -> Iterator[DecodeSession]:
    with closing(build_session(llama, StepOptions(1, "last", "device", "bounded"), kv, context)) as made:
        yield made


def step(model: Model, session: DecodeSession, token: int, at: int) -> Logits:
    data = step_data(model, session, np.array([token], np.uint32), at)
    return session.realize_token(model.device, data, session.per_token_sym_env(at))


def outside(device: Device, nbytes: int) -> Storage:
    """Memory that was not allocated through the package."""
    zeros = np.zeros(nbytes // 4, np.float32)
    return Storage.from_tensor(device.manager.tensor_t(zeros, device.kp.TensorTypes.storage), DType.F32)


def slot_bytes(kv: KvCache) -> int:
    return kv.geometry.nbytes


def test_a_rebound_plan_writes_into_the_new_cache_and_no_longer_into_the_old(
    llama: Model, session: DecodeSession, kv: KvCache, other: KvCache
) -> None:
    device = llama.device
    step(llama, session, 5, 0)
    before = [read_words(device, layer.k).copy() for layer in kv.layers]
    alloc = other.alloc_id
    assert session.rebind_kv(other) is None
    assert session.alloc_id == other.alloc_id == alloc
    step(llama, session, 7, 0)
    assert all(
        np.array_equal(read_words(device, layer.k), words) for layer, words in zip(kv.layers, before, strict=True)
    )
    fresh = llama.forward([7], other)
    assert furthest(step(llama, session, 7, 0), fresh) <= EXACT


def test_each_slot_is_bound_to_its_own_storage(session: DecodeSession, other: KvCache) -> None:
    assert session.rebind_kv(other) is None
    for layer, nodes in enumerate(session.kv_nodes):
        for which, node in enumerate(nodes):
            assert session.base_cache[node] is other.rebind_slot(layer, which)
            assert session.executable.storage(node) is other.rebind_slot(layer, which)


@pytest.mark.parametrize("seq", [1, 16])
@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_only_what_binds_the_cache_is_made_again(
    llama: Model, kv: KvCache, other: KvCache, context: InferenceContext, path: tuple[str, str], seq: int
) -> None:
    with closing(build_session(llama, StepOptions(seq, "last", *path), kv, context)) as session:
        executable = session.executable
        before = list(executable._algorithms)
        assert session.rebind_kv(other) is None
        after = list(executable._algorithms)
        slots = {node for nodes in session.kv_nodes for node in nodes}
        over_cache = [bool(slots.intersection(one.bindings)) for one in executable.plan.dispatches]
        assert [old is not new for old, new in zip(before, after, strict=True)] == over_cache
        # What writes rows and what reads them, and in the masked arm of the SymEnv path what moves them.
        kinds = {executable.plan.dispatches[at].kernel.key.split()[0] for at, over in enumerate(over_cache) if over}
        assert kinds == {"linear", "attention", *(["kv_move"] if path == ("symenv", "masked") else [])}
        assert len(set(after) - set(before)) == len(kinds)
        assert len(set(after)) == len(set(before))
        wholes = {one.whole for layer in other.layers for one in (layer.k, layer.v)}
        held = {one.whole for layer in kv.layers for one in (layer.k, layer.v)}
        for algorithm, over in zip(after, over_cache, strict=True):
            assert wholes.issubset(algorithm.storages) == over
            assert held.isdisjoint(algorithm.storages)


def test_a_rebind_that_the_driver_refuses_changes_nothing(
    llama: Model, session: DecodeSession, kv: KvCache, other: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = step(llama, session, 3, 0)
    before = list(session.executable._algorithms), session.alloc_id, session.binding_epoch

    class Refusing:
        """A Kompute manager that makes one more algorithm and then none."""

        def __init__(self, manager: Any) -> None:
            self._manager, self._left = manager, 1

        def __getattr__(self, name: str) -> Any:
            if name == "algorithm":
                self._left -= 1
                if self._left < 0:
                    raise RuntimeError("VK_ERROR_OUT_OF_DEVICE_MEMORY")
            return getattr(self._manager, name)

    with monkeypatch.context() as patch:
        patch.setattr(llama.device, "_manager", Refusing(llama.device.manager))
        with pytest.raises(DeviceError, match="refuses kernel"):
            session.rebind_kv(other)
    assert (list(session.executable._algorithms), session.alloc_id, session.binding_epoch) == before
    for layer, nodes in enumerate(session.kv_nodes):
        for which, node in enumerate(nodes):
            assert session.base_cache[node] is session.executable.storage(node) is kv.rebind_slot(layer, which)
    np.testing.assert_array_equal(step(llama, session, 3, 0), wanted)
    assert session.rebind_kv(other) is None
    np.testing.assert_array_equal(step(llama, session, 3, 0), wanted)


def check_refused(model: Model, session: DecodeSession, source: Offer, wanted: RebindRefusal) -> RebindRefusal:
    """The refusal has these fields where they are set, and the session is as it was."""
    bound = {node: session.base_cache[node] for pair in session.kv_nodes for node in pair}
    alloc, epoch = session.alloc_id, session.binding_epoch
    before = step(model, session, 3, 0)
    refusal = session.rebind_kv(source)
    assert refusal is not None
    assert (refusal.kind, refusal.layer, refusal.which) == (wanted.kind, wanted.layer, wanted.which)
    for name in ("baked", "incoming"):
        if getattr(wanted, name) is not None:
            assert getattr(refusal, name) == getattr(wanted, name)
    assert all(session.base_cache[node] is storage for node, storage in bound.items())
    assert (session.alloc_id, session.binding_epoch) == (alloc, epoch)
    assert np.array_equal(step(model, session, 3, 0), before)
    assert wanted.kind in str(refusal)
    return refusal


def test_an_unknown_location_is_refused_first(llama: Model, session: DecodeSession, other: KvCache) -> None:
    source = Offer(other, {(0, 0): None}, known=False)
    check_refused(llama, session, source, RebindRefusal("RESIDENCY_UNKNOWN", baked=llama.device.location))


def test_another_location_is_refused_with_both(llama: Model, session: DecodeSession, other: KvCache) -> None:
    elsewhere = DeviceLocation("vulkan", 7)
    wanted = RebindRefusal("RESIDENCY_DIFFERS", baked=llama.device.location, incoming=elsewhere)
    refusal = check_refused(llama, session, Offer(other, {(0, 0): None}, elsewhere), wanted)
    assert "vulkan:7" in str(refusal) and str(llama.device.location) in str(refusal)
    other_backend = DeviceLocation("cuda", llama.device.location.ordinal)
    check_refused(llama, session, Offer(other, location=other_backend), RebindRefusal("RESIDENCY_DIFFERS"))


@pytest.mark.parametrize("slot", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_missing_slot_is_named(llama: Model, session: DecodeSession, other: KvCache, slot: tuple[int, int]) -> None:
    check_refused(llama, session, Offer(other, {slot: None}), RebindRefusal("MISSING_SLOT", *slot))


def test_the_first_reason_in_order_of_layers_is_given(llama: Model, session: DecodeSession, other: KvCache) -> None:
    source = Offer(other, {(1, 1): None, (0, 1): None, (1, 0): outside(llama.device, 16)})
    check_refused(llama, session, source, RebindRefusal("MISSING_SLOT", 0, 1))


def test_a_slot_that_the_plan_does_not_bake_is_named(llama: Model, session: DecodeSession, other: KvCache) -> None:
    node = session.kv_nodes[1][0]
    held = session.base_cache
    session._base_cache = type(held)({one: held[one] for one in held if one != node})
    refusal = session.rebind_kv(other)
    assert refusal is not None
    assert (refusal.kind, refusal.layer, refusal.which) == ("UNBAKED_SLOT", 1, 0)
    session._base_cache = held
    assert session.rebind_kv(other) is None


@pytest.mark.parametrize("what", ["size", "dtype", "encoding", "bundled"])
def test_a_storage_that_kernels_would_read_otherwise_is_refused(
    llama: Model, session: DecodeSession, other: KvCache, what: str
) -> None:
    size = slot_bytes(other)
    make = {
        "size": lambda: llama.device.allocate_parts(1, size + 16, DType.F32)[0],
        "dtype": lambda: llama.device.allocate_parts(1, size, DType.F16)[0],
        "encoding": lambda: llama.device.allocate_parts(1, size, DType.F32, "tiles8")[0],
        "bundled": lambda: llama.device.allocate(size, DType.F32),
    }
    odd = make[what]()
    refusal = check_refused(llama, session, Offer(other, {(1, 1): odd}), RebindRefusal("STORAGE_DIFFERS", 1, 1))
    assert str(refusal.incoming) == repr(odd) or what == "bundled"
    odd.close()


def test_memory_from_outside_is_refused_even_where_its_source_vouches_for_it(
    llama: Model, session: DecodeSession, other: KvCache
) -> None:
    odd = outside(llama.device, slot_bytes(other))
    assert odd.location is None
    check_refused(llama, session, Offer(other, {(1, 0): odd}), RebindRefusal("RESIDENCY_UNKNOWN", 1, 0))


def test_one_storage_for_two_slots_is_refused(llama: Model, session: DecodeSession, other: KvCache) -> None:
    twice = {(1, 1): other.rebind_slot(0, 0)}
    check_refused(llama, session, Offer(other, twice), RebindRefusal("STORAGE_DIFFERS", 1, 1))


def test_a_cache_with_memory_from_outside_is_decoded_by_new_plans(
    llama: Model, kv: KvCache, context: InferenceContext
) -> None:
    ids = list(token_ids(8, llama.vocab_size))
    wanted = [run(llama, [one], kv, context) for one in ids]
    kv.truncate_to(0)
    size = slot_bytes(kv)
    kv.set_layer(0, KvLayer(outside(llama.device, size), outside(llama.device, size)))
    assert kv.device_location is None
    assert all(np.array_equal(run(llama, [one], kv, context), logits) for one, logits in zip(ids, wanted, strict=True))
    stats = context.stats
    assert (stats.plans_built, stats.rebinds, stats.rebinds_refused) == (2, 0, 1)
    # The plan that was built for it is held for it, and cannot be moved elsewhere either.
    with closing(llama.new_kv_cache(ROWS)) as plain:
        assert np.array_equal(run(llama, ids[:1], plain, context), wanted[0])
    assert (stats.plans_built, stats.rebinds, stats.rebinds_refused) == (3, 0, 2)
    session = taken(context)
    refusal = session.rebind_kv(kv)
    assert refusal is not None
    assert (refusal.kind, refusal.baked, refusal.incoming) == ("RESIDENCY_UNKNOWN", llama.device.location, None)
    session.close()


def test_all_of_a_cache_can_be_from_outside(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    wanted = [run(llama, [one], kv, context) for one in (3, 4)]
    kv.clear()
    for layer in range(2):
        kv.set_layer(layer, KvLayer(*(outside(llama.device, slot_bytes(kv)) for _ in range(2))))
    assert kv.device_location is None
    assert all(
        np.array_equal(run(llama, [one], kv, context), logits) for one, logits in zip((3, 4), wanted, strict=True)
    )
    session = taken(context)
    assert session.location is None
    refusal = session.rebind_kv(kv)
    assert refusal is not None and refusal.kind == "RESIDENCY_UNKNOWN"
    session.close()


def test_the_kind_of_outside_memory_is_read_from_it(device: Device) -> None:
    for name, kind in (("storage", StorageKind.DEVICE), ("device", StorageKind.STAGED), ("host", StorageKind.HOST)):
        tensor = device.manager.tensor_t(np.zeros(8, np.float32), getattr(device.kp.TensorTypes, name))
        storage = Storage.from_tensor(tensor, DType.F32)
        assert (storage.kind, storage.nbytes, storage.location) == (kind, 32, None)


# Two devices that are equal in everything but their ordinal


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Device, Device]]:
    """Two physical devices with the same name and UUID, from two copies of one driver's description."""
    driver = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    copies = [shutil.copy(driver, tmp_path / name) for name in ("a.json", "b.json")]
    monkeypatch.setenv("VK_DRIVER_FILES", ":".join(map(str, copies)))
    found = list_devices()
    assert [one.ordinal for one in found] == [0, 1]
    assert found[0].name == found[1].name
    with Device(0) as first, Device(1) as second:
        yield first, second


def test_equal_devices_are_told_apart_by_ordinal(twins: tuple[Device, Device]) -> None:
    first, second = twins
    with load(TINY / "llama", device=first) as model, load(TINY / "llama", device=second) as far:
        options = StepOptions(1, "last", "device", "bounded")
        with InferenceContext(first) as context, closing(model.new_kv_cache(ROWS)) as kv:
            session = build_session(model, options, kv, context)
            with closing(far.new_kv_cache(ROWS)) as distant:
                assert distant.device_location == DeviceLocation("vulkan", 1)
                refusal = session.rebind_kv(distant)
                assert refusal == RebindRefusal(
                    "RESIDENCY_DIFFERS", baked=DeviceLocation("vulkan", 0), incoming=DeviceLocation("vulkan", 1)
                )
                with pytest.raises(InvalidInputError, match="vulkan:1"):
                    run(model, [1], distant, context)
                assert distant.cached_len == 0
                # Both devices compute, and the same.
                near = run(model, [1, 2, 3], kv, context)
                with InferenceContext(second) as other:
                    assert np.array_equal(run(far, [1, 2, 3], distant, other), near)
            session.close()


def test_a_layer_from_another_device_is_not_run(twins: tuple[Device, Device]) -> None:
    first, second = twins
    with (
        load(TINY / "llama", device=first) as model,
        InferenceContext(first) as context,
        closing(model.new_kv_cache(ROWS)) as kv,
    ):
        run(model, [1], kv, context)
        kv.clear()
        kv.set_layer(1, KvLayer(*(second.allocate(slot_bytes(kv), DType.F32) for _ in range(2))))
        assert kv.device_location is None
        with pytest.raises(DeviceError, match="lives on"):
            run(model, [1], kv, context)
        assert kv.cached_len == 0
