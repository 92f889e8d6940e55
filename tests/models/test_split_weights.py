"""Weights larger than one storage buffer: split by rows, with the same logits as the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from stepping import taken
from tiny_llama import TINY

from vkdecode.decode import InferenceContext
from vkdecode.errors import DeviceError
from vkdecode.gpu import Device, StorageKind, lanes_of
from vkdecode.graph import Graph, NodeId, Op, SymEnv, WeightSpec
from vkdecode.loading import load
from vkdecode.runtime import StorageCache, WeightStore
from vkdecode.weights import DType, open_weights


@contextmanager
def small_buffers(lanes: str, limit: int) -> Iterator[Device]:
    """A device that claims that a storage buffer may have no more than `limit` bytes."""
    with Device(0, lanes=lanes) as device:
        limits = replace(device.info.limits, max_storage_buffer_range_bytes=limit)
        device.info = replace(device.info, limits=limits)
        yield device


@pytest.mark.parametrize(
    ("name", "lanes", "limit"),
    [
        ("llama", "subgroup", 12288),
        ("llama-bias-headdim", "subgroup", 16384),
        ("llama-tied-mqa", "subgroup", 16384),
        ("phi", "subgroup", 14336),
        ("llama-bias-headdim", "shared", 32768),
        ("phi", "shared", 32768),
    ],
)
def test_logits_are_those_of_the_whole_weights(name: str, lanes: str, limit: int) -> None:
    expected = np.load(TINY / name / "expected.npz")
    with small_buffers(lanes, limit) as device, load(TINY / name, device=device) as model:
        kv = model.new_kv_cache(27)
        with InferenceContext(device) as context:
            model.forward_with_kv_context_persistent(expected["input_ids"][:12], kv, context)
            found = [model.forward_with_kv_context_persistent(expected["input_ids"][12:], kv, context)]
            for token in expected["decode_ids"][:3]:
                found.append(model.forward_with_kv_context_persistent([int(token)], kv, context))
            session = taken(context)
            ops = {session.graph.node(one.node).op for one in session.executable.plan.dispatches}
            assert Op.CONCAT in ops
            executable, nodes = session.executable, [*session.base_cache, *session.executable.plan.results]
            bound = {*executable.arenas, *(executable.storage(node).whole for node in nodes)}
            assert max(one.nbytes for one in bound) <= limit
            session.close()
    wanted = np.concatenate([expected["logits"][-1:], expected["decode_logits"][:3]])
    assert np.abs(np.stack(found) - wanted).max() < 1e-4


def test_a_row_that_fits_no_buffer_is_refused_by_name() -> None:
    with small_buffers("subgroup", 4096) as device, pytest.raises(DeviceError, match=r"embed_tokens\.weight fits"):
        load(TINY / "llama", device=device)
    with small_buffers("subgroup", 4096) as device:
        assert device.allocated_bytes == 0


def test_a_head_over_the_range_that_vulkan_promises(tmp_path: Path, device: Device) -> None:
    """Vocabulary 151,936 by 896 in f16, as Qwen 2.5 0.5B has it: 272 MB, against the 128 MiB of lavapipe."""
    vocab, hidden, name = 151_936, 896, "lm_head.weight"
    rng = np.random.default_rng(5)
    weight = (rng.standard_normal((vocab, hidden), np.float32) * 0.05).astype(np.float16)
    save_file({name: weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    x = rng.standard_normal((1, hidden), np.float32)
    graph = Graph()
    source = graph.data("x", (1, hidden))
    head = graph.weight(WeightSpec((name,), (vocab,), hidden, DType.F16))
    store = WeightStore(device, lanes_of(device), partial(open_weights, tmp_path))

    def bind(graph: Graph, constants: Sequence[NodeId]) -> StorageCache:
        cache = StorageCache()
        for node in constants:
            if node == source:
                cache[node] = device.allocate(x.nbytes, DType.F32, StorageKind.STAGED)
                cache[node].write(x)
            else:
                cache[node] = store.get(graph.attrs(node, WeightSpec))
        return cache

    with InferenceContext(device) as context:
        prebuilt, cache = context.prebuild_optimized_as_with_env(graph, graph.linear(source, head), (), bind)
        logits = context.realize_prebuilt_as_with_env(graph, prebuilt, SymEnv())
        sizes = [cache[node].nbytes for node in cache if node != source]
        prebuilt.executable.close()
    assert len(sizes) > 1
    assert max(sizes) <= device.info.limits.max_storage_buffer_range_bytes
    assert sum(sizes) >= weight.nbytes
    for first in range(0, vocab, 16_384):
        wanted = weight[first : first + 16_384].astype(np.float32) @ x[0]
        assert np.abs(logits[first : first + 16_384] - wanted).max() < 1e-4
