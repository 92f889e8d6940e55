"""The memory report against what the device really gave, and what is refused before it is taken."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stepping import run, taken, token_ids
from tiny_llama import TINY, golden

from vkdecode.bench.memory import rss_bytes
from vkdecode.decode import MAX_LANDING_ROWS, InferenceContext
from vkdecode.errors import DeviceError, InvalidInputError, OutOfDeviceMemoryError
from vkdecode.gpu import Device, Storage, lanes_of
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.sampling import Sampler
from vkdecode.token_model import KvFeed

# With weights at 16 bits, tied, with experts, and with norms of heads and windows.
MODELS = [
    ("llama", None, "f32", 17),
    ("llama", "f16", "f16", 120),
    ("llama-tied-mqa", None, "f32", 40),
    ("phi", "bf16", "f32", 17),
    ("qwen2_moe", None, "f16", 40),
    ("gemma3-text", None, "f32", 120),
]


@pytest.fixture
def fresh() -> Iterator[Device]:
    with Device(0) as opened:
        lanes_of(opened)  # the self-check comes and goes
        yield opened


def prompt(model: Model, tokens: int) -> list[int]:
    return [int(one) for one in token_ids(tokens, model.vocab_size)]


@pytest.mark.parametrize(("name", "weights", "kv_dtype", "rows"), MODELS)
def test_the_report_is_what_the_device_gave(
    fresh: Device, name: str, weights: str | None, kv_dtype: str, rows: int
) -> None:
    with load(TINY / name, device=fresh, weights=weights) as model, InferenceContext(fresh) as context:
        report = model.memory_report(rows, kv_dtype)
        assert fresh.allocated_bytes == report.weights
        with closing(model.new_kv_cache(rows, kv_dtype)) as kv:
            assert fresh.allocated_bytes == report.weights + report.kv_cache
            run(model, prompt(model, rows - 1), kv, context)
            run(model, [1], kv, context)
            assert fresh.allocated_bytes == report.total
            kv.truncate_to(rows - 1)
            model.top_candidates([1], kv, context, 40)
            assert fresh.allocated_bytes == report.total
        assert model.memory_report(rows, kv_dtype) == report
        assert report.heap == fresh.info.heap_bytes


def test_a_long_prompt_takes_the_plans_that_the_report_names(fresh: Device) -> None:
    with load(TINY / "llama", device=fresh) as model, InferenceContext(fresh) as context:
        report = model.memory_report(600)
        with closing(model.new_kv_cache(600)) as kv:
            run(model, prompt(model, 599), kv, context)
            run(model, [1], kv, context)
            assert len(context.held) == 3 - 1
            assert fresh.allocated_bytes == report.total


def test_without_a_length_the_report_is_for_the_models_own(llama: Model) -> None:
    assert llama.memory_report().max_seq_len == llama.config.max_position_embeddings


@pytest.mark.parametrize(("rows", "dtype"), [(0, "f32"), (-3, "f32"), (True, "f32"), (8, "bf16"), ("8", "f32")])
def test_a_report_of_nonsense_is_refused(llama: Model, rows: Any, dtype: str) -> None:
    with pytest.raises(InvalidInputError):
        llama.memory_report(rows, dtype)


def test_a_report_allocates_nothing(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Storage:
        raise AssertionError("something was allocated")

    monkeypatch.setattr(Device, "allocate", fail)
    assert llama.memory_report(64).total > 0


def test_the_least_memory_that_loads_also_decodes(fresh: Device) -> None:
    """What loading makes sure of is enough for a small cache, a prompt and a token, and one byte less is refused."""
    info = fresh.info
    fresh.info = replace(info, heap_bytes=1 << 10)
    with pytest.raises(OutOfDeviceMemoryError, match="the model needs") as refused:
        load(TINY / "llama", device=fresh)
    needed = int(str(refused.value).split("needs ")[1].split()[0])
    fresh.info = replace(info, heap_bytes=needed - 1)
    with pytest.raises(OutOfDeviceMemoryError, match=f"{needed - 1} of {needed - 1} free"):
        load(TINY / "llama", device=fresh)
    assert fresh.allocated_bytes == 0
    fresh.info = replace(info, heap_bytes=needed)
    reference = golden("llama")
    with (
        load(TINY / "llama", device=fresh) as model,
        InferenceContext(fresh) as context,
        closing(model.new_kv_cache(16)) as kv,
    ):
        run(model, reference.input_ids[:15], kv, context)
        found = run(model, reference.input_ids[15:16], kv, context)
    assert np.abs(found - reference.logits[15]).max() <= 1e-4


def test_the_length_that_a_refusal_names_works(fresh: Device) -> None:
    with load(TINY / "llama", device=fresh) as model:
        info = fresh.info
        fresh.info = replace(info, heap_bytes=fresh.allocated_bytes + (1 << 20))
        with pytest.raises(OutOfDeviceMemoryError) as refused:
            model.new_kv_cache(100_000)
        most = int(str(refused.value).split("up to ")[1].split()[0])
        assert most > 64
        with closing(model.new_kv_cache(most)) as kv, InferenceContext(fresh) as context:
            run(model, prompt(model, most - 1), kv, context)
            run(model, [1], kv, context)
            assert kv.cached_len == most
        row_bytes = 2 * model.config.num_hidden_layers * model.kv_geometry(1, "f32").row_bytes
        alone = (1 << 20) // row_bytes - MAX_LANDING_ROWS
        model.new_kv_cache(alone).close()
        with pytest.raises(OutOfDeviceMemoryError):
            model.new_kv_cache(alone + 1)


def test_a_layer_beyond_a_buffer_names_the_largest_length(fresh: Device) -> None:
    fresh.info = replace(fresh.info, limits=replace(fresh.info.limits, max_storage_buffer_range_bytes=1 << 16))
    with load(TINY / "llama", device=fresh) as model:
        with pytest.raises(DeviceError, match=r"max_seq_len up to 448 fits, up to 960 with dtype='f16'"):
            model.new_kv_cache(449)
        model.new_kv_cache(448).close()
        model.new_kv_cache(960, "f16").close()
        with pytest.raises(DeviceError, match=r"up to 960 fits"):
            model.new_kv_cache(961, "f16")


def test_a_prompt_runs_where_only_single_tokens_fit_a_buffer(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "max_step_tokens", lambda *_: 15)
    reference = golden("llama")
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(24)) as kv:
        found = run(llama, reference.input_ids[:6], kv, context, logits="all")
        assert found.shape == (6, llama.vocab_size)
        assert np.abs(found - reference.logits[:6]).max() <= 1e-4
        assert np.abs(run(llama, reference.input_ids[6:], kv, context) - reference.logits[-1]).max() <= 1e-4
        assert context.stats.prefill_plans_built == 0


def test_tokens_on_the_device_offset_path_leave_nothing_behind(llama: Model) -> None:
    """The allocator takes some thousand tokens to settle; recordings or algorithms for each would be far above that."""
    with closing(llama.new_kv_cache(64)) as kv, InferenceContext(llama.device) as context:
        feed, sampler = KvFeed(llama, 64, kv, context), Sampler()

        def tokens(count: int) -> int:
            token = 1
            for _ in range(count):
                if kv.cached_len == 60:
                    kv.truncate_to(3)
                token = feed.next_token([token], sampler)
            gc.collect()
            held = rss_bytes()
            assert held is not None
            return held

        before = tokens(500)
        session = taken(context)
        nodes, device_bytes = session.graph_node_count, llama.device.allocated_bytes
        context.put_decode_session(session)
        growth = tokens(3000) - before
        assert session.graph_node_count == nodes
        assert llama.device.allocated_bytes == device_bytes
        assert (context.stats.plans_built, context.stats.recordings_made) == (1, 1)
        assert growth < 4 << 20
