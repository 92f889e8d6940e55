"""What fails leaves nothing half done: a step that breaks off, memory that runs out, things closed under a session."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from stepping import Logits, capture_of, furthest, one_by_one, run, taken, token_ids
from tiny_llama import TINY, golden

from vkdecode.decode import DecodeMode, InferenceContext, KvCache, step_data
from vkdecode.errors import ClosedError, DeviceError, OutOfDeviceMemoryError
from vkdecode.gpu import Device, Recording
from vkdecode.loading import load
from vkdecode.models import Model

EXACT = 1e-4
REFERENCE = golden("llama")
PROMPT = [int(one) for one in REFERENCE.input_ids]
NEXT = int(REFERENCE.decode_ids[0])


@pytest.fixture
def own_device() -> Iterator[Device]:
    """A device that a test may close or starve."""
    with Device(0) as opened:
        yield opened


@pytest.fixture
def own_model(own_device: Device) -> Iterator[Model]:
    with load(TINY / "llama", device=own_device) as model:
        yield model


@contextmanager
def one_failing_submission(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Iterator[list[int]]:
    """Let one submission fail once `after` others have run; the list counts all of them."""
    submit = Recording.submit
    calls: list[int] = []

    def failing(recording: Recording) -> None:
        calls.append(len(calls))
        if len(calls) == after + 1:
            raise DeviceError("the device was lost")
        submit(recording)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "submit", failing)
        yield calls


def check_decodes(model: Model, kv: KvCache, context: InferenceContext, mode: DecodeMode | None = None) -> None:
    kv.truncate_to(0)
    assert furthest(run(model, PROMPT, kv, context, mode), REFERENCE.logits[-1]) <= EXACT
    decoded = one_by_one(model, REFERENCE.decode_ids[:2], kv, context, mode)
    assert furthest(decoded, REFERENCE.decode_logits[:2]) <= EXACT


# A step that breaks off


@pytest.mark.parametrize("rung", ["captured", "held", "rebuild"])
@pytest.mark.parametrize("kv_offset", ["device", "symenv"])
def test_a_failed_token_is_not_counted_and_can_be_run_again(
    llama: Model, monkeypatch: pytest.MonkeyPatch, rung: str, kv_offset: str
) -> None:
    mode = DecodeMode(rung, kv_offset)
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(40)) as kv:
        run(llama, PROMPT, kv, context, mode)
        run(llama, [NEXT], kv, context, mode)
        kv.truncate_to(24)
        alloc = kv.alloc_id
        with one_failing_submission(monkeypatch), pytest.raises(DeviceError, match="lost"):
            run(llama, [NEXT], kv, context, mode)
        assert (kv.cached_len, kv.alloc_id) == (24, alloc)
        again = one_by_one(llama, REFERENCE.decode_ids[:2], kv, context, mode)
        assert furthest(again, REFERENCE.decode_logits[:2]) <= EXACT


def test_a_plan_whose_step_failed_is_not_used_again(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(40)) as kv:
        check_decodes(llama, kv, context)
        with one_failing_submission(monkeypatch), pytest.raises(DeviceError):
            run(llama, [NEXT], kv, context)
        assert not context.has_decode_session
        check_decodes(llama, kv, context)
        assert context.stats.plans_built == 2


@pytest.mark.parametrize(
    ("logits", "kv_offset", "after"), [("last", "device", 1), ("all", "device", 3), ("last", "symenv", 5)]
)
def test_a_prompt_that_breaks_off_between_chunks_leaves_nothing(
    llama: Model, monkeypatch: pytest.MonkeyPatch, logits: str, kv_offset: str, after: int
) -> None:
    """On the SymEnv path the fifth submission is the third chunk, and the sixth moves its rows."""
    mode = DecodeMode("captured", kv_offset)
    ids = list(token_ids(280, llama.vocab_size))
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(300)) as kv:
        run(llama, PROMPT[:5], kv, context, mode)
        with one_failing_submission(monkeypatch, after) as calls, pytest.raises(DeviceError):
            run(llama, ids, kv, context, mode, logits)
        assert len(calls) == after + 1
        assert kv.cached_len == 5
        assert furthest(run(llama, PROMPT[5:], kv, context, mode), REFERENCE.logits[-1]) <= EXACT


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_is_passed_on_and_leaves_nothing(
    llama: Model, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(recording: Recording) -> None:
        raise error

    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(40)) as kv:
        check_decodes(llama, kv, context)
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(Recording, "submit", interrupted)
            run(llama, [NEXT], kv, context)
        assert kv.cached_len == 26
        check_decodes(llama, kv, context)


# Memory


def memory(device: Device) -> int:
    gc.collect()
    return device.allocated_bytes


@contextmanager
def room_for(device: Device, nbytes: int) -> Iterator[None]:
    """Leave only so many bytes of the device's memory."""
    info = device.info
    device.info = replace(info, heap_bytes=device.allocated_bytes + nbytes)
    try:
        yield
    finally:
        device.info = info


def out_of_memory_while_loading(device: Device, nbytes: int) -> None:
    before = memory(device)
    with room_for(device, nbytes):
        try:
            load(TINY / "llama", device=device)
        except OutOfDeviceMemoryError as error:
            assert "bytes" in str(error)
            assert device.allocated_bytes == before
        else:
            pytest.fail("this much memory cannot have been enough")


def test_weights_that_do_not_fit_are_refused_before_anything_is_uploaded(own_device: Device) -> None:
    before = memory(own_device)
    for nbytes in (0, 1000, 100_000, 300_000):
        out_of_memory_while_loading(own_device, nbytes)
    assert memory(own_device) == before
    with (
        load(TINY / "llama", device=own_device) as model,
        closing(model.new_kv_cache(40)) as kv,
        InferenceContext(own_device) as context,
    ):
        check_decodes(model, kv, context)


def test_a_cache_that_does_not_fit_gives_back_what_it_took(own_device: Device, own_model: Model) -> None:
    size = own_model.kv_geometry(64, "f32").nbytes
    before = memory(own_device)
    for slots in range(4):
        with room_for(own_device, slots * size + 16):
            try:
                own_model.new_kv_cache(64)
            except OutOfDeviceMemoryError as error:
                assert "use a smaller context" in str(error)
                assert own_device.allocated_bytes == before
            else:
                pytest.fail("this much memory cannot have been enough")
    with room_for(own_device, 4 * size):
        own_model.new_kv_cache(64).close()
    assert memory(own_device) == before


@pytest.mark.parametrize("tokens", [1, 24], ids=["decode", "prompt"])
@pytest.mark.parametrize("rung", ["captured", "rebuild"])
def test_a_plan_that_does_not_fit_gives_back_what_it_took(
    own_device: Device, own_model: Model, rung: str, tokens: int
) -> None:
    mode = DecodeMode(rung)
    with closing(own_model.new_kv_cache(64)) as kv, InferenceContext(own_device) as context:
        before = memory(own_device)
        refused = 0
        logits: Logits | None = None
        for nbytes in range(0, 1 << 20, 1024 if tokens == 1 else 16384):
            with room_for(own_device, nbytes):
                try:
                    logits = run(own_model, PROMPT[:tokens], kv, context, mode)
                    break
                except OutOfDeviceMemoryError:
                    # Already here: whoever handles the error may want the memory for something smaller.
                    assert own_device.allocated_bytes == before
                    refused += 1
            assert kv.cached_len == 0
        assert refused >= 2
        assert logits is not None
        assert furthest(logits, REFERENCE.logits[tokens - 1]) <= EXACT
        check_decodes(own_model, kv, context)


def test_everything_is_given_back_in_the_end(own_device: Device) -> None:
    before = memory(own_device)
    for _ in range(2):
        with (
            load(TINY / "llama", device=own_device) as model,
            InferenceContext(own_device) as context,
            closing(model.new_kv_cache(64)) as kv,
        ):
            for rung in ("captured", "held", "rebuild"):
                for kv_offset in ("device", "symenv"):
                    check_decodes(model, kv, context, DecodeMode(rung, kv_offset))
        assert memory(own_device) == before


def test_decoding_takes_no_more_memory_with_every_token(own_device: Device, own_model: Model) -> None:
    with closing(own_model.new_kv_cache(64)) as kv, InferenceContext(own_device) as context:
        for mode in (DecodeMode(), DecodeMode("held"), DecodeMode("captured", "symenv")):
            run(own_model, [1], kv, context, mode)
            before = memory(own_device)
            one_by_one(own_model, [2, 3, 4, 5], kv, context, mode)
            assert memory(own_device) == before


# Things closed while a session holds them


def test_a_closed_cache_is_refused_and_another_one_served(llama: Model) -> None:
    with InferenceContext(llama.device) as context:
        kv = llama.new_kv_cache(40)
        check_decodes(llama, kv, context)
        kv.close()
        for ids in ([NEXT], PROMPT):
            with pytest.raises(ClosedError, match="KV cache was closed"):
                run(llama, ids, kv, context)
        with closing(llama.new_kv_cache(40)) as other:
            check_decodes(llama, other, context)
        assert (context.stats.plans_built, context.stats.rebinds) == (1, 2)


def test_a_session_can_be_moved_from_a_closed_cache_only(llama: Model) -> None:
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(40)) as kv:
        check_decodes(llama, kv, context)
        session = taken(context)
        closed = llama.new_kv_cache(40)
        closed.close()
        refusal = session.rebind_kv(closed)
        assert refusal is not None
        assert refusal.kind == "RESIDENCY_UNKNOWN"
        context.put_decode_session(session)
        check_decodes(llama, kv, context)
        assert context.stats.plans_built == 1


def test_a_closed_model_is_refused_and_another_one_served(device: Device) -> None:
    with InferenceContext(device) as context:
        model = load(TINY / "llama", device=device)
        kv = model.new_kv_cache(40)
        check_decodes(model, kv, context)
        model.close()
        model.close()
        for use in (lambda: run(model, [NEXT], kv, context), lambda: model.new_kv_cache(4)):
            with pytest.raises(ClosedError, match="model llama was closed"):
                use()
        kv.close()
        with load(TINY / "llama", device=device) as other, closing(other.new_kv_cache(40)) as fresh:
            check_decodes(other, fresh, context)
        assert context.stats.plans_built == 2


def test_a_closed_context_builds_nothing_more(llama: Model) -> None:
    context = InferenceContext(llama.device)
    with closing(llama.new_kv_cache(40)) as kv:
        check_decodes(llama, kv, context)
        context.close()
        context.close()
        assert not context.has_decode_session
        for ids in ([NEXT], PROMPT[:3]):
            with pytest.raises(ClosedError, match="InferenceContext was closed"):
                run(llama, ids, kv, context)
        assert kv.cached_len == 26
        with InferenceContext(llama.device) as other:
            check_decodes(llama, kv, other)


def test_a_closed_session_does_not_run(llama: Model) -> None:
    with InferenceContext(llama.device) as context, closing(llama.new_kv_cache(40)) as kv:
        check_decodes(llama, kv, context)
        session = taken(context)
        session.close()
        session.close()
        with pytest.raises(ClosedError, match="DecodeSession was closed"):
            session.rebind_kv(kv)
        context.put_decode_session(session)
        # A session that its owner closed is found stale and a new one built.
        check_decodes(llama, kv, context)
        assert context.stats.plans_built == 2


@pytest.mark.parametrize("rung", ["captured", "held", "rebuild"])
def test_a_closed_device_ends_everything_on_it_without_a_crash(rung: str) -> None:
    mode = DecodeMode(rung)
    device = Device(0)
    model = load(TINY / "llama", device=device)
    context = InferenceContext(device)
    kv = model.new_kv_cache(40)
    check_decodes(model, kv, context, mode)
    session = context.take_decode_session()
    if session is not None:
        data_node = session.token_ids_node
        context.put_decode_session(session)
    device.close()
    device.close()
    for ids in ([NEXT], PROMPT):
        with pytest.raises(ClosedError):
            run(model, ids, kv, context, mode)
    with pytest.raises(ClosedError):
        model.new_kv_cache(4)
    with pytest.raises(ClosedError):
        kv.truncate_to(0)
    if session is not None:
        with pytest.raises(ClosedError):
            session.base_cache[data_node].write(np.zeros(1, np.uint32))
    for one in (context, kv, model):
        one.close()
    gc.collect()
    with Device(0) as again, load(TINY / "llama", device=again) as other, closing(other.new_kv_cache(24)) as fresh:
        assert furthest(other.forward(PROMPT, fresh), REFERENCE.logits[-1]) <= EXACT


def test_a_session_notices_a_closed_device_itself() -> None:
    with Device(0) as device:
        model = load(TINY / "llama", device=device)
        kv = model.new_kv_cache(40)
        context = InferenceContext(device)
        run(model, [1], kv, context)
        session = taken(context)
    data = step_data(model, session, np.array([1], np.uint32), 1)
    env = session.per_token_sym_env(1)
    for use in (capture_of(session).replay_token, session.realize_token):
        with pytest.raises(ClosedError):
            use(device, data, env)
