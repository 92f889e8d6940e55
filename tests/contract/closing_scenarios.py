"""Scenarios of closing things in one order or another; `test_closing` runs each in a process of its own.

A scenario that goes well prints nothing and leaves with status 0. `loose` ones let the interpreter clean up.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vkdecode.decode import CapturedDecodeSession, DecodeMode, DecodeSession, InferenceContext, KvCache, step_data
from vkdecode.errors import ClosedError
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

LLAMA = Path(__file__).parents[1] / "data" / "tiny" / "llama"
ROWS = 24


class Running:
    """A model that has read a prompt and decoded through held plans."""

    def __init__(self, device: Device, mode: DecodeMode | None = None) -> None:
        self.device = device
        self.mode = mode
        self.model: Model = load(LLAMA, device=device)
        self.kv: KvCache = self.model.new_kv_cache(ROWS)
        self.context = InferenceContext(device)
        self.step([3, 5, 7])
        self.logits = self.step([11])

    def step(self, tokens: list[int]) -> Any:
        return self.model.forward_with_kv_context_persistent(tokens, self.kv, self.context, self.mode)

    def session(self) -> DecodeSession:
        session = self.context.take_decode_session()
        assert isinstance(session, DecodeSession)
        self.context.put_decode_session(session)
        return session

    def parts(self) -> dict[str, Any]:
        return {"device": self.device, "model": self.model, "cache": self.kv, "context": self.context}


def refuses(action: Callable[[], object]) -> None:
    """The action must raise `ClosedError`, in one line."""
    try:
        action()
    except ClosedError as error:
        assert "\n" not in str(error)
    else:
        raise AssertionError("using a closed thing worked")


def one_closed(name: str) -> None:
    """One part is closed while plans hold it: a step is refused, and the rest still ends well."""
    device = Device(0)
    running = Running(device)
    running.parts()[name].close()
    for tokens in ([13], [13, 17]):
        refuses(partial(running.step, tokens))
    running.context.close()
    del running
    gc.collect()
    assert device.allocated_bytes == 0, device.allocated_bytes
    device.close()


def session_outlives(name: str) -> None:
    """A session taken out of its context is run after one part was closed and dropped."""
    device = Device(0)
    running = Running(device)
    session, kv = running.session(), running.kv
    assert running.context.take_decode_session() is session
    data = step_data(running.model, session, np.array([13], np.uint32), 4)
    env, capture = session.per_token_sym_env(4), session.capture
    assert isinstance(capture, CapturedDecodeSession)
    expected = running.step([13])
    running.parts()[name].close()
    if name == "device":
        refuses(lambda: session.realize_token(device, data, env))
        refuses(lambda: capture.replay_token(device, data, env))
        refuses(lambda: session.base_cache[session.kv_nodes[0][0]].tensor)
    else:
        if name != "cache":
            kv.close()
        del kv, running
        gc.collect()
        # Model and cache are gone, and the plan holds what it binds: the same token gives the same logits.
        for run in (session.realize_token, capture.replay_token):
            np.testing.assert_array_equal(run(device, data, env), expected)
        session.close()
        refuses(lambda: session.realize_token(device, data, env))
        del session, capture, run
        gc.collect()
        assert device.allocated_bytes == 0, device.allocated_bytes
    device.close()


def many_orders() -> None:
    """The context is closed first or last, the others in all orders, on devices of their own."""
    orders = list(itertools.permutations(("device", "model", "cache")))
    for order in [("context", *one) for one in orders] + [(*one, "context") for one in orders]:
        device = Device(0)
        running = Running(device)
        for name in order:
            running.parts()[name].close()
            running.parts()[name].close()
            refuses(partial(running.step, [13]))
        del running
        gc.collect()
        assert device.allocated_bytes == 0, (order, device.allocated_bytes)


def nothing_closed_loose() -> None:
    """The interpreter ends with everything open and held from a module's globals."""
    globals()["kept"] = Running(Device(0))


def symenv_loose() -> None:
    """The same on the SymEnv path, whose capture also makes one-off recordings."""
    globals()["kept"] = Running(Device(0), DecodeMode("captured", "symenv", "masked"))


def device_closed_loose() -> None:
    """The device is closed under plans that the interpreter finds at its end."""
    globals()["kept"] = running = Running(Device(0))
    globals()["session"] = running.session()
    running.device.close()


def session_in_a_cycle_loose() -> None:
    """A session that only the cycle collector can find, dropped before the device is closed."""
    device = Device(0)
    running = Running(device)
    session: Any = running.context.take_decode_session()
    session.cycle = session
    del session, running
    gc.collect()
    assert device.allocated_bytes == 0, device.allocated_bytes


def closed_during_a_cycle() -> None:
    """Caches, contexts and models come and go on one device, which ends up empty."""
    with Device(0) as device:
        taken = []
        for _ in range(4):
            running = Running(device)
            taken.append(device.allocated_bytes)
            running.context.close()
            running.kv.close()
            running.model.close()
            del running
            gc.collect()
            assert device.allocated_bytes == 0, device.allocated_bytes
        assert len(set(taken)) == 1, taken


SCENARIOS: dict[str, Callable[[], None]] = {
    **{f"one_closed_{name}": partial(one_closed, name) for name in ("device", "model", "cache", "context")},
    **{f"session_outlives_{name}": partial(session_outlives, name) for name in ("device", "model", "cache")},
    "many_orders": many_orders,
    "nothing_closed_loose": nothing_closed_loose,
    "symenv_loose": symenv_loose,
    "device_closed_loose": device_closed_loose,
    "session_in_a_cycle_loose": session_in_a_cycle_loose,
    "closed_during_a_cycle": closed_during_a_cycle,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
