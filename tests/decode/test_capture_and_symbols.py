"""What a capture may hold, when it is stale, and which symbol is live on which path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stepping import Logits, furthest, one_by_one, run, taken
from tiny_llama import PATHS, golden

from vkdecode.decode import (
    CapturedDecodeSession,
    DecodeMode,
    DecodeSession,
    DecodeTokenData,
    InferenceContext,
    KvCache,
    StepOptions,
    build_session,
    step_data,
)
from vkdecode.errors import CaptureRefusedError, ClosedError, DeviceError, InvalidInputError, SymbolConflict
from vkdecode.gpu import Device
from vkdecode.graph import Op, SymEnv
from vkdecode.models import Model

EXACT = 1e-4
MOVED = 1e-3
REFERENCE = golden("llama")
NEXT, AFTER = (int(one) for one in REFERENCE.decode_ids[:2])


class Case:
    """A cache with the prompt in it, and a session of one path that runs single steps on it by hand.

    Tests share both, since building them is what takes time: each gets the cache as it was at first, and none may bind
    the session elsewhere or change its graph, for which there is `build`.
    """

    def __init__(self, model: Model, kv_offset: str, arm: str) -> None:
        self.model = model
        self._options = StepOptions(1, "last", kv_offset, arm)
        self.context = InferenceContext(model.device)
        self.kv = model.new_kv_cache(40)
        run(model, REFERENCE.input_ids, self.kv, self.context, DecodeMode("captured", kv_offset, arm))
        self.session = self.build()

    def build(self) -> DecodeSession:
        """Another session of the path, for a test that spoils it."""
        return build_session(self.model, self._options, self.kv, self.context)

    def start(self) -> None:
        """Rows of other tokens lie behind the prompt, so a step whose own row goes elsewhere must show."""
        self.kv.truncate_to(24)
        run(self.model, [9] * 16, self.kv, self.context)
        self.kv.truncate_to(24)

    def data(self, token: int, at: int) -> DecodeTokenData:
        return step_data(self.model, self.session, np.array([token], np.uint32), at)

    def env(self, cached_len: int, attended_len: int) -> SymEnv:
        env = SymEnv()
        env.bind(self.session.cached_len_sym, cached_len)
        env.bind(self.session.attended_len_sym, attended_len)
        for dispatch in self.session.executable.plan.dispatches:
            for symbol in dispatch.symbols:
                if symbol not in env:
                    env.bind(symbol, 1)
        return env

    def close(self) -> None:
        self.session.close()
        self.kv.close()
        self.context.close()


@pytest.fixture(params=PATHS, ids="-".join, scope="module")
def made(request: pytest.FixtureRequest, tiny_models: Callable[..., Model], device: Device) -> Iterator[Case]:
    with closing(Case(tiny_models("llama", device), *request.param)) as case:
        yield case


@pytest.fixture
def case(made: Case) -> Iterator[Case]:
    made.start()
    session, nodes, alloc_id = made.session, made.session.graph_node_count, made.kv.alloc_id
    yield made
    assert (made.session, session.graph_node_count, session.alloc_id) == (session, nodes, alloc_id)


def path_of(case: Case) -> tuple[str, str]:
    return (
        "device" if case.session.offset_node is not None else "symenv",
        "masked" if case.session.mask_node is not None else "bounded",
    )


def runner(case: Case, captured: bool) -> CapturedDecodeSession | None:
    """The capture, where this path allows one and it is asked for."""
    return CapturedDecodeSession.capture(case.session) if captured and path_of(case) != ("symenv", "bounded") else None


def step(case: Case, capture: CapturedDecodeSession | None, data: DecodeTokenData, env: SymEnv) -> Logits:
    device = case.model.device
    if capture is not None:
        return capture.replay_token(device, data, env)
    return case.session.realize_token(device, data, env)


def check_moved(logits: Logits, at: int, moved: bool) -> None:
    """Whether the logits of a token after the prompt are other than the reference's."""
    far = furthest(logits, REFERENCE.decode_logits[at])
    assert far > MOVED if moved else far <= EXACT


@pytest.mark.parametrize("captured", [True, False])
def test_cached_len_is_live_on_the_symenv_path_only(case: Case, captured: bool) -> None:
    capture = runner(case, captured)
    path = path_of(case)
    # In the masked arm it says where rows are moved to behind the step, in the bounded arm where the step writes them.
    for wrong, first_moves, second_moves in (
        (30, path == ("symenv", "bounded"), path[0] == "symenv"),
        (24, False, False),
    ):
        first = step(case, capture, case.data(NEXT, 24), case.env(wrong, 25))
        check_moved(first, 0, first_moves)
        second = step(case, capture, case.data(AFTER, 25), case.env(25, 26))
        check_moved(second, 1, second_moves)


def test_the_attended_length_symbol_is_live_on_the_symenv_path_in_the_bounded_arm(case: Case) -> None:
    logits = step(case, None, case.data(NEXT, 24), case.env(24, 12))
    check_moved(logits, 0, path_of(case) == ("symenv", "bounded"))


@pytest.mark.parametrize("captured", [True, False])
def test_the_attended_length_in_device_memory_is_live_in_both_arms(case: Case, captured: bool) -> None:
    if path_of(case)[0] == "symenv":
        assert case.data(NEXT, 24).offset is None
        return
    data = case.data(NEXT, 24)
    assert data.offset is not None and data.offset.tolist() == [24, 25]
    wrong = replace(data, offset=np.array([24, 12], np.uint32))
    check_moved(step(case, runner(case, captured), wrong, case.env(24, 25)), 0, True)


@pytest.mark.parametrize("captured", [True, False])
def test_the_offset_in_device_memory_is_where_rows_go(case: Case, captured: bool) -> None:
    if path_of(case)[0] == "symenv":
        assert case.session.offset_node is None
        return
    capture = runner(case, captured)
    wrong = replace(case.data(NEXT, 24), offset=np.array([30, 25], np.uint32))
    check_moved(step(case, capture, wrong, case.env(24, 25)), 0, True)
    check_moved(step(case, capture, case.data(AFTER, 25), case.env(25, 26)), 1, True)


def test_the_mask_is_live_in_the_masked_arm(case: Case) -> None:
    data = case.data(NEXT, 24)
    if path_of(case)[1] == "bounded":
        assert data.mask is None and case.session.mask_node is None
        return
    assert data.mask is not None
    assert (data.mask[:24] == 0).all() and np.isneginf(data.mask[24:]).all()
    wrong = data.mask.copy()
    wrong[5:20] = -np.inf
    logits = step(case, None, replace(data, mask=wrong), case.env(24, 25))
    assert furthest(logits, REFERENCE.decode_logits[0]) > MOVED


def test_every_rope_angle_is_bound_for_each_step(case: Case) -> None:
    data = case.data(NEXT, 24)
    for name in ("rope_cos", "rope_sin"):
        wrong = replace(data, **{name: getattr(case.data(NEXT, 3), name)})
        assert furthest(step(case, None, wrong, case.env(24, 25)), REFERENCE.decode_logits[0]) > MOVED
    assert furthest(step(case, None, data, case.env(24, 25)), REFERENCE.decode_logits[0]) <= EXACT


def test_the_symbols_of_a_token_are_bound_once(case: Case) -> None:
    env = case.session.per_token_sym_env(24)
    assert env.resolve(case.session.cached_len_sym) == 24
    assert env.resolve(case.session.attended_len_sym) == 25
    with pytest.raises(SymbolConflict, match="cached_len"):
        env.bind(case.session.cached_len_sym, 25)


def test_a_missing_symbol_is_an_error_where_it_is_read(case: Case) -> None:
    data = case.data(NEXT, 24)
    if path_of(case)[0] == "device":
        assert furthest(step(case, None, data, SymEnv()), REFERENCE.decode_logits[0]) <= EXACT
    else:
        with pytest.raises(InvalidInputError, match="is not bound"):
            step(case, None, data, SymEnv())


def test_capture_is_refused_where_a_kernel_bakes_a_symbol_and_the_held_plan_serves(llama: Model) -> None:
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(40)) as kv:
        mode = DecodeMode("captured", "symenv", "bounded")
        run(llama, REFERENCE.input_ids, kv, context, mode)
        decoded = one_by_one(llama, REFERENCE.decode_ids[:5], kv, context, mode)
        session = taken(context)
        baked = {name.name for one in session.executable.plan.dispatches for name in one.symbols}
        assert baked == {"cached_len", "attended_len"}
        with pytest.raises(CaptureRefusedError, match=r"linear.* bakes cached_len .* use the held plan"):
            CapturedDecodeSession.capture(session)
        assert session.capture is None
        session.close()
    assert furthest(decoded, REFERENCE.decode_logits[:5]) <= EXACT
    stats = context.stats
    assert (stats.plans_built, stats.recordings_made, stats.tokens_replayed) == (1, 5, 0)


def test_only_the_symenv_path_needs_one_off_recordings(case: Case) -> None:
    if path_of(case) == ("symenv", "bounded"):
        return
    capture = CapturedDecodeSession.capture(case.session)
    assert capture.needs_one_off is (path_of(case)[0] == "symenv")
    assert capture.is_current


def test_a_copy_in_the_captured_part_is_refused(case: Case) -> None:
    with closing(case.build()) as session:
        assert session.graph.node(session.effective_target).op is Op.COPY
        assert session.graph.node(session.effective_target).inputs == (session.logits_node,)
        node = session.graph.node(session.logits_node)
        x = node.inputs[0]
        copy = session.graph.add_node(Op.COPY, [x], session.graph.node(x).shape, None)
        session.graph.rewrite(session.logits_node, node.op, [copy, *node.inputs[1:]], node.attrs)
        with pytest.raises(CaptureRefusedError, match=f"node {copy} copies"):
            CapturedDecodeSession.capture(session)


def test_a_capture_is_stale_after_a_rebind(case: Case) -> None:
    if path_of(case) == ("symenv", "bounded"):
        return
    device, model = case.model.device, case.model
    with closing(case.build()) as session, closing(model.new_kv_cache(40)) as other:
        capture = CapturedDecodeSession.capture(session)
        assert session.rebind_kv(other) is None
        assert not capture.is_current
        with pytest.raises(ClosedError, match="capture it again"):
            capture.replay_token(device, case.data(NEXT, 24), case.env(24, 25))
        fresh = CapturedDecodeSession.capture(session)
        assert fresh.is_current
        env = session.per_token_sym_env(0)
        logits = fresh.replay_token(device, step_data(model, session, np.array([NEXT], np.uint32), 0), env)
        assert furthest(logits, model.forward([NEXT], other)) <= EXACT


def test_a_session_runs_on_its_own_device_only(case: Case, shared_device: Device) -> None:
    with pytest.raises(DeviceError, match="the plan was made for"):
        case.session.realize_token(shared_device, case.data(NEXT, 24), case.env(24, 25))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.zeros(2, np.uint32)},
        {"rope_cos": np.zeros((1, 4), np.float32)},
        {"rope_sin": np.zeros(8, np.float32)},
    ],
    ids=["token_ids", "rope_cos", "rope_sin"],
)
def test_data_of_the_wrong_shape_is_refused(case: Case, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"step data {next(iter(change))} needs shape"):
        step(case, None, replace(case.data(NEXT, 24), **change), case.env(24, 25))


def test_data_that_the_path_needs_must_be_there(case: Case) -> None:
    data = case.data(NEXT, 24)
    if data.mask is not None:
        with pytest.raises(InvalidInputError, match=r"mask needs shape \(40,\), got nothing"):
            step(case, None, replace(data, mask=None), case.env(24, 25))
    if data.offset is not None:
        with pytest.raises(InvalidInputError, match=r"offset needs shape \(2,\), got nothing"):
            step(case, None, replace(data, offset=None), case.env(24, 25))


def test_the_members_of_a_session_name_what_it_holds(case: Case) -> None:
    session: DecodeSession = case.session
    kv: KvCache = case.kv
    assert (session.seq, session.max_seq_len, session.alloc_id) == (1, 40, kv.alloc_id)
    assert session.location == kv.device_location == case.model.device.location
    assert session.optimized.roots[0] == session.effective_target
    assert session.graph_node_count == len(session.graph)
    slots = [(session.base_cache[k], session.base_cache[v]) for k, v in session.kv_nodes]
    assert slots == [(layer.k, layer.v) for layer in kv.layers]
    data_nodes = [session.token_ids_node, session.rope_cos_node, session.rope_sin_node]
    data_nodes += [one for one in (session.mask_node, session.offset_node) if one is not None]
    assert all(session.graph.node(one).op is Op.DATA for one in data_nodes)
    assert len(set(data_nodes)) == len(data_nodes)
