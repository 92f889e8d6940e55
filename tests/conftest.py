"""Devices and tiny models that the tests of all floors share; opening and loading them once keeps the suite quick."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

# Helper modules lie beside the tests of pure logic; other folders use them too.
sys.path.insert(0, str(Path(__file__).with_name("pure")))

# Started in the background, as some CI runners do, a process ignores Ctrl-C, and so would what the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

LONGEST = ("tests/shaders/test_lanes.py", "tests/validation/")
TINY = Path(__file__).with_name("data") / "tiny"
TinyModels = Callable[..., Model]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """The first Vulkan device, with the kernel form that it picks itself."""
    with Device(0) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_device() -> Iterator[Device]:
    """The same device with the kernels that assume nothing about subgroups."""
    with Device(0, lanes="shared") as opened:
        yield opened


@pytest.fixture(scope="session")
def tiny_models() -> Iterator[TinyModels]:
    """Tiny checkpoints by name and device, each loaded once and never changed by a test."""
    loaded: dict[tuple[str, Device, str | None], Model] = {}

    def get(name: str, device: Device, weights: str | None = None) -> Model:
        key = (name, device, weights)
        if key not in loaded:
            loaded[key] = load(TINY / name, device=device, weights=weights)
        return loaded[key]

    yield get
    for model in loaded.values():
        model.close()


@pytest.fixture
def llama(tiny_models: TinyModels, device: Device) -> Model:
    """The plainest tiny checkpoint."""
    return tiny_models("llama", device)
