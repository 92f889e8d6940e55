"""A driver that refuses the n-th buffer or pipeline, for every n: a clear error, all given back, older plans whole."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from stepping import Logits, furthest, run
from tiny_llama import TINY, golden

from vkdecode.decode import DecodeMode, InferenceContext, KvCache
from vkdecode.errors import DeviceError, OutOfDeviceMemoryError
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

REFERENCE = golden("llama")
PROMPT = [int(one) for one in REFERENCE.input_ids]
NEXT = int(REFERENCE.decode_ids[0])
EXACT = 1e-4


class FailingManager:
    """A Kompute manager whose n-th tensor cannot be made, or its n-th algorithm."""

    def __init__(self, manager: Any, what: str, failing: int) -> None:
        self._manager = manager
        self._what = what
        self._left = failing

    def __getattr__(self, name: str) -> Any:
        if name == self._what:
            self._left -= 1
            if self._left == 0:
                raise RuntimeError("VK_ERROR_OUT_OF_DEVICE_MEMORY")
        return getattr(self._manager, name)


class OlderSession:
    """A model that decodes on the device already; each token must give what it gave at first."""

    def __init__(self, model: Model, kv: KvCache, context: InferenceContext) -> None:
        self.model, self.kv, self.context = model, kv, context
        run(model, PROMPT, kv, context)
        self._wanted = self._token()

    def _token(self) -> Logits:
        logits = run(self.model, [NEXT], self.kv, self.context)
        self.kv.truncate_to(len(PROMPT))
        return logits

    def check(self) -> None:
        assert np.array_equal(self._token(), self._wanted)
        assert self.context.stats.plans_built == 1


@pytest.fixture(scope="module")
def older() -> Iterator[OlderSession]:
    with (
        Device(0) as device,
        load(TINY / "llama", device=device) as model,
        InferenceContext(device) as context,
        closing(model.new_kv_cache(40)) as kv,
    ):
        yield OlderSession(model, kv, context)


REFUSED = {"tensor_t": "cannot be allocated on device 0", "algorithm": r"device 0.* refuses kernel"}


def fail_at_every_call(older: OlderSession, action: Callable[[], None], what: str = "tensor_t") -> int:
    """How often the action was refused before it went through."""
    device = older.model.device
    gc.collect()
    before = device.allocated_bytes
    for failing in range(1, 200):
        manager = device.manager
        device._manager = FailingManager(manager, what, failing)
        try:
            action()
        except DeviceError as error:
            # Already here: whoever handles the error may want the memory for something smaller.
            assert device.allocated_bytes == before
            assert isinstance(error, OutOfDeviceMemoryError) == (what == "tensor_t")
            assert re.search(REFUSED[what], str(error))
            assert "OUT_OF_DEVICE_MEMORY" in str(error)
        else:
            return failing - 1
        finally:
            device._manager = manager
        older.check()
    pytest.fail("the action never went through")


def test_loading(older: OlderSession) -> None:
    def action() -> None:
        load(TINY / "phi", device=older.model.device).close()

    assert fail_at_every_call(older, action) > 8  # a buffer for each shape of weights, and one to upload through


def test_a_cache(older: OlderSession) -> None:
    assert fail_at_every_call(older, lambda: older.model.new_kv_cache(24).close()) == 2


@pytest.mark.parametrize("ids", [[NEXT], PROMPT[:12]], ids=["decode", "prompt"])
@pytest.mark.parametrize(
    ("what", "rung"), [("tensor_t", "captured"), ("tensor_t", "rebuild"), ("algorithm", "captured")]
)
def test_a_plan(older: OlderSession, what: str, rung: str, ids: list[int]) -> None:
    model = older.model
    with closing(model.new_kv_cache(24)) as kv, InferenceContext(model.device) as context:

        def action() -> None:
            kv.truncate_to(0)
            try:
                run(model, ids, kv, context, DecodeMode(rung))
            except DeviceError:
                assert kv.cached_len == 0
                assert not context.has_decode_session and not context.held
                raise

        failed = fail_at_every_call(older, action, what)
        # Buffers: the data of a step, three kinds of results, and one arena.
        assert failed == 5 if what == "tensor_t" else 8 <= failed <= 16
        kv.truncate_to(0)
        assert furthest(run(model, PROMPT, kv, context), REFERENCE.logits[-1]) <= EXACT
