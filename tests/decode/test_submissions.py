"""How work is cut into submissions changes no bit, and a device that stops executing is noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
from stepping import capture_of, kept, lose_devices

from vkdecode.decode import DecodeMode, DecodeSession, InferenceContext
from vkdecode.errors import DeviceLostError, InvalidInputError
from vkdecode.gpu import Device
from vkdecode.models import Model

TinyModels = Callable[..., Model]
IDS = [5, 9, 77, 3, 120, 41, 8, 15, 16, 23, 42, 99, 100, 7, 64, 31, 12]


def logits_at_cap(model: Model, mode: DecodeMode, cap: int) -> tuple[list[np.ndarray], int]:
    """Logits after a prompt and after each of three tokens, and how many submissions the decode plan has."""
    with closing(model.new_kv_cache(40)) as kv, InferenceContext(model.device, work_per_submission=cap) as context:
        found = [model.forward_with_kv_context_persistent(IDS, kv, context, mode)]
        for token in IDS[:3]:
            found.append(model.forward_with_kv_context_persistent([token], kv, context, mode))
        session = kept(context)
        order = session.executable.plan.order
        assert [len(one) for one in capture_of(session)._recordings.values()] == [len(order)]
        check_cut_by_work_only(session, cap)
    return found, len(order)


def check_cut_by_work_only(session: DecodeSession, cap: int) -> None:
    """Each submission takes as much work as the cap allows, or one dispatch that takes more."""
    dispatches = session.executable.plan.dispatches
    works = [
        [dispatches[step.dispatch].work for step in steps if step.kind == "run"]
        for steps in session.executable.plan.order
    ]
    assert sum(map(len, works)) == len(dispatches)
    for one, behind in pairwise([*works, [cap + 1]]):
        assert sum(one) <= cap or len(one) == 1
        assert sum(one) + behind[0] > cap


@pytest.mark.parametrize(("name", "kv_offset"), [("llama", "device"), ("llama", "symenv"), ("phi", "device")])
def test_logits_are_the_same_to_the_bit_at_every_cap(
    tiny_models: TinyModels, device: Device, name: str, kv_offset: str
) -> None:
    model = tiny_models(name, device)
    mode = DecodeMode("captured", kv_offset)
    whole, one = logits_at_cap(model, mode, 1 << 36)
    counts = [one]
    for cap in (20_000, 1):
        cut, count = logits_at_cap(model, mode, cap)
        assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True))
        counts.append(count)
    assert counts[0] == 1
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("cap", [0, -5])
def test_a_cap_that_allows_nothing_is_refused(device: Device, cap: int) -> None:
    with pytest.raises(InvalidInputError, match="work_per_submission"):
        InferenceContext(device, work_per_submission=cap)


@pytest.mark.parametrize(
    ("kv_offset", "tokens", "rung"),
    [("device", tokens, rung) for tokens in (1, 9) for rung in ("captured", "held", "rebuild")]
    + [("symenv", 1, "captured"), ("symenv", 9, "held")],
)
def test_a_device_that_stops_executing_is_noticed(
    llama: Model, monkeypatch: pytest.MonkeyPatch, rung: str, tokens: int, kv_offset: str
) -> None:
    """Kompute reports nothing then, and the staging buffer still holds the last logits: a plausible wrong answer."""
    mode = DecodeMode(rung, kv_offset)
    with closing(llama.new_kv_cache(40)) as kv, InferenceContext(llama.device) as context:
        first = llama.forward_with_kv_context_persistent(IDS[:tokens], kv, context, mode)
        before = kv.cached_len
        with monkeypatch.context() as patch:
            lose_devices(patch)
            with pytest.raises(DeviceLostError, match=r"of \d+ dispatches.*(linear|kv_move).*open a new one"):
                llama.forward_with_kv_context_persistent(IDS[:tokens], kv, context, mode)
        assert kv.cached_len == before
        assert not context.has_decode_session
        kv.truncate_to(0)
        again = llama.forward_with_kv_context_persistent(IDS[:tokens], kv, context, mode)
        assert np.array_equal(first, again)
