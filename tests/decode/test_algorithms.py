"""Dispatches that are alike share an algorithm, so a plan makes about a dozen, however many layers the model has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from safetensors.numpy import load_file
from stepping import kept, run
from tiny_llama import PATHS, TINY, changed_copy

from vkdecode.decode import DecodeSession, InferenceContext, StepOptions, build_session
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.runtime import Executable

LAYERS = 7
MOST = 16


@pytest.fixture(scope="module")
def deep(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The tiny Llama with its two layers again and again."""
    tensors = load_file(TINY / "llama" / "model.safetensors")
    more = {
        name.replace(f"layers.{layer % 2}.", f"layers.{layer}."): array
        for layer in range(2, LAYERS)
        for name, array in tensors.items()
        if f"layers.{layer % 2}." in name
    }
    folder = tmp_path_factory.mktemp("deep") / "model"
    changed_copy(folder, config={"num_hidden_layers": LAYERS}, tensors=more)
    with load(folder, device=device) as model:
        yield model


def count(session: DecodeSession) -> tuple[int, int]:
    """Dispatches and algorithms of a plan."""
    executable = session.executable
    assert len(executable._algorithms) == len(executable.plan.dispatches)
    return len(executable._algorithms), len(set(executable._algorithms))


def built(model: Model, options: StepOptions, dtype: str = "f32") -> tuple[int, int]:
    """The same of a plan made for this."""
    with (
        InferenceContext(model.device) as context,
        closing(model.new_kv_cache(40, dtype)) as kv,
        closing(build_session(model, options, kv, context)) as session,
    ):
        return count(session)


@pytest.mark.parametrize(
    ("seq", "path", "dtype"), [(1, path, "f32") for path in PATHS] + [(1, PATHS[0], "f16"), (16, PATHS[2], "f32")]
)
def test_layers_share_their_algorithms(llama: Model, deep: Model, seq: int, path: tuple[str, str], dtype: str) -> None:
    options = StepOptions(seq, "last", *path)
    shallow, deeper = built(llama, options, dtype), built(deep, options, dtype)
    assert deeper[0] - shallow[0] >= 5 * (LAYERS - 2)
    assert deeper[1] == shallow[1] <= MOST


@pytest.mark.parametrize("name", ["phi", "gemma3-text", "qwen2_moe", "gpt2"])
def test_other_models_take_few(tiny_models: Callable[..., Model], device: Device, name: str) -> None:
    for path in PATHS:
        dispatches, algorithms = built(tiny_models(name, device), StepOptions(1, "last", *path))
        assert algorithms < dispatches
        assert algorithms <= MOST


def test_an_algorithm_for_each_dispatch_gives_the_same(deep: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer reads its own weights and rows: where they begin comes with the dispatch, not with the algorithm."""
    steps = ([3, 5, 7], [11], [13])
    found = []
    make = Executable._make
    for one_each in (False, True):
        if one_each:
            monkeypatch.setattr(
                Executable,
                "_make",
                lambda self, indices: {at: one for index in indices for at, one in make(self, [index]).items()},
            )
        with InferenceContext(deep.device) as context, closing(deep.new_kv_cache(40)) as kv:
            found.append([run(deep, step, kv, context) for step in steps])
            dispatches, algorithms = count(kept(context))
            assert (algorithms == dispatches) == one_each
    np.testing.assert_array_equal(found[0], found[1])
