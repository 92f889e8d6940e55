"""The SymEnv path's masked arm: a held recording fills the landing rows, and a one-off one moves them to the offset."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from poison import POISON, poison_cache
from stepping import Logits, furthest, run, token_ids
from tiny_llama import PATHS, golden

from vkdecode.decode import (
    MAX_LANDING_ROWS,
    CapturedDecodeSession,
    DecodeMode,
    InferenceContext,
    KvCache,
    Stats,
    StepOptions,
    build_session,
    step_data,
)
from vkdecode.errors import ContextLengthError
from vkdecode.gpu import Device, Recording, read_words
from vkdecode.graph import Op, SymEnv
from vkdecode.models import Model

Rows = NDArray[np.uint32]

ROWS = 40
MASKED = DecodeMode("captured", "symenv", "masked")
EXACT = 1e-4


def rows_of(device: Device, kv: KvCache) -> Rows:
    """The words of all rows [layer and kind, head, row, word]."""
    heads, rows, _ = kv.geometry.shape
    storages = [storage for layer in kv.layers for storage in (layer.k, layer.v)]
    return np.stack([read_words(device, one).reshape(heads, rows, -1) for one in storages])


def changed(before: Rows, after: Rows) -> list[int]:
    """The rows of which a word was changed; in each layer, kind and head they must be the same."""
    differ = (before != after).any(axis=3)
    assert (differ == differ[0, 0]).all()
    return [int(one) for one in np.flatnonzero(differ[0, 0])]


class Step:
    """A session and its capture, and what they do one after the other."""

    def __init__(self, model: Model, seq: int, dtype: str, context: InferenceContext) -> None:
        self.model, self.device = model, model.device
        self.kv = model.new_kv_cache(ROWS, dtype)
        self.session = build_session(model, StepOptions(seq, "last", "symenv", "masked"), self.kv, context)
        self.capture = CapturedDecodeSession.capture(self.session)

    def run_held(self, ids: Sequence[int], at: int) -> Logits:
        """Submit the held recording alone, without any symbol."""
        data = step_data(self.model, self.session, np.array(ids, np.uint32), at)
        (held,) = self.capture._recordings[self.session.logits_node]
        assert not any("kv_move" in kernel for kernel in held.kernels)
        logits = self.session.run(self.device, data, SymEnv(), 0, [held])
        assert isinstance(logits, np.ndarray)
        return logits

    def one_off(self, tokens: int, at: int) -> Recording:
        """What moves the rows of this step."""
        env = self.session.per_token_sym_env(at, tokens)
        made = self.session.executable.record_effects(env, lambda one: bool(one.symbols))
        assert {kernel.split()[0] for kernel in made.kernels} == {"kv_move"}
        assert len(made.kernels) == len(self.kv.layers)
        return made

    def close(self) -> None:
        self.session.close()
        self.kv.close()


@pytest.fixture(
    params=[(1, "f32"), (1, "f16"), (16, "f32"), (16, "f16")], ids=lambda one: f"{one[0]}-{one[1]}", scope="module"
)
def made(request: pytest.FixtureRequest, device: Device, tiny_models: Callable[..., Model]) -> Iterator[Step]:
    seq, dtype = request.param
    with InferenceContext(device) as context, closing(Step(tiny_models("llama", device), seq, dtype, context)) as step:
        yield step


@pytest.fixture
def step(made: Step) -> Step:
    poison_cache(made.device, made.kv)
    return made


def test_a_held_recording_fills_the_landing_rows_and_a_one_off_one_moves_them(step: Step) -> None:
    ids = [3, 5, 7, 11, 13][: step.session.seq]
    at, tokens = 0, len(ids)
    assert (rows_of(step.device, step.kv) == POISON).all()
    for _ in range(3):
        before = rows_of(step.device, step.kv)
        step.run_held(ids, at)
        landed = rows_of(step.device, step.kv)
        # The row at `cached_len` holds what it held.
        assert changed(before, landed) == list(range(ROWS, ROWS + tokens))
        step.one_off(tokens, at).submit()
        moved = rows_of(step.device, step.kv)
        assert changed(landed, moved) == list(range(at, at + tokens))
        np.testing.assert_array_equal(moved[:, :, at : at + tokens], landed[:, :, ROWS : ROWS + tokens])
        at += tokens
        ids = [one + 1 for one in ids]


def test_rows_are_moved_to_where_the_symbol_says(step: Step) -> None:
    """Negative control: with another offset, and for fewer tokens, others change."""
    tokens = min(4, step.session.seq)
    step.run_held([3, 5, 7, 11][:tokens], 0)
    for at, count in ((9, tokens), (20, 1), (ROWS - 1, tokens), (ROWS, tokens), (5, 0)):
        before = rows_of(step.device, step.kv)
        step.one_off(count, at).submit()
        # What does not fit before the landing rows goes nowhere.
        assert changed(before, rows_of(step.device, step.kv)) == list(range(at, min(at + count, ROWS)))


def test_attention_reads_the_landing_rows(step: Step) -> None:
    """Negative control: without its own rows a step has other logits; with them it needs none below."""
    ids = [3, 5, 7, 11][: step.session.seq]
    wanted = step.run_held(ids, 0)
    assert np.isfinite(wanted).all()
    poison_cache(step.device, step.kv)
    np.testing.assert_array_equal(step.run_held(ids, 0), wanted)
    step.one_off(len(ids), 0).submit()
    followed = step.run_held([17], len(ids))
    assert np.isfinite(followed).all()
    poison_cache(step.device, step.kv)
    assert not np.isfinite(step.run_held([17], len(ids))).any()


def test_only_moves_read_a_symbol(step: Step) -> None:
    session = step.session
    for dispatch in session.executable.plan.dispatches:
        assert bool(dispatch.symbols) == (session.graph.node(dispatch.node).op is Op.KV_MOVE)
        if dispatch.symbols:
            assert {one.name for one in dispatch.symbols} == {"cached_len", "token_count"}


def test_a_step_of_no_tokens_leaves_every_row(llama: Model) -> None:
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(ROWS)) as kv:
        poison_cache(llama.device, kv)
        for seq in (1, 16):
            with closing(build_session(llama, StepOptions(seq, "last", "symenv", "masked"), kv, context)) as session:
                capture = CapturedDecodeSession.capture(session)
                capture.run_empty(llama.device, step_data(llama, session, np.zeros(0, np.uint32), 0))
        assert (rows_of(llama.device, kv) == POISON).all()


# Whole steps, on every rung and path


@dataclass(frozen=True)
class Walk:
    """What one rung gives for a prompt and tokens after it, and the rows that count then."""

    logits: Logits
    rows: Rows
    stats: Stats


class Walks:
    """The same steps on each rung of a path, through one context and one cache, which is poisoned in between."""

    def __init__(self, model: Model, path: tuple[str, str], dtype: str, length: int) -> None:
        prompt = token_ids(length, model.vocab_size)
        self.of: dict[str, Walk] = {}
        with InferenceContext(model.device) as context, closing(model.new_kv_cache(length + 8, dtype)) as kv:
            for rung in ("captured", "held", "rebuild"):
                kv.truncate_to(0)
                poison_cache(model.device, kv)
                before = replace(context.stats)
                steps = [prompt, *([one] for one in range(5, 7 if rung == "rebuild" else 9))]
                logits = np.stack([run(model, ids, kv, context, DecodeMode(rung, *path)) for ids in steps])
                assert np.isfinite(logits).all()
                counted = {name: count - getattr(before, name) for name, count in vars(context.stats).items()}
                self.of[rung] = Walk(logits, rows_of(model.device, kv)[:, :, : kv.cached_len], Stats(**counted))


@pytest.fixture(scope="module")
def walks(device: Device, tiny_models: Callable[..., Model]) -> Callable[..., Walks]:
    """By path, cache and length of the prompt; each is walked once."""
    return functools.cache(lambda *how: Walks(tiny_models("llama", device), *how))


@pytest.mark.parametrize(("dtype", "length"), [("f32", 150), ("f16", 20)])
@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_all_rungs_give_the_same_logits_and_rows(
    walks: Callable[..., Walks], path: tuple[str, str], dtype: str, length: int
) -> None:
    of = walks(path, dtype, length).of
    for walk in of.values():
        np.testing.assert_array_equal(walk.logits, of["captured"].logits[: len(walk.logits)])
        np.testing.assert_array_equal(walk.rows, of["captured"].rows[:, :, : walk.rows.shape[2]])
    assert of["captured"].rows.shape[2] == length + 4
    chunks = -(-length // MAX_LANDING_ROWS) if path == ("symenv", "masked") else 1
    replayed = {} if path == ("symenv", "bounded") else {"tokens_replayed": 4, "prefill_replays": chunks}
    moved = {"one_off_recordings": 4 + chunks} if path == ("symenv", "masked") else {}
    kinds = len({*[MAX_LANDING_ROWS] * (chunks - 1), length % MAX_LANDING_ROWS}) if chunks > 1 else 1
    recorded = {"recordings_made": 1, "prefill_recordings_made": kinds} if replayed else {}
    anew = {"recordings_made": 4, "prefill_recordings_made": chunks}
    built = {"plans_built": 1, "prefill_plans_built": kinds}
    assert of["captured"].stats == Stats(**built, **(recorded or anew), **replayed, **moved)
    assert of["held"].stats == Stats(**anew)
    assert of["rebuild"].stats == Stats(2, 2, prefill_plans_built=chunks, prefill_recordings_made=chunks)


@pytest.mark.parametrize(("dtype", "length", "near"), [("f32", 150, EXACT), ("f16", 20, 1e-2)])
def test_all_paths_give_nearly_the_same(walks: Callable[..., Walks], dtype: str, length: int, near: float) -> None:
    """The long prompt takes several chunks on the SymEnv path; one path adds up in another order than the next."""
    logits = [walks(path, dtype, length).of["captured"].logits for path in PATHS]
    for one in logits[1:]:
        assert furthest(one, logits[0]) <= near


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3-text", "gpt2"])
def test_windows_and_positions_count_from_the_tokens_own_place(
    tiny_models: Callable[..., Model], device: Device, name: str
) -> None:
    """A landing row's number says nothing about its position; a prompt of several chunks is longer than the window."""
    model = tiny_models(name, device)
    reference = golden(name)
    ids = [int(one) for one in [*reference.input_ids, *reference.decode_ids[:8]]]
    rungs = []
    for path in (PATHS[0], PATHS[2]):
        with InferenceContext(device) as context, closing(model.new_kv_cache(len(ids))) as kv:
            mode = DecodeMode("captured", *path)
            parts = [ids[:7], ids[7:24], *([one] for one in ids[24:])]
            rungs.append(np.stack([run(model, part, kv, context, mode) for part in parts]))
        assert furthest(rungs[-1][1], reference.logits[-1]) <= EXACT
        assert furthest(rungs[-1][2:], reference.decode_logits[:8]) <= EXACT
    assert furthest(rungs[0], rungs[1]) <= EXACT


@pytest.mark.parametrize("rows", [1, 5, 64, 65])
def test_a_cache_is_filled_to_its_last_row(llama: Model, rows: int) -> None:
    ids = list(token_ids(rows, llama.vocab_size))
    with closing(llama.new_kv_cache(rows)) as kv, InferenceContext(llama.device) as context:
        assert kv.geometry.rows == rows + min(rows, MAX_LANDING_ROWS)
        poison_cache(llama.device, kv)
        whole = run(llama, ids, kv, context, MASKED)
        with pytest.raises(ContextLengthError):
            run(llama, [1], kv, context, MASKED)
        kv.truncate_to(rows - 1)
        last = run(llama, ids[-1:], kv, context, MASKED)
        assert kv.cached_len == rows
        kv.truncate_to(0)
        assert furthest(whole, run(llama, ids, kv, context, DecodeMode())) <= EXACT
        assert furthest(last, whole) <= EXACT
