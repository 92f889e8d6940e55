"""A tiny model on the second driver; `test_second_driver.py` runs these in a process that has no other.

That driver has no cache of its own and compiles a prompt's kernels for seconds: one path runs a prompt at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from poison import poison_cache
from rungs import REGRESSION
from stepping import furthest, one_by_one, run
from tiny_llama import PATHS, golden

from vkdecode.decode import DecodeMode, InferenceContext
from vkdecode.gpu import Device, lanes_of, run_self_check
from vkdecode.models import Model

TinyModels = Callable[..., Model]

TOKENS = 6
F16_KV = 2e-2


def test_the_driver_is_swiftshader_and_passes_its_check(device: Device) -> None:
    assert "SwiftShader" in device.info.name
    assert (lanes_of(device).form, lanes_of(device).tile) == ("subgroup", 4)
    found = run_self_check(device, 256)
    assert (found.subgroup, found.shared, found.numbers, found.details) == (True, True, True, ())


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_all_rungs_give_the_reference_and_agree_to_the_bit(
    tiny_models: TinyModels, device: Device, kv_offset: str, arm: str
) -> None:
    model, reference = tiny_models("llama", device), golden("llama")
    ids = reference.input_ids[:TOKENS]
    with InferenceContext(device) as context, closing(model.new_kv_cache(24)) as kv:
        poison_cache(device, kv)
        captured = one_by_one(model, ids, kv, context, DecodeMode("captured", kv_offset, arm))
        kv.truncate_to(0)
        held = one_by_one(model, ids, kv, context, DecodeMode("held", kv_offset, arm))
        assert context.stats.plans_built == 1
        kv.truncate_to(TOKENS - 1)
        rebuilt = one_by_one(model, ids[-1:], kv, context, DecodeMode("rebuild", kv_offset, arm))
        assert context.stats.plans_built == 2
    assert furthest(captured, reference.logits[:TOKENS]) <= REGRESSION
    np.testing.assert_array_equal(held, captured)
    np.testing.assert_array_equal(rebuilt, captured[-1:])


def test_a_cache_of_halves_stays_close(tiny_models: TinyModels, device: Device) -> None:
    model, reference = tiny_models("llama", device), golden("llama")
    with InferenceContext(device) as context, closing(model.new_kv_cache(24, "f16")) as kv:
        poison_cache(device, kv)
        logits = one_by_one(model, reference.input_ids[:TOKENS], kv, context)
    # Rows that were rounded to 16 bits must show.
    assert REGRESSION < furthest(logits, reference.logits[:TOKENS]) <= F16_KV


def test_a_prompt_in_the_form_that_assumes_nothing_about_subgroups(
    tiny_models: TinyModels, shared_device: Device
) -> None:
    model, reference = tiny_models("llama", shared_device), golden("llama")
    with InferenceContext(shared_device) as context, closing(model.new_kv_cache(32)) as kv:
        poison_cache(shared_device, kv)
        prompt = run(model, reference.input_ids, kv, context, logits="all")
        decoded = one_by_one(model, reference.decode_ids[:TOKENS], kv, context)
    assert furthest(prompt, reference.logits) <= REGRESSION
    assert furthest(decoded, reference.decode_logits[:TOKENS]) <= REGRESSION
