"""Weights of one shape lie in one buffer, and the dispatches of a prompt's layers share their algorithms."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from conftest import TINY, TinyModels

from vkdecode.decode import DecodeSession, InferenceContext
from vkdecode.gpu import Algorithm, Device, Kernel
from vkdecode.loading import load
from vkdecode.runtime import Plan

IDS = [3, 5, 7, 11, 13]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-text", "gpt_oss"])
def test_where_weights_lie_changes_no_logit(
    name: str, tiny_models: TinyModels, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = tiny_models(name, device)
    buffers = {together.weight_store.get(spec).whole for spec in together.weight_specs()}
    assert len(buffers) < len(together.weight_specs())
    monkeypatch.setattr("vkdecode.gpu.device._MAX_BYTES_TOGETHER", 0)
    before = device.allocated_bytes
    with load(TINY / name, device=device) as apart, InferenceContext(device) as context:
        assert len({apart.weight_store.get(spec).whole for spec in apart.weight_specs()}) == len(apart.weight_specs())
        assert device.allocated_bytes - before == sum(buffer.nbytes for buffer in buffers)
        for model in (together, apart):
            kv = model.new_kv_cache(16)
            logits = [model.forward_with_kv_context_persistent(ids, kv, context) for ids in (IDS, [17])]
            kv.close()
            if model is together:
                expected = logits
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(("name", "attentions"), [("llama", 1), ("gemma3-text", 1)])  # with a window and without
def test_dispatches_that_differ_only_in_their_weights_and_rows_share_an_algorithm(
    name: str, attentions: int, tiny_models: TinyModels, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Counted(Algorithm):
        def __init__(self, device: Device, kernel: Kernel, *args: Any) -> None:
            super().__init__(device, kernel, *args)
            made.append(kernel.key)

    monkeypatch.setattr("vkdecode.runtime.executable.Algorithm", Counted)
    model = tiny_models(name, device)
    with closing(model.new_kv_cache(16)) as kv, InferenceContext(device) as context:
        model.prepare(kv, context, len(IDS))
        dispatches = only_plan(context).dispatches
    kinds = {(one.kernel.key, tuple(one.spec.items()), one.workgroups) for one in dispatches}
    assert len([key for key in made if key.startswith("attention")]) == attentions
    assert len(kinds) <= len(made) < len(dispatches)
    if name == "llama":
        assert sorted(made) == sorted(key for key, *_ in kinds)


def only_plan(context: InferenceContext) -> Plan:
    """The only plan that a context holds beside its decode session."""
    (session,) = context.held.values()
    assert isinstance(session, DecodeSession)
    return session.executable.plan
