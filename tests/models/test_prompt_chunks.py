"""Prompts of every length give what single tokens give, whatever chunks they are cut into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from stepping import Logits, furthest, one_by_one, run, token_ids
from tiny_llama import PATHS

from vkdecode.decode import DecodeMode, InferenceContext, KvCache
from vkdecode.decode.step import CHUNK_SIZES
from vkdecode.errors import ContextLengthError
from vkdecode.gpu import Device
from vkdecode.models import Model

LONGEST = 300
LENGTHS = (1, 2, 15, 16, 17, 24, 63, 64, 65, 80, 255, 256, 257, LONGEST)
ROUNDING = 1e-4

Case = tuple[DecodeMode, InferenceContext, KvCache, Logits]


@pytest.fixture(params=PATHS, ids="-".join, scope="module")
def case(request: pytest.FixtureRequest, chunk_model: Model) -> Iterator[Case]:
    """A mode, a context and cache for prompts, and the logits of every token run on its own."""
    mode = DecodeMode("captured", *request.param)
    with InferenceContext(chunk_model.device) as context:
        kv = chunk_model.new_kv_cache(LONGEST + 4)
        reference = one_by_one(chunk_model, ids_of(chunk_model), kv, context, mode)
        kv.truncate_to(0)
        yield mode, context, kv, reference
        kv.close()


@pytest.fixture(scope="module")
def chunk_model(tiny_models: Callable[..., Model], device: Device) -> Model:
    return tiny_models("llama", device)


def ids_of(model: Model) -> list[int]:
    return list(token_ids(LONGEST + 4, model.vocab_size))


def test_the_lengths_meet_every_chunk_size() -> None:
    assert CHUNK_SIZES == (16, 64, 256)
    assert {size + more for size in CHUNK_SIZES for more in (-1, 0, 1)} <= set(LENGTHS)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_gives_the_logits_of_its_last_token_and_leaves_its_rows(
    chunk_model: Model, case: Case, length: int
) -> None:
    mode, context, kv, reference = case
    ids = ids_of(chunk_model)
    kv.truncate_to(0)
    assert furthest(run(chunk_model, ids[:length], kv, context, mode), reference[length - 1]) <= ROUNDING
    assert kv.cached_len == length
    after = run(chunk_model, [ids[length]], kv, context, mode)
    assert furthest(after, reference[length]) <= ROUNDING


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_all_logits_of_a_prompt(chunk_model: Model, case: Case, length: int) -> None:
    mode, context, kv, reference = case
    kv.truncate_to(0)
    logits = run(chunk_model, ids_of(chunk_model)[:length], kv, context, mode, "all")
    assert furthest(logits, reference[:length]) <= ROUNDING


def test_prompts_follow_what_the_cache_holds(chunk_model: Model, case: Case) -> None:
    mode, context, kv, reference = case
    ids = ids_of(chunk_model)
    kv.truncate_to(0)
    done = 0
    for length in (3, 1, 17, 64, 1, 30, 2):
        logits = run(chunk_model, ids[done : done + length], kv, context, mode)
        done += length
        assert furthest(logits, reference[done - 1]) <= ROUNDING
        assert kv.cached_len == done


@pytest.mark.parametrize("length", [2, 15, 17, 65])
def test_a_prompt_that_fills_the_cache_writes_no_row_beyond_it(chunk_model: Model, case: Case, length: int) -> None:
    mode, _, _, reference = case
    ids = ids_of(chunk_model)
    with InferenceContext(chunk_model.device) as context, closing(chunk_model.new_kv_cache(length)) as kv:
        run(chunk_model, ids[:length], kv, context, mode)
        assert kv.cached_len == kv.max_seq_len
        # A row too many would land on the first rows of the next head.
        kv.truncate_to(length - 1)
        again = run(chunk_model, [ids[length - 1]], kv, context, mode)
        assert furthest(again, reference[length - 1]) <= ROUNDING
        with pytest.raises(ContextLengthError):
            run(chunk_model, [0], kv, context, mode)


def test_each_chunk_size_is_planned_and_recorded_once(chunk_model: Model) -> None:
    ids = ids_of(chunk_model)
    with InferenceContext(chunk_model.device) as context, closing(chunk_model.new_kv_cache(LONGEST)) as kv:
        for length in (10, 16, 12, 9):
            kv.truncate_to(0)
            run(chunk_model, ids[:length], kv, context)
        stats = context.stats
        assert (stats.prefill_plans_built, stats.prefill_recordings_made, stats.prefill_replays) == (1, 1, 4)
        kv.truncate_to(0)
        run(chunk_model, ids[:LONGEST], kv, context)
        # 256 tokens without logits, and 44 in a chunk of 64 with those of the last one.
        assert (stats.prefill_plans_built, stats.prefill_replays) == (3, 6)
        assert (stats.plans_built, stats.tokens_replayed) == (0, 0)


def test_a_prompt_in_chunks_is_the_same_on_every_rung(chunk_model: Model) -> None:
    ids = ids_of(chunk_model)[:270]
    results = []
    for rung in ("captured", "held", "rebuild"):
        with InferenceContext(chunk_model.device) as context, closing(chunk_model.new_kv_cache(271)) as kv:
            mode = DecodeMode(rung)
            results.append(np.stack([run(chunk_model, part, kv, context, mode) for part in (ids, ids[:1])]))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
