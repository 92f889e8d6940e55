"""A plan is built once and held: reused where it may be, re-bound to other caches, rebuilt for other models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from stepping import Logits, capture_of, furthest, kept, one_by_one, run, taken, token_ids
from tiny_llama import PATHS, TINY, changed_copy, golden

from vkdecode.decode import DecodeMode, InferenceContext, KvCache, PlanValidity, new_kv_alloc_id
from vkdecode.decode import step as step_module
from vkdecode.errors import InvalidInputError, TopologyChanged
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.models import model_plan as model_module
from vkdecode.weights import DType

EXACT = 1e-4
REFERENCE = golden("llama")


@pytest.fixture
def context(device: Device) -> Iterator[InferenceContext]:
    with InferenceContext(device) as opened:
        yield opened


@pytest.fixture
def kv(llama: Model) -> Iterator[KvCache]:
    with closing(llama.new_kv_cache(64)) as made:
        yield made


def check_decodes(model: Model, kv: KvCache, context: InferenceContext, mode: DecodeMode | None = None) -> Logits:
    """Prompt and three tokens over an empty cache give the reference."""
    kv.truncate_to(0)
    run(model, REFERENCE.input_ids, kv, context, mode)
    decoded = one_by_one(model, REFERENCE.decode_ids[:3], kv, context, mode)
    assert furthest(decoded, REFERENCE.decode_logits[:3]) <= EXACT
    return decoded


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS[:3])
def test_200_tokens_take_one_plan_and_one_recording(
    llama: Model, context: InferenceContext, kv_offset: str, arm: str
) -> None:
    mode = DecodeMode("captured", kv_offset, arm)
    counts = []
    with closing(llama.new_kv_cache(200)) as kv:
        for one in token_ids(200, llama.vocab_size):
            run(llama, [one], kv, context, mode)
            counts.append((kept(context).graph_node_count, kept(context).graph.generation))
    stats = context.stats
    assert (stats.plans_built, stats.recordings_made, stats.tokens_replayed) == (1, 1, 200)
    assert stats.one_off_recordings == (0 if kv_offset == "device" else 200)
    assert (stats.rebinds, stats.rebinds_refused, stats.prefill_plans_built) == (0, 0, 0)
    assert len(set(counts)) == 1


def test_the_held_rung_records_every_token_of_one_plan(llama: Model, context: InferenceContext) -> None:
    with closing(llama.new_kv_cache(20)) as kv:
        for one in token_ids(20, llama.vocab_size):
            run(llama, [one], kv, context, DecodeMode("held"))
            assert kept(context).capture is None
    stats = context.stats
    assert (stats.plans_built, stats.recordings_made, stats.tokens_replayed) == (1, 20, 0)


def test_the_rebuild_rung_holds_nothing(llama: Model, context: InferenceContext) -> None:
    with closing(llama.new_kv_cache(4)) as kv:
        for one in (1, 2, 3):
            run(llama, [one], kv, context, DecodeMode("rebuild"))
    stats = context.stats
    assert (stats.plans_built, stats.recordings_made, stats.tokens_replayed) == (3, 3, 0)
    assert not context.has_decode_session


def test_a_prompt_in_between_keeps_the_plan(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    first = check_decodes(llama, kv, context)
    session = kept(context)
    assert np.array_equal(check_decodes(llama, kv, context), first)
    assert kept(context) is session
    assert (context.stats.plans_built, context.stats.recordings_made) == (1, 1)
    assert (context.stats.prefill_plans_built, context.stats.prefill_recordings_made) == (1, 1)


def test_truncating_keeps_the_plan_and_forgets_the_rows(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    check_decodes(llama, kv, context)
    alloc = kv.alloc_id
    kv.truncate_to(24)
    assert (kv.alloc_id, kv.cached_len) == (alloc, 24)
    again = one_by_one(llama, REFERENCE.decode_ids[:3], kv, context)
    assert furthest(again, REFERENCE.decode_logits[:3]) <= EXACT
    assert (context.stats.plans_built, context.stats.recordings_made, context.stats.rebinds) == (1, 1, 0)


def test_clearing_mints_an_allocation_and_rebinds(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    check_decodes(llama, kv, context)
    session, alloc = kept(context), kv.alloc_id
    kv.clear()
    assert kv.alloc_id != alloc
    assert kv.cached_len == 0
    check_decodes(llama, kv, context)
    assert kept(context) is session
    assert session.alloc_id == kv.alloc_id
    # Both the decode plan and that of the prompt were bound anew and recorded again.
    stats = context.stats
    assert (stats.plans_built, stats.rebinds, stats.rebinds_refused) == (1, 2, 0)
    assert (stats.recordings_made, stats.prefill_plans_built, stats.prefill_recordings_made) == (2, 1, 2)


def test_setting_a_layer_mints_an_allocation_and_rebinds(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    check_decodes(llama, kv, context)
    with closing(llama.new_kv_cache(64)) as other:
        alloc = kv.alloc_id
        kv.set_layer(1, other.layers[0])
        assert kv.alloc_id not in (alloc, other.alloc_id)
        assert kv.device_location == llama.device.location
        check_decodes(llama, kv, context)
        assert (context.stats.plans_built, context.stats.rebinds) == (1, 2)
        assert kept(context).base_cache[kept(context).kv_nodes[1][0]] is other.layers[0].k


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_two_conversations_share_a_plan_and_never_their_rows(
    llama: Model, context: InferenceContext, kv_offset: str, arm: str
) -> None:
    mode = DecodeMode("captured", kv_offset, arm)
    ids = [list(token_ids(12, llama.vocab_size, seed)) for seed in (1, 2)]
    alone = []
    for one in ids:
        with InferenceContext(llama.device) as own, closing(llama.new_kv_cache(12)) as kv:
            alone.append(one_by_one(llama, one, kv, own, mode))
    caches = [llama.new_kv_cache(12) for _ in ids]
    for position in range(12):
        for which, kv in enumerate(caches):
            assert np.array_equal(run(llama, [ids[which][position]], kv, context, mode), alone[which][position])
    for kv in caches:
        kv.close()
    assert (context.stats.plans_built, context.stats.rebinds, context.stats.rebinds_refused) == (1, 23, 0)


@pytest.mark.parametrize(("length", "dtype"), [(63, "f32"), (64, "f16")])
def test_another_kind_of_cache_takes_a_new_plan(
    llama: Model, kv: KvCache, context: InferenceContext, length: int, dtype: str
) -> None:
    check_decodes(llama, kv, context)
    session = kept(context)
    with closing(llama.new_kv_cache(length, dtype)) as other:
        run(llama, [1], other, context)
    assert kept(context) is not session
    assert (context.stats.plans_built, context.stats.rebinds) == (2, 0)
    check_decodes(llama, kv, context)
    assert context.stats.plans_built == 3


@pytest.mark.parametrize("mode", [DecodeMode("captured", "device", "masked"), DecodeMode("captured", "symenv")])
def test_another_path_or_arm_takes_a_new_plan(
    llama: Model, kv: KvCache, context: InferenceContext, mode: DecodeMode
) -> None:
    check_decodes(llama, kv, context)
    check_decodes(llama, kv, context, mode)
    check_decodes(llama, kv, context)
    assert context.stats.plans_built == 3


def test_another_rung_takes_no_new_plan(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    for rung in ("captured", "held", "captured"):
        check_decodes(llama, kv, context, DecodeMode(rung))
    assert (context.stats.plans_built, context.stats.recordings_made) == (1, 4)


def test_models_of_one_geometry_are_never_taken_for_each_other(
    tmp_path: Path, llama: Model, context: InferenceContext
) -> None:
    tensors = load_file(TINY / "llama" / "model.safetensors")
    changed = {name: array[::-1].copy() if "o_proj" in name else array for name, array in tensors.items()}
    folder = changed_copy(tmp_path / "twin", tensors=changed)
    with load(folder, device=llama.device) as twin, load(folder, device=llama.device) as same_files:
        assert llama.config == twin.config
        assert len({llama.shape_key, twin.shape_key, same_files.shape_key}) == 3
        ids = REFERENCE.input_ids
        wanted = {}
        for model in (llama, twin):
            with closing(model.new_kv_cache(24)) as kv:
                wanted[model] = model.forward(ids, kv, "all")
        assert furthest(wanted[llama], wanted[twin]) > 0.01
        caches = {model: model.new_kv_cache(24) for model in (llama, twin)}
        for position in range(6):
            for model, kv in caches.items():
                logits = run(model, [ids[position]], kv, context)
                assert furthest(logits, wanted[model][position]) <= EXACT
        # One plan at a time is kept, so each change of the model takes a new one.
        assert context.stats.plans_built == 12
        assert context.stats.rebinds == 0
        for kv in caches.values():
            kv.close()


def test_rope_frequencies_are_bound_and_not_baked(
    tmp_path: Path, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    folder = changed_copy(tmp_path / "rope", config=parameters)
    monkeypatch.setattr(model_module, "new_model_instance_id", lambda: llama.instance_id)
    with load(folder, device=llama.device) as other:
        # Told apart by nothing but the instance, which was made the same here.
        assert other.shape_key == llama.shape_key
        assert not np.array_equal(other.rope_cos_sin(np.arange(4))[0], llama.rope_cos_sin(np.arange(4))[0])


def test_validity_is_one_list_of_comparisons(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    check_decodes(llama, kv, context)
    session = kept(context)
    good: dict[str, Any] = {
        "seq": 1,
        "max_seq_len": 64,
        "n_layers": 2,
        "cache_dtype": DType.F32,
        "shape_key": llama.shape_key,
        "alloc_id": kv.alloc_id,
    }
    others: dict[str, Any] = {
        "seq": 2,
        "max_seq_len": 65,
        "n_layers": 3,
        "cache_dtype": DType.F16,
        "shape_key": llama.shape_key ^ 1,
    }
    moved = {"alloc_id": new_kv_alloc_id()}
    assert session.validity_for(**good) is PlanValidity.VALID
    assert session.validity_for(**good | moved) is PlanValidity.ALLOCATION_CHANGED
    assert session.is_valid_for(**good) is True
    assert session.is_valid_for(**good | moved) is False
    for name, value in others.items():
        # A stale plan is stale whatever the allocation is.
        for changed in (good | {name: value}, good | moved | {name: value}):
            assert session.validity_for(**changed) is PlanValidity.STALE
            assert session.is_valid_for(**changed) is False
    session.close()
    assert session.validity_for(**good) is PlanValidity.STALE


def test_a_graph_that_changed_is_not_run(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    for rung in ("captured", "held"):
        mode = DecodeMode(rung)
        check_decodes(llama, kv, context, mode)
        session = kept(context)
        data = step_module.step_data(llama, session, np.array([1], np.uint32), kv.cached_len)
        env = session.per_token_sym_env(kv.cached_len)
        session.graph.silu(session.logits_node)
        with pytest.raises(TopologyChanged, match="drop the session"):
            session.realize_token(llama.device, data, env)
        if session.capture is not None:
            with pytest.raises(TopologyChanged):
                capture_of(session).replay_token(llama.device, data, env)
        # A step drops such a session and plans anew.
        built = context.stats.plans_built
        check_decodes(llama, kv, context, mode)
        assert context.stats.plans_built == built + 1


def test_what_does_not_belong_together_is_refused(
    tiny_models: Callable[..., Model], llama: Model, kv: KvCache, context: InferenceContext, shared_device: Device
) -> None:
    wider = tiny_models("llama-bias-headdim", llama.device)
    with pytest.raises(InvalidInputError, match=r"the model needs .* use model.new_kv_cache"):
        run(wider, [1], kv, context)
    with InferenceContext(shared_device) as elsewhere, pytest.raises(InvalidInputError, match="the context is on"):
        run(llama, [1], kv, elsewhere)
    assert kv.cached_len == 0


def test_a_context_hands_its_session_over_and_takes_it_back(
    llama: Model, kv: KvCache, context: InferenceContext
) -> None:
    assert context.take_decode_session() is None
    check_decodes(llama, kv, context)
    session = taken(context)
    assert not context.has_decode_session
    check_decodes(llama, kv, context)
    assert context.stats.plans_built == 2
    other = kept(context)
    # Put back, it takes the place of the one that was built meanwhile, which is closed.
    context.put_decode_session(session)
    assert kept(context) is session
    valid = (1, 64, 2, DType.F32, llama.shape_key, kv.alloc_id)
    assert other.validity_for(*valid) is PlanValidity.STALE
    check_decodes(llama, kv, context)
    assert context.stats.plans_built == 2


def test_contexts_of_two_threads_do_not_disturb_each_other(llama: Model) -> None:
    ids = [list(token_ids(30, llama.vocab_size, seed)) for seed in (3, 4)]
    results: dict[int, Logits] = {}

    def decode(which: int) -> None:
        with InferenceContext(llama.device) as own, closing(llama.new_kv_cache(30)) as kv:
            results[which] = one_by_one(llama, ids[which], kv, own)

    for which in (0, 1):
        decode(which)
    alone = dict(results)
    threads = [threading.Thread(target=decode, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(results[which], alone[which]) for which in (0, 1))
