"""Plans of one context hold their activations and results in the same storages: they never run at the same time."""

from __future__ import annotations

import gc
from contextlib import closing

import numpy as np
import pytest
from stepping import Logits, kept, run, taken, token_ids
from tiny_llama import PATHS

from vkdecode.decode import DecodeMode, DecodeSession, InferenceContext, KvCache
from vkdecode.gpu import Storage
from vkdecode.models import Model

# 256 tokens without logits and 64, 256 with logits, 64, single tokens in between.
LENGTHS = (276, 1, 250, 20, 1, 276, 250, 1)


def memory(session: DecodeSession) -> set[Storage]:
    """What a plan uses beside weights, caches and the data of a step."""
    executable = session.executable
    return {*executable.arenas, *map(executable.storage, executable.plan.results)}


def one_prompt(model: Model, length: int, kv: KvCache, context: InferenceContext, mode: DecodeMode) -> Logits:
    kv.truncate_to(0)
    return run(model, token_ids(length, model.vocab_size), kv, context, mode)


@pytest.mark.parametrize("path", [PATHS[0], PATHS[2]], ids="-".join)
def test_plans_that_share_give_what_plans_alone_give(llama: Model, path: tuple[str, str]) -> None:
    mode = DecodeMode("captured", *path)
    alone: dict[int, Logits] = {}
    with closing(llama.new_kv_cache(300)) as kv, InferenceContext(llama.device) as together:
        for length in LENGTHS:
            if length not in alone:
                with InferenceContext(llama.device) as context:
                    alone[length] = one_prompt(llama, length, kv, context, mode)
            np.testing.assert_array_equal(one_prompt(llama, length, kv, together, mode), alone[length])
        sessions = [kept(together), *together.held.values()]
        rooms = [1, 64, 256, 256] if path[0] == "device" else [1, 64, 64]
        assert sorted(one.seq for one in sessions) == rooms
        large = [memory(one) for one in sessions if one.seq == max(rooms)]
        assert large[0] & large[1]
        # A result of one kind and size is the same storage for all, the decode plan's too.
        ends = [one.executable.storage(one.logits_node) for one in sessions if one.top_k_nodes]
        assert len(ends) == len(sessions) - 1 and len(set(ends)) == 1


def test_an_arena_of_the_largest_plan_serves_the_smaller_ones(llama: Model) -> None:
    with closing(llama.new_kv_cache(300)) as kv, InferenceContext(llama.device) as context:
        for length in (250, 20, 1):
            one_prompt(llama, length, kv, context, DecodeMode())
        sessions = [kept(context), *context.held.values()]
        assert sorted(one.seq for one in sessions) == [1, 256]
        run(llama, [1, 2, 3], kv, context, logits="all")
        sessions = [kept(context), *context.held.values()]
        assert sorted(one.seq for one in sessions) == [1, 16, 256]
        assert len({one.executable.arenas for one in sessions}) == 1
        with InferenceContext(llama.device) as other:
            one_prompt(llama, 1, kv, other, DecodeMode())
            assert memory(kept(other)).isdisjoint(memory(kept(context)))


def test_results_that_were_read_outlive_the_next_plan(llama: Model) -> None:
    """What a step returns is a copy: the storage it was read from is another plan's a moment later."""
    with closing(llama.new_kv_cache(64)) as kv, InferenceContext(llama.device) as context:
        first = one_prompt(llama, 20, kv, context, DecodeMode())
        best = llama.top_candidates([3], kv, context, 5)
        held = [one.copy() for one in (first, best.token_ids, best.logits)]
        second = one_prompt(llama, 1, kv, context, DecodeMode())
        llama.top_candidates([7, 8, 9], kv, context, 5)
        for one, was in zip((first, best.token_ids, best.logits), held, strict=True):
            np.testing.assert_array_equal(one, was)
        assert not np.array_equal(first, second)


def test_a_closed_plan_leaves_the_others_running(llama: Model) -> None:
    mode = DecodeMode()
    with closing(llama.new_kv_cache(300)) as kv, InferenceContext(llama.device) as context:
        wanted = {length: one_prompt(llama, length, kv, context, mode) for length in (250, 1)}
        large = memory(next(iter(context.held.values())))
        decode = taken(context)
        assert memory(decode) & large
        decode.close()
        del decode
        gc.collect()
        assert not any(one.closed for one in large)
        np.testing.assert_array_equal(one_prompt(llama, 250, kv, context, mode), wanted[250])
        for session in context.held.values():
            session.close()
        context.held.clear()
        np.testing.assert_array_equal(one_prompt(llama, 1, kv, context, mode), wanted[1])


def test_shared_memory_is_given_back_with_the_last_plan(llama: Model) -> None:
    with closing(llama.new_kv_cache(300)) as kv:
        gc.collect()
        before = llama.device.allocated_bytes
        context = InferenceContext(llama.device)
        for length in (276, 1):
            one_prompt(llama, length, kv, context, DecodeMode())
        sessions = [*context.held.values(), taken(context)]
        context.held.clear()
        arena = max((one for session in sessions for one in session.executable.arenas), key=lambda one: one.nbytes)
        size = arena.nbytes
        del arena
        left = [llama.device.allocated_bytes]
        while sessions:
            session = sessions.pop(0)
            data = session.base_cache[session.token_ids_node].whole.nbytes
            session.close()
            gc.collect()
            left.append(llama.device.allocated_bytes)
            # Each gives back its data, in device memory and in the staging buffer; the last one the arena too.
            gone = left[-2] - left[-1]
            assert gone >= 2 * data + (0 if sessions else size)
            assert sessions == [] or gone < size
            del session
        assert left[-1] == before
