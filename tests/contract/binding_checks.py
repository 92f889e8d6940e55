"""The checks of the decode contract about what a step binds, records and leaves; see `contract_checks`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contract_checks import Bench
from device_checks import DECODE, ROWS, Held, Logits
from poison import POISON, poison_cache
from stepping import capture_of, kept
from tiny_llama import PATHS

from vkdecode.decode import (
    CapturedDecodeSession,
    DecodeMode,
    DecodeSession,
    InferenceContext,
    StepOptions,
    build_session,
    held_plans,
    step_data,
)
from vkdecode.decode import step as step_module
from vkdecode.errors import CaptureRefusedError, ClosedError, DeviceError, InvalidInputError
from vkdecode.gpu import Recording, read_words
from vkdecode.graph import Op


@contextmanager
def counted_submissions() -> Iterator[list[Recording]]:
    """What is submitted meanwhile."""
    submit, found = Recording.submit, []

    def counting(recording: Recording) -> None:
        found.append(recording)
        submit(recording)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "submit", counting)
        yield found


@contextmanager
def session_of(
    bench: Bench, path: tuple[str, str], seq: int = 1, name: str = "llama", logits: str = "last"
) -> Iterator[DecodeSession]:
    """A session over a poisoned cache."""
    model = bench.models(name)
    with (
        InferenceContext(bench.device) as context,
        closing(model.new_kv_cache(ROWS)) as kv,
        closing(build_session(model, StepOptions(seq, logits, *path), kv, context)) as session,
    ):
        poison_cache(bench.device, kv)
        yield session


def each_part_of_a_steps_data_is_bound(bench: Bench) -> None:
    """A step gives the same whatever was bound before it."""
    for name, path in (("llama", PATHS[0]), ("llama", PATHS[2]), ("gemma3-text", PATHS[2])):
        with session_of(bench, path, 16, name) as session:

            def step(ids: list[int], at: int, session: DecodeSession = session, name: str = name) -> Logits:
                data = step_data(bench.models(name), session, np.array(ids, np.uint32), at)
                return session.realize_token(bench.device, data, session.per_token_sym_env(at, len(ids)))

            step([3, 4, 5], 0)
            found = step([6, 7, 8, 9, 10], 3)
            assert np.isfinite(found).all()
            session.base_cache[session.token_ids_node].whole.data.view(np.uint32)[:] = 1
            np.testing.assert_array_equal(step([6, 7, 8, 9, 10], 3), found)


def data_that_do_not_fit_are_refused(bench: Bench) -> None:
    for path, name in (("device", "masked"), "offset"), (("symenv", "masked"), "mask"):
        with session_of(bench, path) as session:
            data = step_data(bench.model, session, np.array([3], np.uint32), 0)
            wrong: dict[str, Any]
            for wrong in ({name: None}, {name: np.zeros(3, np.float32)}, {"rope_cos": data.rope_cos[:, 1:]}):
                with pytest.raises(InvalidInputError):
                    session.realize_token(bench.device, replace(data, **wrong), session.per_token_sym_env(0))


def a_rebound_plan_writes_and_reads_the_new_cache(bench: Bench) -> None:
    held = Held(bench)
    session, device = held.session, bench.device
    poison_cache(device, held.kv)
    poison_cache(device, held.other)
    before = list(session.executable._algorithms)
    assert session.rebind_kv(held.other) is None
    slots = {node for pair in session.kv_nodes for node in pair}
    for old, new, one in zip(before, session.executable._algorithms, session.executable.plan.dispatches, strict=True):
        assert (old is not new) == bool(slots.intersection(one.bindings))
    run, data = session.realize_token, held.data(session, held.other)
    np.testing.assert_array_equal(run(device, data, session.per_token_sym_env(0)), held.logits)
    for kv, written in ((held.kv, False), (held.other, True)):
        for layer in kv.layers:
            for storage in (layer.k, layer.v):
                assert (read_words(device, storage) != POISON).any() == written
    held.close()


def a_rebind_that_cannot_be_made_changes_nothing(bench: Bench) -> None:
    held = Held(bench)
    session, device = held.session, bench.device
    before = list(session.executable._algorithms)
    closed = bench.model.new_kv_cache(ROWS)
    storages = {node: closed.layers[at].k for at, (node, _) in enumerate(session.kv_nodes)}
    for storage in {one.whole for one in storages.values()}:
        storage.close()
    with pytest.raises(ClosedError):
        session.executable.rebind(storages)
    assert session.executable._algorithms == before
    run, data = session.realize_token, held.data(session, held.other)
    np.testing.assert_array_equal(run(device, data, session.per_token_sym_env(0)), held.logits)
    assert session.rebind_kv(held.other) is None
    np.testing.assert_array_equal(run(device, data, session.per_token_sym_env(0)), held.logits)
    held.close()


def a_captured_step_is_one_submission_and_a_move_where_rows_land(bench: Bench) -> None:
    for kv_offset, submissions in (("device", 1), ("symenv", 2)):
        with InferenceContext(bench.device) as context, closing(bench.model.new_kv_cache(ROWS)) as kv:
            mode = DecodeMode("captured", kv_offset)
            for tokens in ([3], [4, 5], [6], [7, 8]):
                with counted_submissions() as found:
                    bench.model.forward_with_kv_context_persistent(tokens, kv, context, mode)
                assert len(found) == submissions
                assert not any("kv_move" in key for key in found[0].kernels)
                assert all("kv_move" in key for one in found[1:] for key in one.kernels)
            assert capture_of(kept(context)).needs_one_off == (kv_offset == "symenv")


def an_empty_run_is_one_submission_and_made_once(bench: Bench) -> None:
    for path in PATHS[1:3]:
        with session_of(bench, path) as session:
            capture = CapturedDecodeSession.capture(session)
            data = step_data(bench.model, session, np.zeros(0, np.uint32), 0)
            for want in (0, 1):
                with counted_submissions() as found:
                    capture.run_empty(bench.device, data, want)
                    capture.run_empty(bench.device, data, want)
                # What it computes is nothing, so the row may be copied in search of a number.
                assert len([one for one in found if one.kernels]) == 1
            for node, _ in session.kv_nodes:
                assert (read_words(bench.device, session.base_cache[node]) == POISON).all()


def what_cannot_be_captured_is_refused(bench: Bench) -> None:
    """A COPY before the logits or behind them, and push constants of a token in anything but a move of rows."""
    # A step that ends in several rows has no lists behind its logits.
    for seq, logits, before_list in ((1, "last", False), (1, "last", True), (16, "all", False)):
        with session_of(bench, PATHS[0], seq, logits=logits) as session:
            assert list(CapturedDecodeSession.capture(session)._recordings) == [session.logits_node]
            graph, target = session.graph, session.top_k_nodes[0] if before_list else session.logits_node
            node = graph.node(target)
            copy = graph.add_node(Op.COPY, [node.inputs[0]], graph.node(node.inputs[0]).shape, None)
            graph.rewrite(target, node.op, [copy, *node.inputs[1:]], node.attrs)
            with pytest.raises(CaptureRefusedError):
                CapturedDecodeSession.capture(session)
    with session_of(bench, ("symenv", "bounded")) as session, pytest.raises(CaptureRefusedError):
        CapturedDecodeSession.capture(session)
    with session_of(bench, ("symenv", "masked")) as session:
        assert CapturedDecodeSession.capture(session).needs_one_off


def a_step_is_counted_and_its_plan_put_back_or_closed(bench: Bench) -> None:
    built: list[DecodeSession] = []
    build = held_plans.build_session

    def remembered(*step: object) -> DecodeSession:
        built.append(build(*step))  # type: ignore[arg-type]  # what the real one takes
        return built[-1]

    def broken(recording: Recording) -> None:
        raise DeviceError("the device was lost")

    run = bench.model.forward_with_kv_context_persistent
    with InferenceContext(bench.device) as context, closing(bench.model.new_kv_cache(ROWS)) as kv:
        stats, row = context.stats, 4 * 160
        for number, rung in enumerate(("captured", "held", "captured")):
            run([3], kv, context, DecodeMode(rung))
            assert context.result_bytes_read == (number + 1) * row
        bench.model.top_candidates([3], kv, context, 1)
        assert context.result_bytes_read == 3 * row + 8
        session = kept(context)
        assert (stats.plans_built, stats.recordings_made, stats.tokens_replayed) == (1, 3, 3)
        run([4, 5], kv, context)
        assert (stats.prefill_plans_built, stats.prefill_recordings_made, stats.prefill_replays) == (1, 1, 1)
        assert len(context.held) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_module, "build_session", remembered)
            run([3], kv, context, DecodeMode("rebuild"))
        assert kept(context) is session
        with pytest.raises(ClosedError):
            _ = built[0].executable
        rows = kv.cached_len
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recording, "submit", broken)
            with pytest.raises(DeviceError):
                run([3], kv, context)
        assert not context.has_decode_session
        assert kv.cached_len == rows
        with pytest.raises(ClosedError):
            _ = session.executable


def a_closed_plan_gives_its_memory_back_at_once(bench: Bench) -> None:
    """Not only when the last name for it goes: who closed it may still hold it."""
    with InferenceContext(bench.device) as context, closing(bench.model.new_kv_cache(ROWS)) as kv:
        before = bench.device.allocated_bytes
        session = build_session(bench.model, DECODE, kv, context)
        assert bench.device.allocated_bytes > before
        executable = session.executable
        session.close()
        assert bench.device.allocated_bytes == before
        assert executable.arenas == ()
