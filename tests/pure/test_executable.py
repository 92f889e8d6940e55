"""What is recorded of real plans, on a device of paper: the storages that are bound, and the order between them."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from made_up import smollm2
from order_check import dependences, faults, segments_of
from paper import PaperDevice, commands_of, on_storages, paper_model
from tiny_llama import PATHS

from vkdecode.decode import DecodeSession, InferenceContext, StepOptions, build_session, plan_step, prompt_steps
from vkdecode.decode.top_k import left_out
from vkdecode.gpu import Barrier, Download, Run, StorageKind, Upload
from vkdecode.graph import Op
from vkdecode.runtime import WORK_PER_SUBMISSION, ArenaPool, Executable, footprint

LAYERS = 3


class Bench:
    """Sessions of one context on a device of paper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layers: int = LAYERS, work: int = WORK_PER_SUBMISSION) -> None:
        self.model = paper_model(monkeypatch, smollm2(layers))
        self.device = cast(PaperDevice, self.model.device)
        self.context = InferenceContext(self.model.device, work_per_submission=work)
        self.kv = self.model.new_kv_cache(256, "f16")

    def session(
        self, seq: int = 1, path: tuple[str, str] = ("device", "bounded"), logits: str = "last"
    ) -> DecodeSession:
        return build_session(self.model, StepOptions(seq, logits, *path), self.kv, self.context)


def kept(session: DecodeSession, want: int, held: bool) -> list[int]:
    """The dispatches of a recording: all but the lists that are not wanted, and in a held one what has symbols."""
    out = left_out(session._step, session.wanted_node(want))
    dispatches = session.executable.plan.dispatches
    return [at for at, one in enumerate(dispatches) if one.node not in out and not (held and one.symbols)]


def recorded(session: DecodeSession, want: int, held: bool) -> list[Any]:
    env = session.per_token_sym_env(5)
    include = (lambda one: not one.symbols) if held else (lambda _: True)
    return session.record(env, want, include)


@pytest.mark.parametrize("work", [1 << 24, WORK_PER_SUBMISSION])
@pytest.mark.parametrize("seq", [1, 16])
@pytest.mark.parametrize("path", PATHS)
def test_every_recording_is_ordered_on_the_storages_that_it_binds(
    monkeypatch: pytest.MonkeyPatch, path: tuple[str, str], seq: int, work: int
) -> None:
    bench = Bench(monkeypatch, work=work)
    session = bench.session(seq, path)
    executable = session.executable
    for want in (0, 1, 64):
        for held in (False, True):
            commands = commands_of(recorded(session, want, held))
            indices = kept(session, want, held)
            order, accesses = on_storages(executable, indices, commands)
            assert faults(order, accesses, segments_of(executable.plan.order, indices)) == []
            for number, each in enumerate(commands):
                uploads = [at for at, one in enumerate(each) if isinstance(one, Upload)]
                downloads = [at for at, one in enumerate(each) if isinstance(one, Download)]
                assert uploads == ([0] if number == 0 else [])
                assert downloads == ([len(each) - 1] if number == len(commands) - 1 else [])
            first, last = commands[0][0], commands[-1][-1]
            assert isinstance(first, Upload) and isinstance(last, Download)
            assert first.storages == (executable.storage(session.token_ids_node).whole,)
            assert last.storages == (executable.storage(session.wanted_node(want)),)


@pytest.mark.parametrize("seq", [1, 16])
def test_a_barrier_that_is_not_recorded_is_found(monkeypatch: pytest.MonkeyPatch, seq: int) -> None:
    session = Bench(monkeypatch).session(seq)
    indices = kept(session, 0, False)
    (commands,) = commands_of(recorded(session, 0, False))
    barriers = [at for at, one in enumerate(commands) if isinstance(one, Barrier)]
    assert len(barriers) >= 5 * LAYERS
    for at in barriers:
        order, accesses = on_storages(session.executable, indices, [[*commands[:at], *commands[at + 1 :]]])
        assert faults(order, accesses, segments_of(session.executable.plan.order, indices)) != []


def test_what_moves_rows_behind_a_held_recording_needs_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Bench(monkeypatch).session(16, ("symenv", "masked"))
    executable = session.executable
    env = session.per_token_sym_env(5, 11)
    moved = [at for at, one in enumerate(executable.plan.dispatches) if one.symbols]
    (commands,) = commands_of([executable.record_effects(env, lambda one: bool(one.symbols))])
    order, accesses = on_storages(executable, moved, [commands])
    assert len(moved) == LAYERS == len(commands)
    assert dependences(accesses, [moved]) == set() and faults(order, accesses, [moved]) == []
    assert {session.graph.node(executable.plan.dispatches[at].node).op for at in moved} == {Op.KV_MOVE}
    pushed = [one.push for one in commands if isinstance(one, Run)]
    assert {(push["cached_len"], push["token_count"], push["max_seq"]) for push in pushed} == {(5, 11, 256)}


@pytest.mark.parametrize("seq", [1, 64])
@pytest.mark.parametrize("path", PATHS)
def test_the_layers_share_their_algorithms(monkeypatch: pytest.MonkeyPatch, path: tuple[str, str], seq: int) -> None:
    """With the weights, caches and activations that they really bind."""
    made = []
    for layers in (3, 30):
        session = Bench(monkeypatch, layers).session(seq, path)
        (commands,) = commands_of(recorded(session, 0, False))
        made.append(len({id(one.algorithm) for one in commands if isinstance(one, Run)}))
    assert made[0] == made[1] <= 12


@pytest.mark.parametrize("change", [{"workgroups": (1, 1, 1)}, {"spec": {"WORKGROUP": 1}}, {"kernel": None}])
def test_dispatches_that_differ_have_algorithms_of_their_own(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    bench = Bench(monkeypatch)
    session = bench.session()
    plan = session.executable.plan
    at = max(index for index, one in enumerate(plan.dispatches) if session.graph.node(one.node).op is Op.ATTENTION)
    run = plan.dispatches[at]
    if "kernel" in change:
        change = {"kernel": replace(run.kernel, key="another")}
    changed = replace(plan, dispatches=(*plan.dispatches[:at], replace(run, **change), *plan.dispatches[at + 1 :]))
    made = []
    for one in (plan, changed):
        executable = Executable(bench.model.device, one, session.base_cache, ArenaPool(bench.model.device))
        (commands,) = commands_of(executable.record(session.per_token_sym_env(0)))
        on_storages(executable, range(len(one.dispatches)), [commands])
        made.append(len({id(each.algorithm) for each in commands if isinstance(each, Run)}))
    assert made[1] == made[0] + 1


@pytest.mark.parametrize("seq", [1, 16])
def test_each_activation_lies_where_the_plan_says(monkeypatch: pytest.MonkeyPatch, seq: int) -> None:
    executable = Bench(monkeypatch).session(seq).executable
    assert len(executable.plan.spans) > 10
    for node, span in executable.plan.spans.items():
        storage = executable.storage(node)
        assert storage.whole is executable.arenas[-1 - span.place]
        assert (storage.first_byte, storage.first_byte + storage.nbytes) == (span.start, span.end)


# What the plans of a context share


def test_plans_of_a_context_share_arenas_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    before = len(bench.device.allocated)
    sessions = [bench.session(seq, logits=logits) for seq, logits in ((64, "none"), (16, "last"), (1, "last"))]
    arenas = {id(one) for session in sessions for one in session.executable.arenas}
    assert len(arenas) == 1
    results = [session.executable.storage(session.logits_node) for session in sessions[1:]]
    assert results[0] is results[1]
    data = [session.executable.storage(session.token_ids_node).whole for session in sessions]
    assert len(set(map(id, data))) == 3
    # The arena, the data of each, the row that ends a chunk, the logits, and two lists.
    assert len(bench.device.allocated) - before == 1 + 3 + 1 + 1 + 2


@pytest.mark.parametrize("tokens", [1, 12, 100, 600])
def test_a_prompts_plans_allocate_what_their_footprint_says(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    bench = Bench(monkeypatch)
    before = len(bench.device.allocated)
    steps = prompt_steps(bench.model, tokens)
    sessions = [build_session(bench.model, options, bench.kv, bench.context) for options in steps]
    said = footprint(*(plan_step(bench.model, options, bench.kv.geometry) for options in steps))
    arenas = sum({id(one): one.nbytes for each in sessions for one in each.executable.arenas}.values())
    made = bench.device.allocated[before:]
    assert said.activations == sum(made)
    assert said.staging == sum(made) - arenas
    assert said.allocations == 2 * len(made) - 1


def test_a_larger_plan_takes_an_arena_of_its_own_and_later_ones_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    small, large, again = (bench.session(seq) for seq in (1, 64, 1))
    assert small.executable.arenas[0].nbytes < large.executable.arenas[0].nbytes
    assert again.executable.arenas[0] in (small.executable.arenas[0], large.executable.arenas[0])


def test_a_pool_gives_the_same_memory_again_but_not_twice_at_once() -> None:
    device = PaperDevice()
    pool = ArenaPool(cast(Any, device))
    first = pool.take([64, 64], StorageKind.DEVICE)
    assert first[0] is not first[1]
    assert pool.take([32, 64], StorageKind.DEVICE) == first
    assert pool.take([64], StorageKind.STAGED)[0] not in first
    larger = pool.take([128, 64], StorageKind.DEVICE)
    assert larger[0].nbytes == 128 and larger[1] is first[0]
    staged = pool.take([64, 100], StorageKind.STAGED)
    assert [one.nbytes for one in staged] == [64, 112]
    assert pool.take([100], StorageKind.STAGED) == staged[1:]


def test_a_pool_keeps_nothing_alive_and_gives_nothing_that_was_closed() -> None:
    device = PaperDevice()
    pool = ArenaPool(cast(Any, device))
    taken = pool.take([64], StorageKind.DEVICE)
    taken[0].close()
    assert pool.take([64], StorageKind.DEVICE)[0] is not taken[0]
    gc.collect()
    made = len(device.allocated)
    pool.take([64], StorageKind.DEVICE)
    assert len(device.allocated) == made + 1


def test_a_pool_gives_back_what_it_took_where_memory_runs_out() -> None:
    device = PaperDevice()
    pool = ArenaPool(cast(Any, device))
    held = pool.take([64], StorageKind.DEVICE)
    device.room = 200
    with pytest.raises(MemoryError):
        pool.take([64, 128, 128], StorageKind.DEVICE)
    assert not held[0].closed
    device.room = 200
    assert pool.take([64, 128], StorageKind.DEVICE)[0] is held[0]


def test_data_of_a_step_is_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    session = bench.session(1, ("symenv", "masked"))
    parts = [session.executable.storage(node) for node in session.executable.plan.data]
    assert len({id(one.whole) for one in parts}) == 1
    ends = sorted((one.first_byte, one.first_byte + one.nbytes) for one in parts)
    assert all(end == start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] == parts[0].whole.nbytes
