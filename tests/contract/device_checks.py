"""The checks of the decode contract that need a device; see `contract_checks`."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from contract_checks import Bench
from kv_copies import fresh_copy, outside_copy
from numpy.typing import NDArray
from poison import poison_cache
from stepping import capture_of, kept

from vkdecode.decode import (
    CapturedDecodeSession,
    DecodeMode,
    DecodeSession,
    DecodeTokenData,
    InferenceContext,
    KvCache,
    KvLayer,
    StepOptions,
    build_session,
    invalidate_decode_pair_if_stale,
    step_data,
)
from vkdecode.decode.held_plans import take_session
from vkdecode.errors import ClosedError, ContextLengthError, DeviceError, InvalidInputError, TopologyChanged
from vkdecode.graph import Op
from vkdecode.weights import DType

Logits = NDArray[np.float32]

ROWS = 24
DECODE = StepOptions(1, "last", "device", "bounded")
CAPTURED = DecodeMode("captured")


class Held:
    """A decode session that has been captured and put into a context, its cache, and a second cache."""

    def __init__(self, bench: Bench) -> None:
        self.model = bench.model
        self.context = InferenceContext(bench.device)
        self.kv, self.other = (self.model.new_kv_cache(ROWS) for _ in range(2))
        self.logits = self.step(3)

    def step(self, token: int, kv: KvCache | None = None, mode: DecodeMode = CAPTURED) -> Logits:
        return self.model.forward_with_kv_context_persistent([token], kv or self.kv, self.context, mode)

    @property
    def session(self) -> DecodeSession:
        return kept(self.context)

    def data(self, session: DecodeSession, kv: KvCache) -> DecodeTokenData:
        return step_data(self.model, session, np.array([3], np.uint32), kv.cached_len)

    def judged(self, session: DecodeSession | None, kv: KvCache, seq: int = 1) -> DecodeSession | None:
        return invalidate_decode_pair_if_stale(session, self.model, seq, kv, self.context)

    def close(self) -> None:
        self.context.close()
        self.kv.close()
        self.other.close()


def rungs_agree(bench: Bench) -> None:
    """Token by token, over both offsets; each token depends on the rows that the one before it wrote."""
    for kv_offset in ("device", "symenv"):
        logits = []
        for rung in ("rebuild", "held", "captured"):
            with InferenceContext(bench.device) as context:
                kv, mode = bench.model.new_kv_cache(ROWS), DecodeMode(rung, kv_offset)
                poison_cache(bench.device, kv)
                run = bench.model.forward_with_kv_context_persistent
                logits.append([run([token], kv, context, mode) for token in (3, 7, 11, 7)])
                kv.close()
        np.testing.assert_array_equal(logits[1], logits[0])
        np.testing.assert_array_equal(logits[2], logits[0])


def a_capture_of_the_old_cache_does_not_run(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture = capture_of(session)
    assert capture.is_current
    env = session.per_token_sym_env(0)
    assert session.rebind_kv(held.other) is None
    assert not capture.is_current
    for replay in (capture.replay_token, lambda *step: capture.replay_top_k(*step, 1)):
        with pytest.raises(ClosedError):
            replay(bench.device, held.data(session, held.other), env)
    again = CapturedDecodeSession.capture(session)
    np.testing.assert_array_equal(again.replay_token(bench.device, held.data(session, held.other), env), held.logits)
    held.close()


def an_empty_run_takes_no_tokens(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture = capture_of(session)
    with pytest.raises(InvalidInputError):
        capture.run_empty(bench.device, held.data(session, held.kv))
    with InferenceContext(bench.device) as context:
        for tokens in (5, 1):
            held.model.prepare(held.kv, context, tokens)
        assert (context.stats.plans_built, context.stats.prefill_plans_built) == (1, 1)
        prepared = kept(context)
        assert capture_of(prepared)._have_run == {prepared.logits_node}
        assert prepared.base_cache[prepared.token_count_node].words[0] == 0
        one = held.step(5)
        held.kv.truncate_to(1)
        np.testing.assert_array_equal(held.model.forward_with_kv_context_persistent([5], held.kv, context), one)
    held.close()


def a_plan_runs_on_its_device_only(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture, env = capture_of(session), session.per_token_sym_env(1)
    for run in (session.realize_token, capture.replay_token):
        with pytest.raises(DeviceError):
            run(bench.opened_again, held.data(session, held.kv), env)
    held.close()


def a_changed_graph_is_not_realized(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture, env, data = capture_of(session), session.per_token_sym_env(1), held.data(session, held.kv)
    nodes = session.graph_node_count
    session.graph.add_node(Op.ADD, (session.logits_node, session.logits_node), (1, 160))
    assert session.graph_node_count == nodes + 1
    for run in (session.realize_token, capture.replay_token):
        with pytest.raises(TopologyChanged):
            run(bench.device, data, env)
    with pytest.raises(TopologyChanged):
        held.context.realize_prebuilt_as_with_env(session.graph, session._prebuilt, env)
    held.close()


def a_closed_session_does_not_run(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture, env, data = capture_of(session), session.per_token_sym_env(1), held.data(session, held.kv)
    session.close()
    assert session.capture is None
    for run in (session.realize_token, capture.replay_token):
        with pytest.raises(ClosedError):
            run(bench.device, data, env)
    held.close()


def a_valid_pair_is_kept_with_its_capture(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture = session.capture
    assert held.judged(None, held.kv) is None
    assert held.judged(session, held.kv) is session
    assert session.capture is capture
    assert capture is not None
    assert (held.context.stats.rebinds, held.context.stats.rebinds_refused) == (0, 0)
    held.close()


def a_rebound_pair_loses_its_capture(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    assert held.judged(session, held.other) is session
    assert session.capture is None
    assert session.alloc_id == held.other.alloc_id
    assert (held.context.stats.rebinds, held.context.stats.rebinds_refused) == (1, 0)
    np.testing.assert_array_equal(held.step(3, held.other), held.logits)
    assert held.context.stats.plans_built == 1
    held.close()


def a_refused_pair_is_closed(bench: Bench) -> None:
    held = Held(bench)
    layer = held.other.layers[0]
    held.other.set_layer(0, KvLayer(outside_copy(bench.device, layer.k), outside_copy(bench.device, layer.v)))
    taken, session = bench.device.allocated_bytes, held.session
    assert held.judged(session, held.other) is None
    assert bench.device.allocated_bytes < taken
    assert (held.context.stats.rebinds, held.context.stats.rebinds_refused) == (0, 1)
    with pytest.raises(ClosedError):
        _ = session.executable
    held.context.take_decode_session()
    np.testing.assert_array_equal(held.step(3, held.other), held.logits)
    assert held.context.stats.plans_built == 2
    held.close()


def a_stale_pair_is_closed(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    assert held.judged(session, held.kv, seq=2) is None
    with pytest.raises(ClosedError):
        _ = session.executable
    assert session.capture is None
    assert (held.context.stats.rebinds, held.context.stats.rebinds_refused) == (0, 0)
    held.close()


def a_pair_whose_graph_was_changed_is_closed(bench: Bench) -> None:
    for kv in ("kv", "other"):
        held = Held(bench)
        session = held.session
        session.graph.add_node(Op.ADD, (session.logits_node, session.logits_node), (1, 160))
        assert held.judged(session, getattr(held, kv)) is None
        assert session.capture is None
        with pytest.raises(ClosedError):
            _ = session.executable
        assert (held.context.stats.rebinds, held.context.stats.rebinds_refused) == (0, 0)
        np.testing.assert_array_equal(held.step(3, held.other), held.logits)
        assert held.context.stats.plans_built == 2
        held.close()


def a_context_hands_out_only_the_asked_path(bench: Bench) -> None:
    for asked in (DECODE, StepOptions(1, "last", "device", "masked"), StepOptions(1, "last", "symenv", "bounded")):
        held = Held(bench)
        session = held.session
        assert take_session(held.context, asked) is (session if asked == DECODE else None)
        assert held.judged(session, held.kv) is (session if asked == DECODE else None)
        assert not held.context.has_decode_session
        held.close()


def prefill_plans_are_held_by_their_options(bench: Bench) -> None:
    held = Held(bench)
    held.model.forward_with_kv_context_persistent([3, 4, 5], held.kv, held.context)
    options = StepOptions(16, "last", "device", "bounded")
    assert list(held.context.held) == [options]
    session = held.context.held[options]
    assert take_session(held.context, StepOptions(64, "last", "device", "bounded")) is None
    assert take_session(held.context, options) is session
    assert not held.context.held
    assert held.context.has_decode_session
    held.context.held[options] = session
    held.context.close()
    assert not held.context.held
    with pytest.raises(ClosedError):
        _ = session.executable
    held.close()


def a_context_closes_what_it_loses(bench: Bench) -> None:
    held = Held(bench)
    first = held.session
    second = build_session(held.model, DECODE, held.kv, held.context)
    held.context.put_decode_session(second)
    with pytest.raises(ClosedError):
        _ = first.executable
    held.context.put_decode_session(second)
    _ = second.executable
    held.context.close()
    with pytest.raises(ClosedError):
        _ = second.executable
    with pytest.raises(ClosedError):
        held.step(3)
    held.close()


def allocation_ids_follow_storages(bench: Bench) -> None:
    model = bench.model
    kv = model.new_kv_cache(ROWS)
    seen = [kv.alloc_id, model.new_kv_cache(ROWS).alloc_id]
    model.forward([3, 4, 5], kv)
    assert kv.alloc_id == seen[0]
    kv.truncate_to(2)
    assert (kv.alloc_id, kv.cached_len) == (seen[0], 2)
    kv.clear()
    assert kv.cached_len == 0
    seen.append(kv.alloc_id)
    layer = kv.layers[1]
    copies = KvLayer(fresh_copy(bench.device, layer.k), fresh_copy(bench.device, layer.v))
    kv.set_layer(1, copies)
    seen.append(kv.alloc_id)
    assert len(set(seen)) == len(seen)
    assert kv.layers[1] is copies
    assert (kv.rebind_slot(1, 0), kv.rebind_slot(1, 1)) == (copies.k, copies.v)
    assert kv.rebind_slot(0, 0) is kv.layers[0].k
    for layer_index, which in ((-1, 0), (2, 0), (0, 2), (0, -1)):
        assert kv.rebind_slot(layer_index, which) is None
    kv.close()


def truncation_stays_inside_the_cache(bench: Bench) -> None:
    kv = bench.model.new_kv_cache(ROWS)
    bench.model.forward([3, 4], kv)
    for length in (-1, 3, True, 1.0, "1"):
        with pytest.raises(InvalidInputError):
            kv.truncate_to(length)  # type: ignore[arg-type]  # the wrong types are what is tested
    assert kv.cached_len == 2
    layer = kv.layers[0]
    kv.close()
    for use in (kv.clear, lambda: kv.truncate_to(0), lambda: kv.set_layer(0, layer)):
        with pytest.raises(ClosedError):
            use()


def a_layer_is_replaced_only_by_its_like(bench: Bench) -> None:
    kv = bench.model.new_kv_cache(ROWS)
    before, device = kv.alloc_id, bench.device
    size = kv.geometry.nbytes
    good, also_good = (device.allocate(size, DType.F32) for _ in range(2))
    wrong = [device.allocate(size + 16, DType.F32), device.allocate(size, DType.F16)]
    for bad in [KvLayer(one, good) for one in wrong] + [KvLayer(good, one) for one in wrong]:
        with pytest.raises(InvalidInputError):
            kv.set_layer(0, bad)
    first, closed = kv.layers[0], device.allocate(size, DType.F32)
    closed.close()
    for bad in (KvLayer(closed, good), KvLayer(good, closed)):
        with pytest.raises(ClosedError):
            kv.set_layer(0, bad)
    for bad in (KvLayer(good, good), KvLayer(first.k, good), KvLayer(good, first.v)):
        with pytest.raises(InvalidInputError):
            kv.set_layer(1, bad)
    for index in (-1, 2):
        with pytest.raises(InvalidInputError):
            kv.set_layer(index, KvLayer(good, also_good))
    assert (kv.alloc_id, kv.layers[0]) == (before, first)
    kv.set_layer(0, KvLayer(first.v, first.k))
    kv.close()


def a_cache_vouches_only_for_one_place(bench: Bench) -> None:
    kv, elsewhere = bench.model.new_kv_cache(ROWS), bench.model.new_kv_cache(ROWS)
    assert kv.rebind_location() == kv.device_location == bench.device.location
    layer = elsewhere.layers[0]
    kv.set_layer(0, KvLayer(outside_copy(bench.device, layer.k), fresh_copy(bench.device, layer.v)))
    assert kv.rebind_location() is None
    kv.close()
    assert kv.rebind_location() is None
    elsewhere.close()


def a_step_that_does_not_fit_is_refused_untouched(bench: Bench) -> None:
    held = Held(bench)
    session, epoch = held.session, held.session.binding_epoch
    closed_model, closed_cache = bench.load_again(), held.model.new_kv_cache(ROWS)
    few_positions = bench.models("gpt2")
    too_long = few_positions.new_kv_cache(few_positions.config.max_position_embeddings + 1)
    closed_model.close()
    closed_cache.close()
    # What only looks like a cache or a context is named, and not used until something in it is missing.
    like_a_cache: Any = SimpleNamespace(cached_len=0)
    like_a_context: Any = SimpleNamespace(device=held.model.device)
    with InferenceContext(bench.opened_again) as elsewhere:
        for error, model, tokens, kv, context in (
            (InvalidInputError, held.model, 1, like_a_cache, held.context),
            (InvalidInputError, held.model, 1, held.kv, like_a_context),
            (ClosedError, closed_model, 1, held.kv, held.context),
            (ClosedError, held.model, 1, closed_cache, held.context),
            (InvalidInputError, held.model, 1, held.kv, elsewhere),
            (InvalidInputError, bench.models("llama-tied-mqa"), 1, held.kv, held.context),
            (ContextLengthError, held.model, ROWS, held.kv, held.context),
            (ContextLengthError, few_positions, too_long.max_seq_len, too_long, held.context),
            (InvalidInputError, held.model, 1, bench.cache_of_another_opening(ROWS), held.context),
        ):
            with pytest.raises(error):
                model.forward_with_kv_context_persistent([3] * tokens, kv, context)
    few_positions.forward([3], too_long)
    assert too_long.cached_len == 1
    too_long.close()
    assert held.session is session
    assert (session.binding_epoch, held.kv.cached_len) == (epoch, 1)
    stats = held.context.stats
    assert (stats.plans_built, stats.rebinds, stats.rebinds_refused, stats.prefill_plans_built) == (1, 0, 0, 0)
    held.step(3)
    assert stats.plans_built == 1
    held.close()


def a_closed_session_lets_go_of_its_storages(bench: Bench) -> None:
    gc.collect()
    before = bench.device.allocated_bytes
    held = Held(bench)
    session = held.session
    held.close()
    gc.collect()
    assert bench.device.allocated_bytes == before
    session.close()
