"""What must hold with two physical devices of one name and one UUID; run by `test_two_devices` in such a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from contract_checks import Offer
from decode_machine import World, run_machine, run_scripted
from kv_copies import fresh_copy, outside_copy
from numpy.typing import NDArray
from stepping import taken
from tiny_llama import PATHS, TINY

from vkdecode.decode import DecodeMode, InferenceContext, KvCache, KvLayer, KvRebindSource, RebindRefusal
from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Device, DeviceLocation, Storage, list_devices
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.runtime import StorageCache
from vkdecode.weights import DType

ROWS = 24
FIRST, SECOND = DeviceLocation("vulkan", 0), DeviceLocation("vulkan", 1)

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def devices() -> Iterator[tuple[Device, Device]]:
    with Device(0) as first, Device(1) as second:
        yield first, second


@pytest.fixture(scope="module")
def models(devices: tuple[Device, Device]) -> Iterator[tuple[Model, Model]]:
    first, second = (load(TINY / "llama", device=device) for device in devices)
    yield first, second
    first.close()
    second.close()


class Held:
    """A captured plan of the first model that has decoded two tokens, taken out of its context."""

    def __init__(self, model: Model, path: tuple[str, str] = ("device", "bounded")) -> None:
        self.model = model
        self.mode = DecodeMode("captured", *path)
        self.context = InferenceContext(model.device)
        self.kv = model.new_kv_cache(ROWS)
        for token in (3, 5):
            self.step(token)
        self.session = taken(self.context)

    def step(self, token: int) -> Logits:
        return self.model.forward_with_kv_context_persistent([token], self.kv, self.context, self.mode)

    def refuses(self, source: KvRebindSource) -> RebindRefusal:
        """The refusal, after which plan, ids, storages and capture are what they were, and the next logits too."""
        session, stats = self.session, replace(self.context.stats)
        before = (session.alloc_id, session.binding_epoch, session.capture, session.location)
        storages = {node: session.base_cache[node] for node in session.base_cache}
        refusal = session.rebind_kv(source)
        assert refusal is not None
        assert before == (session.alloc_id, session.binding_epoch, session.capture, session.location)
        assert storages == {node: session.base_cache[node] for node in session.base_cache}
        self.context.put_decode_session(session)
        rows = self.kv.cached_len
        logits = self.step(7)
        np.testing.assert_array_equal(logits, undisturbed(self.model, self.mode))
        self.kv.truncate_to(rows)
        assert self.context.take_decode_session() is session
        # What cannot be captured is recorded for each token.
        replayed = session.capture is not None
        assert self.context.stats == replace(
            stats,
            tokens_replayed=stats.tokens_replayed + replayed,
            recordings_made=stats.recordings_made + (not replayed),
            one_off_recordings=stats.one_off_recordings + (replayed and self.mode.kv_offset == "symenv"),
        )
        return refusal

    def close(self) -> None:
        self.session.close()
        self.context.close()
        self.kv.close()


_undisturbed: dict[tuple[Model, DecodeMode], Logits] = {}


def undisturbed(model: Model, mode: DecodeMode) -> Logits:
    """The third token's logits of a run that nobody tried to re-bind."""
    if (model, mode) not in _undisturbed:
        with InferenceContext(model.device) as context:
            kv = model.new_kv_cache(ROWS)
            run = model.forward_with_kv_context_persistent
            _undisturbed[model, mode] = [run([token], kv, context, mode) for token in (3, 5, 7)][-1]
            kv.close()
    return _undisturbed[model, mode]


@pytest.fixture(params=PATHS, ids="-".join)
def held(models: tuple[Model, Model], request: pytest.FixtureRequest) -> Iterator[Held]:
    made = Held(models[0], request.param)
    yield made
    made.close()


@pytest.fixture
def one_path(models: tuple[Model, Model]) -> Iterator[Held]:
    made = Held(models[0])
    yield made
    made.close()


def slots_of(kv: KvCache, **changed: Storage | None) -> dict[tuple[int, int], Storage | None]:
    """A cache's storages; `l1k=...` replaces one."""
    held = {(layer, which): kv.rebind_slot(layer, which) for layer in range(len(kv.layers)) for which in range(2)}
    return {**held, **{(int(name[1]), "kv".index(name[2])): one for name, one in changed.items()}}


def test_two_devices_differ_in_their_ordinal_only() -> None:
    first, second = list_devices()
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert replace(first, ordinal=0) == replace(second, ordinal=0)


def test_a_cache_on_the_other_device_is_refused_with_both_locations(held: Held, models: tuple[Model, Model]) -> None:
    elsewhere = models[1].new_kv_cache(ROWS)
    assert held.refuses(elsewhere) == RebindRefusal("RESIDENCY_DIFFERS", baked=FIRST, incoming=SECOND)
    message = str(held.session.rebind_kv(elsewhere))
    assert str(FIRST) in message
    assert str(SECOND) in message
    elsewhere.clear()
    assert held.refuses(elsewhere).kind == "RESIDENCY_DIFFERS"
    layer = elsewhere.layers[0]
    elsewhere.set_layer(0, KvLayer(*(fresh_copy(models[1].device, one) for one in (layer.k, layer.v))))
    assert held.refuses(elsewhere).kind == "RESIDENCY_DIFFERS"
    elsewhere.close()


def test_a_storage_from_outside_is_of_unknown_residency(one_path: Held) -> None:
    held, device = one_path, one_path.model.device
    kv = held.model.new_kv_cache(ROWS)
    own = kv.layers[1]
    kv.set_layer(1, KvLayer(own.k, outside_copy(device, own.v)))
    assert held.refuses(kv) == RebindRefusal("RESIDENCY_UNKNOWN", baked=FIRST)
    kv.clear()
    assert held.refuses(kv) == RebindRefusal("RESIDENCY_UNKNOWN", baked=FIRST)
    kv.set_layer(0, KvLayer(*(fresh_copy(device, one) for one in (kv.layers[0].k, kv.layers[0].v))))
    assert held.refuses(kv) == RebindRefusal("RESIDENCY_UNKNOWN", baked=FIRST)
    kv.set_layer(1, own)
    assert held.session.rebind_kv(kv) is None
    kv.close()


def test_a_plan_over_storages_from_outside_takes_no_other_cache(models: tuple[Model, Model]) -> None:
    model = models[0]
    kv, other = model.new_kv_cache(ROWS), model.new_kv_cache(ROWS)
    own = kv.layers[0]
    kv.set_layer(0, KvLayer(outside_copy(model.device, own.k), outside_copy(model.device, own.v)))
    with InferenceContext(model.device) as context:
        run = model.forward_with_kv_context_persistent
        logits = [run([token], kv, context) for token in (3, 5, 7)]
        np.testing.assert_array_equal(logits[-1], undisturbed(model, DecodeMode("captured", "device", "bounded")))
        session = taken(context)
        assert session.location is None
        assert session.rebind_kv(other) == RebindRefusal("RESIDENCY_UNKNOWN", incoming=FIRST)
        session.close()
    kv.close()
    other.close()


def test_a_source_that_vouches_wrongly_is_found_out(one_path: Held, models: tuple[Model, Model]) -> None:
    elsewhere, here = models[1].new_kv_cache(ROWS), models[0].new_kv_cache(ROWS)
    slot = elsewhere.rebind_slot(1, 0)
    refusal = one_path.refuses(Offer(slots_of(here, l1k=slot)))
    assert refusal == RebindRefusal("RESIDENCY_DIFFERS", 1, 0, FIRST, SECOND)
    outside = outside_copy(models[0].device, here.layers[1].k)
    refusal = one_path.refuses(Offer(slots_of(here, l1k=outside)))
    assert refusal == RebindRefusal("RESIDENCY_UNKNOWN", 1, 0, FIRST, None)
    refusal = one_path.refuses(Offer(slots_of(elsewhere), SECOND))
    assert refusal == RebindRefusal("RESIDENCY_DIFFERS", baked=FIRST, incoming=SECOND)
    elsewhere.close()
    here.close()


def test_the_same_device_opened_again_is_another_place(one_path: Held) -> None:
    with Device(0) as again:
        kv = KvCache(again, one_path.kv.geometry)
        assert one_path.refuses(kv).kind == "RESIDENCY_DIFFERS"


def test_slots_that_are_missing_closed_or_unbaked(one_path: Held) -> None:
    kv = one_path.model.new_kv_cache(ROWS)
    assert one_path.refuses(Offer(slots_of(kv, l1v=None))) == RebindRefusal("MISSING_SLOT", 1, 1)
    storage = kv.rebind_slot(0, 1)
    assert storage is not None
    storage.close()
    assert one_path.refuses(kv) == RebindRefusal("MISSING_SLOT", 0, 1)
    kv.close()
    kv = one_path.model.new_kv_cache(ROWS)
    session = one_path.session
    whole, node = session._base_cache, session.kv_nodes[1][0]
    session._base_cache = StorageCache({one: whole[one] for one in whole if one != node})
    refusal = session.rebind_kv(kv)
    assert refusal is not None
    assert (refusal.kind, refusal.layer, refusal.which) == ("UNBAKED_SLOT", 1, 0)
    session._base_cache = whole
    assert session.rebind_kv(kv) is None
    kv.close()


@pytest.mark.parametrize(
    "difference", ["dtype", "encoding", "bundled", "less", "more", "same twice", "in part the same"]
)
def test_storages_that_are_not_interchangeable(one_path: Held, difference: str) -> None:
    device, kv = one_path.model.device, one_path.model.new_kv_cache(ROWS)
    size = kv.geometry.nbytes
    odd = {
        "dtype": lambda: device.allocate_parts(1, size, DType.F16)[0],
        "encoding": lambda: device.allocate_parts(1, size, DType.F32, "tiles8")[0],
        "bundled": lambda: device.allocate(size, DType.F32),
        "less": lambda: device.allocate_parts(1, size - 16, DType.F32)[0],
        "more": lambda: device.allocate_parts(1, size + 16, DType.F32)[0],
        "same twice": lambda: kv.layers[0].k,
        "in part the same": lambda: kv.layers[0].k.whole.part(16, size),
    }[difference]()
    refusal = one_path.refuses(Offer(slots_of(kv, l1v=odd)))
    assert (refusal.kind, refusal.layer, refusal.which) == ("STORAGE_DIFFERS", 1, 1)
    kv.close()


def test_a_step_over_a_cache_on_the_other_device_is_an_error(models: tuple[Model, Model]) -> None:
    here, elsewhere = models[0].new_kv_cache(ROWS), models[1].new_kv_cache(ROWS)
    with InferenceContext(models[0].device) as context:
        run = models[0].forward_with_kv_context_persistent
        run([3], here, context)
        before = replace(context.stats)
        steps: tuple[Callable[[], Logits], ...] = (
            lambda: run([5], elsewhere, context),
            lambda: run([5, 6], elsewhere, context),
            lambda: run([5], elsewhere, context, DecodeMode("rebuild")),
            lambda: models[0].forward([5], elsewhere),
            lambda: models[1].forward_with_kv_context_persistent([5], elsewhere, context),
        )
        for step in steps:
            with pytest.raises(InvalidInputError, match=r"vulkan:1|Device\(1"):
                step()
        assert context.stats == before
        assert elsewhere.cached_len == 0
        run([5], here, context)
        np.testing.assert_array_equal(run([7], here, context), undisturbed(models[0], DecodeMode()))
        assert context.stats.plans_built == 1
    here.close()
    elsewhere.close()


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_models_on_both_devices_decode_in_turn(models: tuple[Model, Model], path: tuple[str, str]) -> None:
    mode, alone = DecodeMode("captured", *path), []
    tokens = [(3, 20), (5, 21), (7, 22)]
    for at, model in enumerate(models):
        with InferenceContext(model.device) as context:
            kv = model.new_kv_cache(ROWS)
            alone.append([model.forward_with_kv_context_persistent([pair[at]], kv, context, mode) for pair in tokens])
            kv.close()
    contexts = [InferenceContext(model.device) for model in models]
    caches = [model.new_kv_cache(ROWS) for model in models]
    for number, pair in enumerate(tokens):
        for at, model in enumerate(models):
            logits = model.forward_with_kv_context_persistent([pair[at]], caches[at], contexts[at], mode)
            np.testing.assert_array_equal(logits, alone[at][number])
    for context, kv in zip(contexts, caches, strict=True):
        assert context.stats.plans_built == 1
        context.close()
        kv.close()


def test_interleavings_over_both_devices(devices: tuple[Device, Device]) -> None:
    world = World(devices)
    world.load()
    run_scripted(world, ("device", "bounded"))
    run_machine(world, examples=4, steps=25)
    world.close()
