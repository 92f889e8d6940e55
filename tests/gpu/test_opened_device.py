"""The device that Kompute opens is the one that the loader listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkdecode.errors import DeviceError
from vkdecode.gpu import Device, list_devices


def test_a_device_that_kompute_calls_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may count devices differently; the name is what both know."""
    others = [replace(info, name="Another GPU") for info in list_devices()]
    monkeypatch.setattr("vkdecode.gpu.device.list_devices", lambda: others)
    with pytest.raises(DeviceError, match="'Another GPU' to the loader but"):
        Device(0)
