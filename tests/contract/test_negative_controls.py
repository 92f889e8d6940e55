"""Which symbol and which data is live on which path, shown by binding it wrongly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_llama import PATHS

from vkdecode.decode import DecodeSession, DecodeTokenData, StepOptions, build_session, step_data
from vkdecode.decode.captured import CapturedDecodeSession
from vkdecode.graph import SymEnv
from vkdecode.models import Model
from vkdecode.runtime import InferenceContext

Logits = NDArray[np.float32]
ROWS, TOKENS = 24, (3, 5, 7, 11, 13, 17)
WRONG_STEP = 3
# A bounded arm on the SymEnv path bakes its attended length, so it has no captured rung.
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
    offset: tuple[int, int] | None = None
    mask_rows: int | None = None


def decode(model: Model, way: tuple[str, str, str], wrong: Wrong = Wrong()) -> list[Logits]:
    """Logits of all tokens, where one step is bound wrongly."""
    kv_offset, arm, rung = way
    kv = model.new_kv_cache(ROWS)
    with InferenceContext(model.device) as context:
        session = build_session(model, StepOptions(1, "last", kv_offset, arm), kv, context)
        capture = CapturedDecodeSession.capture(session) if rung == "captured" else None
        logits = []
        for number, token in enumerate(TOKENS):
            data = step_data(model, session, np.array([token], np.uint32), number)
            env = session.per_token_sym_env(number)
            if number == WRONG_STEP:
                data, env = _wrongly(session, data, number, wrong)
            run = session.realize_token if capture is None else capture.replay_token
            logits.append(run(model.device, data, env))
        session.close()
    kv.close()
    return logits


def _wrongly(
    session: DecodeSession, data: DecodeTokenData, number: int, wrong: Wrong
) -> tuple[DecodeTokenData, SymEnv]:
    truth = session.per_token_sym_env(number)
    env = SymEnv()
    for symbol, value in (
        (session.cached_len_sym, wrong.cached_len),
        (session.attended_len_sym, wrong.attended_len),
        (session._step.token_count_sym, None),
    ):
        env.bind(symbol, truth.resolve(symbol) if value is None else value)
    if wrong.offset is not None and data.offset is not None:
        data = replace(data, offset=np.array(wrong.offset, np.uint32))
    if wrong.mask_rows is not None and data.mask is not None:
        data = replace(data, mask=np.where(np.arange(ROWS) < wrong.mask_rows, 0, -np.inf).astype(np.float32))
    return data, env


def moved(model: Model, way: tuple[str, str, str], wrong: Wrong) -> list[bool]:
    """For each token, whether its logits differ from those of a run that is bound rightly."""
    pairs = zip(decode(model, way), decode(model, way, wrong), strict=True)
    return [not np.array_equal(right, other) for right, other in pairs]


NEVER = [False] * len(TOKENS)
AT_ONCE = [number >= WRONG_STEP for number in range(len(TOKENS))]
AFTERWARDS = [number > WRONG_STEP for number in range(len(TOKENS))]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_cached_len_is_live_on_the_symenv_path_only(llama: Model, way: tuple[str, str, str]) -> None:
    found = moved(llama, way, Wrong(cached_len=0))
    assert found == (AFTERWARDS if way[0] == "symenv" else NEVER)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_attended_len_is_live_in_the_bounded_arm_of_the_symenv_path_only(
    llama: Model, way: tuple[str, str, str]
) -> None:
    found = moved(llama, way, Wrong(attended_len=2))
    assert found == (AT_ONCE if way[:2] == ("symenv", "bounded") else NEVER)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_the_offset_data_is_live_on_the_device_offset_path_only(llama: Model, way: tuple[str, str, str]) -> None:
    found = moved(llama, way, Wrong(offset=(0, WRONG_STEP + 1)))
    assert found == (AFTERWARDS if way[0] == "device" else NEVER)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_the_attended_length_among_the_offset_data_is_live_in_the_bounded_arm_only(
    llama: Model, way: tuple[str, str, str]
) -> None:
    found = moved(llama, way, Wrong(offset=(WRONG_STEP, 2)))
    assert found == (AT_ONCE if way[:2] == ("device", "bounded") else NEVER)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_the_mask_is_live_in_the_masked_arm_only(llama: Model, way: tuple[str, str, str]) -> None:
    found = moved(llama, way, Wrong(mask_rows=1))
    assert found == (AT_ONCE if way[1] == "masked" else NEVER)
