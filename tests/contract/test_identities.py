"""Plans are kept and dropped by what they bake: models, angles, lengths, and many requests over few caches."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from stepping import kept
from tiny_llama import PATHS, TINY, changed_copy

from vkdecode.decode import DecodeMode, InferenceContext, KvCache
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.weights import open_weights

Logits = NDArray[np.float32]
ROWS = 24
CAPTURED = DecodeMode("captured")


def decode(
    model: Model, tokens: Sequence[int], kv: KvCache, context: InferenceContext, mode: DecodeMode = CAPTURED
) -> Logits:
    """Logits of single steps, [tokens, vocab]."""
    return np.stack([model.forward_with_kv_context_persistent([token], kv, context, mode) for token in tokens])


def anew(model: Model, tokens: Sequence[int], mode: DecodeMode = CAPTURED) -> Logits:
    """The same from the rebuild rung."""
    kv = model.new_kv_cache(ROWS)
    with InferenceContext(model.device) as context:
        logits = decode(model, tokens, kv, context, replace(mode, rung="rebuild"))
    kv.close()
    return logits


@pytest.fixture
def context(device: Device) -> Iterator[InferenceContext]:
    with InferenceContext(device) as made:
        yield made


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_models_of_equal_geometry_are_not_confused(
    device: Device, llama: Model, context: InferenceContext, path: tuple[str, str]
) -> None:
    mode, tokens = DecodeMode("captured", *path), (3, 5, 7)
    with load(TINY / "llama-rope-linear", device=device) as other, load(TINY / "llama", device=device) as same:
        models = (llama, other, same)
        assert other.kv_geometry(ROWS, "f32") == llama.kv_geometry(ROWS, "f32")
        assert len({model.shape_key for model in models}) == 3
        caches = [model.new_kv_cache(ROWS) for model in models]
        expected = [anew(model, tokens, mode) for model in models]
        assert not np.array_equal(expected[0], expected[1])
        for number, token in enumerate(tokens):
            for model, kv, logits in zip(models, caches, expected, strict=True):
                np.testing.assert_array_equal(decode(model, [token], kv, context, mode)[0], logits[number])
        # A plan bakes its model's weights: every change of model costs a plan, even where the weights are equal.
        assert context.stats.plans_built == 9
        assert context.stats.rebinds == context.stats.rebinds_refused == 0
        for kv in caches:
            kv.close()


def test_models_of_equal_geometry_over_one_cache(device: Device, llama: Model, context: InferenceContext) -> None:
    with load(TINY / "llama-rope-linear", device=device) as other:
        kv = llama.new_kv_cache(ROWS)
        for model in (llama, other, llama):
            np.testing.assert_array_equal(decode(model, (3, 5), kv, context), anew(model, (3, 5)))
            kv.truncate_to(0)
        assert (context.stats.plans_built, context.stats.rebinds) == (3, 0)
        kv.close()


def test_a_model_loaded_at_the_address_of_a_freed_one(device: Device, context: InferenceContext) -> None:
    model = load(TINY / "llama", device=device)
    address, key = id(model), model.shape_key
    kv = model.new_kv_cache(ROWS)
    decode(model, (3, 5), kv, context)
    model.close()
    del model
    gc.collect()
    assert context.has_decode_session
    model = model_at(address, "llama-rope-linear", device)
    assert id(model) == address
    assert model.shape_key != key
    kv.truncate_to(0)
    np.testing.assert_array_equal(decode(model, (3, 5), kv, context), anew(model, (3, 5)))
    assert (context.stats.plans_built, context.stats.rebinds) == (2, 0)
    model.close()
    kv.close()


def model_at(address: int, name: str, device: Device) -> Model:
    """A model in memory that was just freed: empty objects are made until one lies there."""
    empty: list[Model] = []
    while not empty or id(empty[-1]) != address:
        assert len(empty) < 10_000, "the freed address was not used again"
        empty.append(Model.__new__(Model))
    source = open_weights(TINY / name)
    try:
        Model.__init__(empty[-1], source, device)
    finally:
        source.close()
    return empty[-1]


def test_other_rope_frequencies_need_no_other_plan(
    device: Device, tmp_path_factory: pytest.TempPathFactory, context: InferenceContext
) -> None:
    folder = changed_copy(
        tmp_path_factory.mktemp("rope") / "model",
        config={"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}},
    )
    tokens = (3, 5, 7)
    with load(TINY / "llama", device=device) as model, load(folder, device=device) as turned:
        kv, expected = model.new_kv_cache(ROWS), anew(turned, tokens)
        assert not np.array_equal(anew(model, tokens), expected)
        np.testing.assert_array_equal(decode(model, tokens, kv, context), anew(model, tokens))
        key, session = model.shape_key, kept(context)
        model._rope_rows = turned._rope_rows
        kv.truncate_to(0)
        np.testing.assert_array_equal(decode(model, tokens, kv, context), expected)
        assert model.shape_key == key
        assert kept(context) is session
        stats = context.stats
        assert (stats.plans_built, stats.recordings_made, stats.rebinds, stats.tokens_replayed) == (1, 1, 0, 6)
        kv.close()


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_a_truncated_cache_keeps_its_plan(llama: Model, context: InferenceContext, path: tuple[str, str]) -> None:
    mode, kv = DecodeMode("captured", *path), llama.new_kv_cache(ROWS)
    decode(llama, (3, 5, 7, 11), kv, context, mode)
    alloc_id = kv.alloc_id
    for rows, tokens in ((2, (3, 5)), (0, ()), (0, ())):
        kv.truncate_to(rows)
        np.testing.assert_array_equal(
            decode(llama, (13, 17), kv, context, mode), anew(llama, (*tokens, 13, 17), mode)[rows:]
        )
    assert kv.alloc_id == alloc_id
    stats = context.stats
    assert (stats.plans_built, stats.rebinds, stats.rebinds_refused) == (1, 0, 0)
    if path != ("symenv", "bounded"):
        assert stats.recordings_made == 1
        assert stats.tokens_replayed == 10
    kv.close()


class Slots:
    """A server's pool: caches that requests take in turn, each with a context of its own or all with one."""

    def __init__(self, model: Model, caches: int, contexts: int) -> None:
        self.model = model
        self.caches = [model.new_kv_cache(ROWS) for _ in range(caches)]
        self.contexts = [InferenceContext(model.device) for _ in range(contexts)]

    def request(self, number: int, fresh_allocation: bool = False) -> Logits:
        """A prompt of three tokens and two decoded ones; logits of all three steps."""
        kv, context = self.caches[number % len(self.caches)], self.contexts[number % len(self.contexts)]
        if fresh_allocation:
            kv.clear()
        else:
            kv.truncate_to(0)
        steps = request_steps(number, self.model.vocab_size)
        return np.stack([self.model.forward_with_kv_context_persistent(step, kv, context) for step in steps])

    def total(self, counter: str) -> int:
        return sum(int(getattr(context.stats, counter)) for context in self.contexts)

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        for kv in self.caches:
            kv.close()


def request_steps(number: int, vocab_size: int) -> list[list[int]]:
    first, second, third, fourth, fifth = np.random.default_rng(number).integers(0, vocab_size, 5).tolist()
    return [[first, second, third], [fourth], [fifth]]


@functools.cache
def fresh(model: Model, number: int) -> Logits:
    """A request's logits from a cache and a context that served nothing before."""
    pool = Slots(model, 1, 1)
    logits = pool.request(number)
    pool.close()
    return logits


def test_five_hundred_requests_build_no_plan_after_the_first_four(llama: Model) -> None:
    pool = Slots(llama, 4, 4)
    for number in range(4):
        np.testing.assert_array_equal(pool.request(number), fresh(llama, number))
    assert (pool.total("plans_built"), pool.total("prefill_plans_built")) == (4, 4)
    for number in range(4, 500):
        logits = pool.request(number)
        if number % 250 in (7, 8):
            np.testing.assert_array_equal(logits, fresh(llama, number))
    assert (pool.total("plans_built"), pool.total("prefill_plans_built")) == (4, 4)
    assert (pool.total("recordings_made"), pool.total("prefill_recordings_made")) == (4, 4)
    assert (pool.total("tokens_replayed"), pool.total("prefill_replays")) == (1000, 500)
    assert (pool.total("rebinds"), pool.total("rebinds_refused")) == (0, 0)
    pool.close()


def test_a_cleared_cache_costs_a_rebind_and_no_plan(llama: Model) -> None:
    pool = Slots(llama, 4, 4)
    for number in range(12):
        logits = pool.request(number, fresh_allocation=True)
        if number % 4 == 0:
            np.testing.assert_array_equal(logits, fresh(llama, number))
    # Eight requests came to a slot that had served; each re-binds the decode and the prefill plan.
    assert (pool.total("plans_built"), pool.total("prefill_plans_built")) == (4, 4)
    assert (pool.total("rebinds"), pool.total("rebinds_refused")) == (16, 0)
    pool.close()


def test_one_context_serves_four_caches_by_rebinding(llama: Model) -> None:
    pool = Slots(llama, 4, 1)
    for number in range(20):
        logits = pool.request(number)
        if number % 4 == 0:
            np.testing.assert_array_equal(logits, fresh(llama, number))
    assert (pool.total("plans_built"), pool.total("prefill_plans_built")) == (1, 1)
    assert (pool.total("rebinds"), pool.total("rebinds_refused")) == (2 * 19, 0)
    assert (pool.total("recordings_made"), pool.total("tokens_replayed")) == (20, 40)
    pool.close()
