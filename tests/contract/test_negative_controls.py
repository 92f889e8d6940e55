"""Which symbol and which data is live on which path, shown by binding it wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from poison import poison_cache
from tiny_llama import PATHS

from vkdecode.decode import DecodeSession, DecodeTokenData, InferenceContext, StepOptions, build_session, step_data
from vkdecode.decode.captured import CapturedDecodeSession
from vkdecode.gpu import Device
from vkdecode.graph import SymEnv
from vkdecode.models import Model

Logits = NDArray[np.float32]
ROWS, TOKENS = 24, (3, 5, 7, 11, 13, 17)
WRONG_STEP = 3
# A bounded arm on the SymEnv path bakes the offset and the attended length, so it has no captured rung.
WAYS = [
    (*path, rung)
    for path in PATHS
    for rung in ("held", "captured")
    if (*path, rung) != ("symenv", "bounded", "captured")
]


@dataclass(frozen=True)
class Wrong:
    """What the step in the middle is told instead of the truth; None for the truth."""

    cached_len: int | None = None
    attended_len: int | None = None
    token_count: int | None = None
    offset: tuple[int, int] | None = None
    mask_rows: int | None = None


class Way:
    """A session of one path that decodes the tokens by hand on one rung, each time into a cache of its own."""

    def __init__(self, model: Model, kv_offset: str, arm: str, rung: str) -> None:
        self.kv_offset, self.arm = kv_offset, arm
        self._model, self._captured = model, rung == "captured"
        self._context, self._kv = InferenceContext(model.device), model.new_kv_cache(ROWS)
        self._session = build_session(model, StepOptions(1, "last", kv_offset, arm), self._kv, self._context)
        self._right = self._decode(Wrong())

    def moved(self, wrong: Wrong) -> list[bool]:
        """For each token, whether its logits differ from those of a run that is bound rightly."""
        pairs = zip(self._right, self._decode(wrong), strict=True)
        return [not np.array_equal(right, other) for right, other in pairs]

    def close(self) -> None:
        self._session.close()
        self._kv.close()
        self._context.close()

    def _decode(self, wrong: Wrong) -> list[Logits]:
        """Logits of all tokens, where one step is bound wrongly."""
        kv, session = self._model.new_kv_cache(ROWS), self._session
        poison_cache(self._model.device, kv)
        assert session.rebind_kv(kv) is None
        self._kv.close()
        self._kv = kv
        capture = CapturedDecodeSession.capture(session) if self._captured else None
        logits = []
        for number, token in enumerate(TOKENS):
            data = step_data(self._model, session, np.array([token], np.uint32), number)
            env = session.per_token_sym_env(number)
            if number == WRONG_STEP:
                data, env = _wrongly(session, data, number, wrong)
            run = session.realize_token if capture is None else capture.replay_token
            logits.append(run(self._model.device, data, env))
        return logits


@pytest.fixture(params=WAYS, ids="-".join, scope="module")
def way(request: pytest.FixtureRequest, tiny_models: Callable[..., Model], device: Device) -> Iterator[Way]:
    with closing(Way(tiny_models("llama", device), *request.param)) as made:
        yield made


def _wrongly(
    session: DecodeSession, data: DecodeTokenData, number: int, wrong: Wrong
) -> tuple[DecodeTokenData, SymEnv]:
    truth = session.per_token_sym_env(number)
    env = SymEnv()
    for symbol, value in (
        (session.cached_len_sym, wrong.cached_len),
        (session.attended_len_sym, wrong.attended_len),
        (session._step.token_count_sym, wrong.token_count),
    ):
        env.bind(symbol, truth.resolve(symbol) if value is None else value)
    if wrong.offset is not None and data.offset is not None:
        data = replace(data, offset=np.array(wrong.offset, np.uint32))
    if wrong.mask_rows is not None and data.mask is not None:
        data = replace(data, mask=np.where(np.arange(ROWS) < wrong.mask_rows, 0, -np.inf).astype(np.float32))
    return data, env


NEVER = [False] * len(TOKENS)
AT_ONCE = [number >= WRONG_STEP for number in range(len(TOKENS))]
AFTERWARDS = [number > WRONG_STEP for number in range(len(TOKENS))]


def test_cached_len_is_live_on_the_symenv_path_only(way: Way) -> None:
    """In the masked arm the step reads its landing rows, moved behind it; in the bounded arm what it wrote."""
    live = AFTERWARDS if way.arm == "masked" else AT_ONCE
    assert way.moved(Wrong(cached_len=0)) == (live if way.kv_offset == "symenv" else NEVER)


def test_attended_len_is_live_in_the_bounded_arm_of_the_symenv_path_only(way: Way) -> None:
    found = way.moved(Wrong(attended_len=2))
    assert found == (AT_ONCE if (way.kv_offset, way.arm) == ("symenv", "bounded") else NEVER)


def test_the_token_count_is_live_where_rows_are_moved_only(way: Way) -> None:
    found = way.moved(Wrong(token_count=0))
    assert found == (AFTERWARDS if (way.kv_offset, way.arm) == ("symenv", "masked") else NEVER)


def test_the_offset_data_is_live_on_the_device_offset_path_only(way: Way) -> None:
    found = way.moved(Wrong(offset=(0, WRONG_STEP + 1)))
    assert found == (AT_ONCE if way.kv_offset == "device" else NEVER)


def test_the_attended_length_among_the_offset_data_is_live_on_the_device_offset_path_only(way: Way) -> None:
    """In either arm it says where the step's own rows are."""
    found = way.moved(Wrong(offset=(WRONG_STEP, 2)))
    assert found == (AT_ONCE if way.kv_offset == "device" else NEVER)


def test_the_mask_is_live_in_the_masked_arm_only(way: Way) -> None:
    assert way.moved(Wrong(mask_rows=1)) == (AT_ONCE if way.arm == "masked" else NEVER)
