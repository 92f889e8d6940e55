"""The KV cache: its allocation id, its length, and what may be put into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from stepping import furthest, one_by_one, run, token_ids

from vkdecode.decode import MAX_LANDING_ROWS, InferenceContext, KvCache, KvGeometry, KvLayer
from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu import Device, read_words
from vkdecode.models import Model
from vkdecode.weights import DType

EXACT = 1e-4


@pytest.fixture
def kv(llama: Model) -> Iterator[KvCache]:
    with closing(llama.new_kv_cache(12)) as made:
        yield made


def test_a_new_cache_is_empty_and_on_its_device(llama: Model, kv: KvCache) -> None:
    assert (kv.cached_len, kv.max_seq_len, kv.dtype) == (0, 12, "f32")
    assert kv.device_location == kv.rebind_location() == llama.device.location
    assert kv.geometry == KvGeometry(2, 2, 12, 16, DType.F32)
    assert "0 of 12 rows" in repr(kv)


@pytest.mark.parametrize("length", [1, 12, 63, 64, 65, 300])
def test_landing_rows_lie_behind_the_rows_of_the_conversation(length: int) -> None:
    geometry = KvGeometry(2, 2, length, 16, DType.F16)
    assert geometry.rows == length + min(length, MAX_LANDING_ROWS)
    assert geometry.shape == (2, geometry.rows, 16)
    assert geometry.row_bytes == 2 * 16 * 2
    assert geometry.nbytes == geometry.rows * geometry.row_bytes


def test_the_longest_cache_within_so_many_bytes_is_found() -> None:
    for nbytes in range(0, 300 * 64, 48):
        fitting = [length for length in range(300) if KvGeometry(2, 2, length, 16, DType.F16).nbytes <= nbytes]
        assert KvGeometry(2, 2, 7, 16, DType.F16).max_len_within(nbytes) == max(fitting)


def test_every_cache_has_an_id_of_its_own(llama: Model) -> None:
    ids = []
    for _ in range(4):
        with closing(llama.new_kv_cache(4)) as made:
            ids.append(made.alloc_id)
    assert len(set(ids)) == 4


def test_slots_are_k_and_v_of_each_layer(kv: KvCache) -> None:
    slots = [kv.rebind_slot(layer, which) for layer in range(2) for which in range(2)]
    assert slots == [one for layer in kv.layers for one in (layer.k, layer.v)]
    assert len({id(one) for one in slots}) == 4
    for layer, which in ((2, 0), (-1, 0), (0, 2), (0, -1)):
        assert kv.rebind_slot(layer, which) is None


def test_truncating_keeps_the_id_and_the_rows(llama: Model, kv: KvCache) -> None:
    ids = list(token_ids(6, llama.vocab_size))
    with InferenceContext(llama.device) as context:
        wanted = one_by_one(llama, ids, kv, context)
        alloc = kv.alloc_id
        kv.truncate_to(6)
        kv.truncate_to(2)
        assert (kv.cached_len, kv.alloc_id) == (2, alloc)
        assert np.array_equal(run(llama, [ids[2]], kv, context), wanted[2])


@pytest.mark.parametrize("length", [-1, 4, 100, 1.5, 2.0, "1", None, True])
def test_truncating_to_what_is_not_there_is_refused(llama: Model, kv: KvCache, length: Any) -> None:
    llama.forward([1, 2, 3], kv)
    with pytest.raises(InvalidInputError, match="truncate"):
        kv.truncate_to(length)
    assert kv.cached_len == 3


def test_clearing_forgets_everything(llama: Model, kv: KvCache) -> None:
    first = llama.forward([1], kv)
    llama.forward([2, 3], kv)
    kv.clear()
    assert kv.cached_len == 0
    assert furthest(llama.forward([1], kv), first) <= EXACT


def test_a_layer_that_does_not_fit_is_refused_and_nothing_is_changed(llama: Model, kv: KvCache) -> None:
    device, size = llama.device, kv.geometry.nbytes
    good = [device.allocate(size, DType.F32) for _ in range(2)]
    alloc, layers = kv.alloc_id, kv.layers
    closed = device.allocate(size, DType.F32)
    closed.close()
    wrong = {
        "no layer": (2, KvLayer(*good)),
        "negative": (-1, KvLayer(*good)),
        "half precision": (0, KvLayer(good[0], device.allocate(size, DType.F16))),
        "size": (0, KvLayer(device.allocate(size + 16, DType.F32), good[1])),
        "one storage for both": (0, KvLayer(good[0], good[0])),
        "the other layer's": (0, KvLayer(good[0], layers[1].v)),
        "some bytes of the other layer's": (0, KvLayer(good[0], layers[1].v.whole.part(size - 16, size))),
        "closed": (0, KvLayer(good[0], closed)),
    }
    for index, layer in wrong.values():
        with pytest.raises((InvalidInputError, ClosedError)):
            kv.set_layer(index, layer)
        assert kv.alloc_id == alloc
        assert kv.layers == layers
    kv.set_layer(0, KvLayer(*good))
    assert kv.layers == (KvLayer(*good), layers[1])


def test_rows_of_a_layer_travel_with_it(llama: Model, kv: KvCache) -> None:
    ids = list(token_ids(6, llama.vocab_size))
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(12)) as other:
        wanted = one_by_one(llama, ids, kv, context)
        one_by_one(llama, ids[:5], other, context)
        for index, layer in enumerate(kv.layers):
            other.set_layer(index, layer)
        assert np.array_equal(run(llama, [ids[5]], other, context), wanted[5])


def test_rows_lie_as_the_geometry_says(llama: Model, kv: KvCache) -> None:
    llama.forward([1, 2, 3], kv)
    words = [read_words(llama.device, layer.k).view(np.float32).reshape(kv.geometry.shape) for layer in kv.layers]
    with closing(llama.new_kv_cache(30)) as larger:
        llama.forward([1, 2, 3], larger)
        shape = larger.geometry.shape
        for layer, rows in zip(larger.layers, words, strict=True):
            same = read_words(llama.device, layer.k).view(np.float32).reshape(shape)[:, :3]
            assert np.array_equal(same, rows[:, :3])
            assert np.abs(same).max() > 0


def test_a_closed_cache_is_of_no_use_and_gives_its_memory_back(llama: Model) -> None:
    before = llama.device.allocated_bytes
    kv = llama.new_kv_cache(12)
    assert llama.device.allocated_bytes == before + 4 * kv.geometry.nbytes
    kv.close()
    kv.close()
    assert kv.closed
    assert llama.device.allocated_bytes == before
    for use in (kv.clear, lambda: kv.truncate_to(0), lambda: llama.forward([1], kv)):
        with pytest.raises(ClosedError, match="KV cache was closed"):
            use()
    assert kv.device_location is None
    assert kv.rebind_slot(0, 0) is None


def test_a_cache_dies_with_its_device(llama: Model) -> None:
    with Device(0) as own:
        kv = KvCache(own, llama.kv_geometry(4, "f32"))
        assert not kv.closed
    assert kv.closed
    with pytest.raises(ClosedError):
        kv.clear()


@pytest.mark.parametrize("dtype", [DType.BF16, DType.U32])
def test_only_f32_and_f16_can_be_cached(device: Device, dtype: DType) -> None:
    with pytest.raises(InvalidInputError, match="f32 or f16"):
        KvCache(device, KvGeometry(1, 1, 4, 16, dtype))
