"""Several sessions on one device, in one thread and in two: each gets what it gets alone, to the bit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from stepping import Logits, run, token_ids
from tiny_llama import PATHS, TINY, golden

from vkdecode.decode import RUNGS, DecodeMode, InferenceContext
from vkdecode.errors import ClosedError
from vkdecode.gpu import Device, Recording
from vkdecode.loading import load
from vkdecode.models import Model

TinyModels = Callable[..., Model]
TOKENS = 12


def conversation(model: Model, ids: Sequence[int], mode: DecodeMode, wait: Callable[[], object]) -> list[Logits]:
    """Logits of a prompt of 8 tokens and of every token after it, waiting for the other one before each."""
    with InferenceContext(model.device) as context, closing(model.new_kv_cache(40)) as kv:
        wait()
        results = [run(model, ids[:8], kv, context, mode)]
        for one in ids[8:]:
            wait()
            results.append(run(model, [one], kv, context, mode))
        assert context.stats.plans_built == (len(ids) - 8 if mode.rung == "rebuild" else 1)
    return results


def both_ids(model: Model) -> tuple[Sequence[int], Sequence[int]]:
    first, second = (token_ids(8 + TOKENS, model.vocab_size, seed) for seed in (1, 2))
    return first, second


def same(first: Sequence[Logits], second: Sequence[Logits]) -> bool:
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("kv_offset", "arm", "rung"),
    [*((*PATHS[0], rung) for rung in RUNGS), (*PATHS[2], "captured"), (*PATHS[2], "held")],
)
def test_two_threads_decode_on_one_device(llama: Model, kv_offset: str, arm: str, rung: str) -> None:
    mode = DecodeMode(rung, kv_offset, arm)
    ids = [one[: 8 + (4 if rung == "rebuild" else TOKENS)] for one in both_ids(llama)]
    alone = [conversation(llama, one, mode, lambda: None) for one in ids]
    assert not same(*alone)
    found: dict[int, list[Logits]] = {}
    # Both start each token at the same moment.
    gate = threading.Barrier(2, timeout=120)

    def work(number: int) -> None:
        try:
            found[number] = conversation(llama, ids[number], mode, gate.wait)
        except BaseException:
            gate.abort()
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(300)
    assert sorted(found) == [0, 1]
    assert all(same(found[number], alone[number]) for number in range(2))


def turns_of_another_thread(submit: Callable[[], object], monkeypatch: pytest.MonkeyPatch, holding: bool) -> list[int]:
    """For each submission, how often another thread got a turn while the driver ran it.

    Nobody is made to give up the interpreter meanwhile, so a turn means that it was let go. With `holding`, what runs
    in the driver's place never does that.
    """
    turns, stop = [0], threading.Event()
    found: list[int] = []
    real = Recording.submit

    class Counting:
        def __init__(self, sequence: Any) -> None:
            self._sequence = sequence

        def eval(self) -> None:
            before = turns[0]
            if holding:
                sum(range(200_000))
            else:
                self._sequence.eval()
            found.append(turns[0] - before)
            if holding:
                self._sequence.eval()

    def counted(recording: Recording) -> None:
        sequence, recording._sequence = recording._sequence, Counting(recording._sequence)
        try:
            real(recording)
        finally:
            recording._sequence = sequence

    def work() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(600)
        with monkeypatch.context() as patch:
            patch.setattr(Recording, "submit", counted)
            submit()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join(300)
    return found


def test_other_threads_run_while_the_driver_does(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = token_ids(250, llama.vocab_size)
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(300)) as kv:
        alone = run(llama, ids, kv, context)
        results = []

        def submit() -> None:
            for _ in range(6):
                kv.truncate_to(0)
                results.append(run(llama, ids, kv, context))

        assert turns_of_another_thread(submit, monkeypatch, holding=True) == [0] * 6
        turns = turns_of_another_thread(submit, monkeypatch, holding=False)
        assert len(turns) == 6
        assert sum(turns) > 0
    assert all(np.array_equal(one, alone) for one in results)


def test_a_device_is_not_closed_under_a_submission(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = token_ids(100, llama.vocab_size)
    closed_meanwhile = []
    submit = Recording.submit
    with Device(0) as device, load(TINY / "llama", device=device) as model, InferenceContext(device) as context:
        closer = threading.Thread(target=device.close)

        class Closing:
            def __init__(self, sequence: Any) -> None:
                self._sequence = sequence

            def eval(self) -> None:
                closer.start()
                self._sequence.eval()
                closed_meanwhile.append(device.closed)

        def closing_submit(recording: Recording) -> None:
            recording._sequence = Closing(recording._sequence)
            submit(recording)

        with closing(model.new_kv_cache(100)) as kv:
            monkeypatch.setattr(Recording, "submit", closing_submit)
            found = run(model, ids, kv, context)
        closer.join(300)
        assert device.closed
        with pytest.raises(ClosedError):
            model.new_kv_cache(4)
    monkeypatch.undo()
    with closing(llama.new_kv_cache(100)) as kv:
        assert np.array_equal(found, llama.forward(ids, kv))
    assert closed_meanwhile == [False]


@pytest.mark.parametrize(("kv_offset", "arm"), [PATHS[0], PATHS[2]])
def test_two_sessions_interleave_in_one_thread(tiny_models: TinyModels, llama: Model, kv_offset: str, arm: str) -> None:
    """Of one model and of two, each token after one of the other's."""
    mode = DecodeMode("captured", kv_offset, arm)
    phi = tiny_models("phi", llama.device)
    models = (llama, llama, phi)
    ids = (*both_ids(llama), both_ids(phi)[0])
    alone = [conversation(one, its, mode, lambda: None) for one, its in zip(models, ids, strict=True)]
    found: list[list[Logits]] = [[] for _ in models]
    with ExitStack() as stack:
        contexts = [stack.enter_context(InferenceContext(llama.device)) for _ in models]
        caches = [stack.enter_context(closing(one.new_kv_cache(40))) for one in models]
        for step in range(TOKENS + 1):
            for number, model in enumerate(models):
                part = ids[number][:8] if step == 0 else [ids[number][7 + step]]
                found[number].append(run(model, part, caches[number], contexts[number], mode))
        assert [one.stats.plans_built for one in contexts] == [1, 1, 1]
    assert all(same(a, b) for a, b in zip(found, alone, strict=True))


def test_memory_is_counted_right_when_threads_give_it_back(llama: Model) -> None:
    device = llama.device
    before = device.allocated_bytes
    gate = threading.Barrier(4, timeout=120)

    def work() -> None:
        gate.wait()
        for _ in range(60):
            llama.new_kv_cache(16).close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(300)
    assert device.allocated_bytes == before


def test_a_model_is_loaded_while_another_one_decodes(tiny_models: TinyModels, llama: Model) -> None:
    ids = both_ids(llama)[0]
    alone = conversation(llama, ids, DecodeMode(), lambda: None)
    loaded: list[Logits] = []

    def work() -> None:
        with load(TINY / "phi", device=llama.device) as other, closing(other.new_kv_cache(24)) as kv:
            loaded.append(other.forward([int(one) for one in golden("phi").input_ids], kv))

    thread = threading.Thread(target=work)
    thread.start()
    found = conversation(llama, ids, DecodeMode(), lambda: None)
    thread.join(300)
    assert same(found, alone)
    assert np.abs(loaded[0] - golden("phi").logits[-1]).max() <= 1e-4
