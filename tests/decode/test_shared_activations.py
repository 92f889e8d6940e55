"""Prompt plans of one context hold their activations in the same storages: they never run at the same time."""

from __future__ import annotations

import gc
from contextlib import closing

import numpy as np
from stepping import run, token_ids

from vkdecode.decode import DecodeSession
from vkdecode.gpu import Device, Storage
from vkdecode.models import Model
from vkdecode.decode import InferenceContext
from vkdecode.runtime.slots import SlotPool

LENGTHS = (276, 250, 20, 276, 250)  # 256 tokens without logits and 64, 256 with logits, 64


def slots(session: DecodeSession) -> list[Storage]:
    executable = session.executable
    return list({id(one): one for one in map(executable.storage, executable.plan.slots)}.values())


def test_plans_that_share_give_what_plans_alone_give(llama: Model) -> None:
    prompts = {length: [int(one) for one in token_ids(length, llama.vocab_size)] for length in LENGTHS}
    with closing(llama.new_kv_cache(300)) as kv, InferenceContext(llama.device) as together:
        for length in LENGTHS:
            kv.truncate_to(0)
            found = run(llama, prompts[length], kv, together)
            with InferenceContext(llama.device) as alone:
                kv.truncate_to(0)
                np.testing.assert_array_equal(found, run(llama, prompts[length], kv, alone))
        sessions = [one for one in together.held.values() if isinstance(one, DecodeSession)]
        assert sorted(one.seq for one in sessions) == [64, 256, 256]
        large = [set(map(id, slots(one))) for one in sessions if one.seq == 256]
        assert large[0] & large[1]
        run(llama, [1], kv, together)
        decode = together.take_decode_session()
        # A decode session can be taken out of its context, so its activations are its own.
        own = set(map(id, slots(decode)))
        assert all(own.isdisjoint(map(id, slots(one))) for one in sessions)
        decode.close()


def test_shared_memory_is_given_back_with_the_last_plan(llama: Model) -> None:
    with closing(llama.new_kv_cache(300)) as kv:
        gc.collect()
        before = llama.device.allocated_bytes
        context = InferenceContext(llama.device)
        run(llama, [int(one) for one in token_ids(276, llama.vocab_size)], kv, context)
        both = llama.device.allocated_bytes
        key, first = next((key, one) for key, one in context.held.items() if isinstance(one, DecodeSession))
        del context.held[key]
        first.close()
        del first
        gc.collect()
        assert before < llama.device.allocated_bytes < both
        run(llama, [1, 2, 3], kv, context)  # through what is left
        context.close()
        del context
        gc.collect()
        assert llama.device.allocated_bytes == before


def test_a_pool_gives_no_plan_the_same_storage_twice(device: Device) -> None:
    pool = SlotPool(device)
    first = pool.take([16, 32, 16])
    assert [one.nbytes for one in first] == [16, 32, 16]
    assert len({id(one) for one in first}) == 3
    second = pool.take([16, 16, 16])
    assert [second[0] is first[0], second[1] is first[2]] == [True, True]
    assert len({id(one) for one in second}) == 3
    del first, second
    gc.collect()
    before = device.allocated_bytes
    again = pool.take([16])
    assert device.allocated_bytes == before + 32  # with its host-visible twin
    again[0].close()
