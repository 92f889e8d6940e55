"""The tiny Llama checkpoints against their references: every rung, KV-offset path, attention arm and kernel form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from rungs import REGRESSION, check_reference, check_rungs, prompt_and_decode
from stepping import furthest, one_by_one, run, taken
from tiny_llama import NAMES, PATHS, golden

from vkdecode.decode import DecodeMode, InferenceContext
from vkdecode.gpu import Device, lanes_of
from vkdecode.models import Model

F16_KV = 2e-2
# What turns the angles differs in the checkpoints that are named after it, and the weights of one, not what attends.
ALL_PATHS = [(name, *path) for name in NAMES for path in (PATHS[:1] if "rope" in name else PATHS)]
SHARED = [(name, *path) for name in ("llama", "llama-bias-headdim", "llama-tied-mqa") for path in PATHS[:3:2]]
UNFUSED = [*(("llama", *path) for path in PATHS), ("llama-bias-headdim", *PATHS[2]), ("llama-tied-mqa", *PATHS[0])]

TinyModels = Callable[..., Model]


@pytest.mark.parametrize(("name", "kv_offset", "arm"), ALL_PATHS)
def test_all_rungs_give_the_reference_and_agree_to_the_bit(
    tiny_models: TinyModels, device: Device, name: str, kv_offset: str, arm: str
) -> None:
    check_rungs(tiny_models(name, device), name, kv_offset, arm, rebuilt=1)


@pytest.mark.parametrize(("name", "kv_offset", "arm"), SHARED)
def test_so_do_the_kernels_that_assume_nothing_about_subgroups(
    tiny_models: TinyModels, shared_device: Device, name: str, kv_offset: str, arm: str
) -> None:
    assert lanes_of(shared_device).form == "shared"
    check_rungs(tiny_models(name, shared_device), name, kv_offset, arm, rebuilt=1)


def test_every_token_can_be_rebuilt(tiny_models: TinyModels, device: Device) -> None:
    check_rungs(tiny_models("llama", device), "llama", "device", "bounded", rebuilt=24)


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_the_prompt_token_by_token_is_the_prompt_at_once(llama: Model, kv_offset: str, arm: str) -> None:
    mode = DecodeMode("captured", kv_offset, arm)
    reference = golden("llama")
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(24)) as kv:
        assert furthest(one_by_one(llama, reference.input_ids, kv, context, mode), reference.logits) <= REGRESSION


@pytest.mark.parametrize("logits", ["last", "all"])
def test_forward_is_the_persistent_path_built_anew(llama: Model, logits: str) -> None:
    reference = golden("llama")
    prompt, (first, second) = list(map(int, reference.input_ids)), map(int, reference.decode_ids[:2])
    with (
        InferenceContext(llama.device) as context,
        closing(llama.new_kv_cache(40)) as kv,
        closing(llama.new_kv_cache(40)) as other,
    ):
        for ids in (prompt, [first], [second]):
            plain = llama.forward(ids, kv, logits)
            held = run(llama, ids, other, context, logits=logits)
            assert plain.shape == ((llama.vocab_size,) if logits == "last" else (len(ids), llama.vocab_size))
            assert np.array_equal(plain, held)
            assert kv.cached_len == other.cached_len
        assert context.stats.plans_built == 1


def test_the_last_logits_are_the_last_row_of_all(tiny_models: TinyModels, device: Device) -> None:
    for name in NAMES:
        model, reference = tiny_models(name, device), golden(name)
        with closing(model.new_kv_cache(24)) as kv:
            last = model.forward(reference.input_ids, kv)
        assert last.shape == (model.vocab_size,)
        assert furthest(last, reference.logits[-1]) <= REGRESSION


@pytest.mark.parametrize(("name", "kv_offset", "arm"), UNFUSED)
def test_without_fusions_the_result_is_the_same_within_rounding(
    tiny_models: TinyModels, device: Device, name: str, kv_offset: str, arm: str
) -> None:
    model = tiny_models(name, device)
    mode = DecodeMode("captured", kv_offset, arm)
    with InferenceContext(device, fusions=()) as context:
        plain = prompt_and_decode(model, name, mode, context, tokens=4)
        session = taken(context)
        # And three behind the head, for the lists of the highest logits.
        each = 18 if (kv_offset, arm) == ("symenv", "masked") else 17  # with the move out of the landing rows
        assert len(session.executable.plan.dispatches) == each * model.config.num_hidden_layers + 3 + 3
        session.close()
    check_reference(name, *plain)


@pytest.mark.parametrize(
    ("lanes", "name", "kv_offset", "arm"),
    [
        *(("subgroup", "llama", *path) for path in PATHS),
        ("subgroup", "llama-tied-mqa", "device", "masked"),
        ("shared", "llama", "device", "bounded"),
        ("shared", "llama-tied-mqa", "symenv", "masked"),
    ],
)
def test_a_cache_of_half_the_memory_stays_close(
    tiny_models: TinyModels,
    device: Device,
    shared_device: Device,
    lanes: str,
    name: str,
    kv_offset: str,
    arm: str,
) -> None:
    reference = golden(name)
    model = tiny_models(name, shared_device if lanes == "shared" else device)
    with InferenceContext(model.device) as context:
        mode = DecodeMode("captured", kv_offset, arm)
        prompt, decoded = prompt_and_decode(model, name, mode, context, dtype="f16")
    assert furthest(prompt, reference.logits) <= F16_KV
    assert furthest(decoded, reference.decode_logits) <= F16_KV
    # Rows that were rounded to 16 bits must show.
    assert furthest(decoded, reference.decode_logits) > REGRESSION


def test_a_cache_of_16_bits_takes_half_the_memory(llama: Model) -> None:
    sizes = {}
    for dtype in ("f32", "f16"):
        before = llama.device.allocated_bytes
        kv = llama.new_kv_cache(64, dtype)
        sizes[dtype] = llama.device.allocated_bytes - before
        assert kv.dtype == dtype
        kv.close()
        assert llama.device.allocated_bytes == before
    # K and V of two layers, two heads of 16 values; as many landing rows as the longest step takes.
    assert sizes["f32"] == 2 * sizes["f16"] == 2 * 2 * 2 * (64 + 64) * 16 * 4
