"""The checks of the decode contract about candidates; see `contract_checks`. All need a device."""

from __future__ import annotations

import numpy as np
import pytest
from contract_checks import Bench
from device_checks import ROWS, Held
from poison import poison_cache
from stepping import capture_of

from vkdecode.decode import DecodeMode, InferenceContext
from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu import Recording


def candidates_agree(bench: Bench) -> None:
    """Token by token on each rung, between rows that are read whole: the best of the row, and what follows from it."""
    run, best_of = bench.model.forward_with_kv_context_persistent, bench.model.top_candidates
    for kv_offset in ("device", "symenv"):
        for rung in ("rebuild", "held", "captured"):
            with InferenceContext(bench.device) as context:
                kv, mode = bench.model.new_kv_cache(ROWS), DecodeMode(rung, kv_offset)
                for token, count in ((3, 1), (7, 5), (11, 1), (7, 64)):
                    best = best_of([token], kv, context, count, mode)
                    kv.truncate_to(kv.cached_len - 1)
                    row = run([token], kv, context, mode)
                    order = np.lexsort((np.arange(row.size), -row))[:count]
                    np.testing.assert_array_equal(best.token_ids, order)
                    np.testing.assert_array_equal(best.logits, row[order])
                kv.close()


def candidates_leave_their_rows_in_the_cache(bench: Bench) -> None:
    """Steps of which only candidates are read write K and V as others do, on either path."""
    for kv_offset in ("device", "symenv"):
        with InferenceContext(bench.device) as context:
            kv, mode = bench.model.new_kv_cache(ROWS), DecodeMode("captured", kv_offset)
            rows = [bench.model.forward_with_kv_context_persistent([token], kv, context, mode) for token in (3, 7, 11)]
            kv.clear()
            poison_cache(bench.device, kv)
            for token, row in zip((3, 7, 11), rows, strict=True):
                assert bench.model.top_candidates([token], kv, context, 1, mode).logits[0] == row.max()
            kv.close()


def a_list_that_the_plan_lacks_is_refused(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture, env, data = capture_of(session), session.per_token_sym_env(1), held.data(session, held.kv)
    for run in (session.realize_top_k, capture.replay_top_k):
        with pytest.raises(InvalidInputError):
            run(bench.device, data, env, 65)
    with pytest.raises(InvalidInputError):
        capture.record(65)
    held.close()


def candidates_that_are_not_finite_are_the_row(bench: Bench) -> None:
    """The row is copied to the host only then: what its staging buffer held before does not count."""
    held = Held(bench)
    session = held.session
    submit = Recording.submit

    def spoiled(recording: Recording) -> None:
        submit(recording)
        session.executable.storage(session.wanted_node(1)).data[1] = np.nan

    env, data = session.per_token_sym_env(0), held.data(session, held.kv)
    for run in (session.realize_top_k, capture_of(session).replay_top_k):
        assert run(bench.device, data, env, 1).logits == [run(bench.device, data, env, 64).logits.max()]
        session.executable.storage(session.logits_node).data[:] = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recording, "submit", spoiled)
            row = run(bench.device, data, env, 1)
        np.testing.assert_array_equal(row.logits, session.realize_token(bench.device, data, env))
        assert row.token_ids.tolist() == list(range(160))
    held.close()


def each_kind_is_recorded_once(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture = capture_of(session)
    assert not capture.record(0)
    assert capture.record(1)
    assert not capture.record(1)
    one = session.wanted_node(1)
    kinds = {
        node: [key for recording in made for key in recording.kernels] for node, made in capture._recordings.items()
    }
    assert list(kinds) == [session.logits_node, one]
    assert [sum(key.startswith("top_k") for key in keys) for keys in kinds.values()] == [0, 1]
    held.model.top_candidates([3], held.kv, held.context, 1)
    assert capture_of(held.session) is capture
    assert (held.context.stats.plans_built, held.context.stats.recordings_made) == (1, 1)
    for count in (5, 64):
        held.model.top_candidates([3], held.kv, held.context, count)
    assert (held.context.stats.plans_built, held.context.stats.recordings_made) == (1, 2)
    assert session.rebind_kv(held.other) is None
    for count in (0, 1, 64):
        with pytest.raises(ClosedError):
            capture.record(count)
    held.close()
