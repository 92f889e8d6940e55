"""Ways to run a tiny model in tests: tokens one at a time or in one call, through one context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from vkdecode.decode import CapturedDecodeSession, DecodeMode, DecodeSession, InferenceContext, KvCache
from vkdecode.gpu import Recording
from vkdecode.models import Model

Logits = NDArray[np.float32]


def run(
    model: Model,
    token_ids: Iterable[int],
    kv: KvCache,
    context: InferenceContext,
    mode: DecodeMode | None = None,
    logits: str = "last",
) -> Logits:
    """One call of the persistent path."""
    return model.forward_with_kv_context_persistent([int(one) for one in token_ids], kv, context, mode, logits)


def one_by_one(
    model: Model, token_ids: Iterable[int], kv: KvCache, context: InferenceContext, mode: DecodeMode | None = None
) -> Logits:
    """Logits [tokens, vocab] of single-token steps."""
    return np.stack([run(model, [one], kv, context, mode) for one in token_ids])


def taken(context: InferenceContext) -> DecodeSession:
    """The session that a context keeps, out of it."""
    session = context.take_decode_session()
    assert session is not None
    return session


def kept(context: InferenceContext) -> DecodeSession:
    """The session that a context keeps, left with it."""
    session = taken(context)
    context.put_decode_session(session)
    return session


def capture_of(session: DecodeSession) -> CapturedDecodeSession:
    """The capture of a session that has one."""
    assert isinstance(session.capture, CapturedDecodeSession)
    return session.capture


def furthest(first: Logits, second: Logits) -> float:
    """The largest absolute difference; shapes must be equal, and every value finite."""
    assert first.shape == second.shape
    assert first.dtype == np.float32
    assert np.isfinite(first).all()
    return float(np.abs(first - second).max())


def token_ids(count: int, vocab_size: int, seed: int = 0) -> Sequence[int]:
    """Arbitrary but fixed ids."""
    return [int(one) for one in np.random.default_rng(seed).integers(0, vocab_size, count)]


class IdleSequence:
    """A Kompute sequence on a device that was lost: it returns at once, and says nothing."""

    def eval(self) -> None:
        pass


def lose_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no submission do anything from now on."""
    submit = Recording.submit

    def idle(recording: Recording) -> None:
        real, recording._sequence = recording._sequence, IdleSequence()
        try:
            submit(recording)
        finally:
            recording._sequence = real

    monkeypatch.setattr(Recording, "submit", idle)
