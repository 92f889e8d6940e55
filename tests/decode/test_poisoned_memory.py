"""Nothing relies on zeroed memory: with NaN in every fresh storage the golden logits still hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from poison import POISON, poison_fresh_memory
from stepping import furthest, one_by_one, run
from tiny_llama import PATHS, TINY, golden

from vkdecode.decode import DecodeMode, InferenceContext
from vkdecode.gpu import Device, StorageKind, read_words
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.weights.dtypes import DType

EXACT = 1e-4
F16_KV = 2e-2


@pytest.fixture(params=["subgroup", "shared"], scope="module")
def poisoned(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device whose fresh storages hold NaN, weights and caches included."""
    with pytest.MonkeyPatch.context() as patch, Device(0, lanes=request.param) as device:
        sizes = poison_fresh_memory(patch)
        yield device
        assert len(sizes) > 10


@pytest.fixture(params=["llama", "phi", "qwen2_moe"], scope="module")
def model(request: pytest.FixtureRequest, poisoned: Device) -> Iterator[Model]:
    with load(TINY / request.param, device=poisoned) as loaded:
        yield loaded


def paths_of(model: Model) -> tuple[tuple[str, str], ...]:
    """All paths of one model; of the others, whose attention is the same, one of each KV offset."""
    return PATHS if model.path.name == "llama" else PATHS[:3:2]


@pytest.mark.parametrize("kind", StorageKind)
def test_fresh_memory_is_poisoned_on_both_sides(poisoned: Device, kind: StorageKind) -> None:
    storage = poisoned.allocate(64, DType.F32, kind)
    assert (read_words(poisoned, storage) == POISON).all()
    if kind is not StorageKind.DEVICE:
        assert np.isnan(storage.data).all()


def test_the_reference_holds_in_prompt_and_decode(model: Model) -> None:
    """The prompt's second chunk has room to spare: its last rows are no tokens."""
    reference = golden(model.path.name)
    for path in paths_of(model):
        mode = DecodeMode("captured", *path)
        with InferenceContext(model.device) as context, closing(model.new_kv_cache(64)) as kv:
            prompt = run(model, reference.input_ids, kv, context, mode, "all")
            assert furthest(prompt, reference.logits) <= EXACT, path
            decoded = one_by_one(model, reference.decode_ids[:4], kv, context, mode)
            assert furthest(decoded, reference.decode_logits[:4]) <= EXACT, path


def test_so_it_does_with_a_cache_of_16_bits_and_without_fusions(model: Model) -> None:
    reference = golden(model.path.name)
    for path in PATHS[:3:2]:
        mode = DecodeMode("held", *path)
        with InferenceContext(model.device, fusions=()) as context, closing(model.new_kv_cache(40, "f16")) as kv:
            last = run(model, reference.input_ids, kv, context, mode)
            assert furthest(last, reference.logits[-1]) <= F16_KV, path
            decoded = one_by_one(model, reference.decode_ids[:2], kv, context, mode)
            assert furthest(decoded, reference.decode_logits[:2]) <= F16_KV, path


def test_a_prepared_plan_has_touched_no_row(model: Model) -> None:
    reference = golden(model.path.name)
    with InferenceContext(model.device) as context, closing(model.new_kv_cache(40)) as kv:
        for tokens in (24, 1):
            model.prepare(kv, context, tokens)
        assert all((read_words(model.device, one) == POISON).all() for layer in kv.layers for one in (layer.k, layer.v))
        assert furthest(run(model, reference.input_ids, kv, context), reference.logits[-1]) <= EXACT
