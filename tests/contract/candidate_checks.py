"""The checks of the decode contract about candidates; see `contract_checks`. All need a device."""

from __future__ import annotations

import numpy as np
import pytest
from contract_checks import Bench
from device_checks import ROWS, Held
from poison import poison_cache

from vkdecode.decode import DecodeMode
from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.decode import InferenceContext


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
    capture, env, data = session.capture, session.per_token_sym_env(1), held.data(session, held.kv)
    assert capture is not None
    for run in (session.realize_candidates, capture.replay_candidates):
        with pytest.raises(InvalidInputError):
            run(bench.device, data, env, 65)
    held.close()


def candidates_that_are_not_finite_are_the_row(bench: Bench) -> None:
    held = Held(bench)
    held.model.top_candidates([3], held.kv, held.context, 1)
    session = held.session
    best, logits = (session.executable.storage(node).data for node in (session.wanted_node(1), session.logits_node))
    logits[7] = best[1] = np.nan
    np.testing.assert_array_equal(session.read_candidates(1).logits, logits)
    assert session.read_candidates(1).token_ids.tolist() == list(range(160))
    held.close()


def each_kind_is_recorded_once(bench: Bench) -> None:
    held = Held(bench)
    session = held.session
    capture = session.capture
    assert capture is not None
    one = session.wanted_node(1)
    assert not capture.record(session.logits_node)
    assert capture.record(one)
    assert not capture.record(one)
    assert capture.has_run
    assert not capture.has_run_for(one)
    kinds = {
        node: [key for recording in capture._recordings[node] for key in recording.kernels]
        for node in capture._recordings
    }
    assert [sum(key.startswith("top_k") for key in kinds[node]) for node in (session.logits_node, one)] == [0, 1]
    held.model.top_candidates([3], held.kv, held.context, 1)
    assert capture.has_run_for(one)
    assert (held.context.stats.plans_built, held.context.stats.recordings_made) == (1, 1)
    assert session.rebind_kv(held.other) is None
    for node in (session.logits_node, one, session.wanted_node(64)):
        with pytest.raises(ClosedError):
            capture.record(node)
    held.close()
