"""Choosing among made-up devices: by ordinal, kind and name, by preference, and never by guess."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkdecode.errors import DeviceError, VkDecodeWarning
from vkdecode.gpu import DeviceInfo, Limits, best_device, choice, find_device, open_device

LIMITS = Limits(1 << 27, 1 << 30, 4096, (65535,) * 3, (128, 128, 64), 128, 16384, 128, 4)
RADEON = DeviceInfo(0, "AMD Radeon RX 7800 XT", "AMD", "discrete", "RADV", "1.3.0", 1, (), 64, True, LIMITS)
ARC = replace(RADEON, ordinal=1, name="Intel(R) Arc(tm) Graphics", vendor="Intel", kind="integrated")
CPU = replace(RADEON, ordinal=2, name="llvmpipe (LLVM 15.0.6, 256 bits)", vendor="Mesa", kind="cpu")
SECOND = replace(RADEON, ordinal=3)
SHORT = replace(ARC, ordinal=4, name="Arc")


def test_the_best_is_discrete_then_integrated_then_cpu_then_the_lowest_ordinal() -> None:
    everything = [CPU, ARC, SECOND, RADEON]
    order = []
    while everything:
        order.append(best_device(everything))
        everything.remove(order[-1])
    assert order == [RADEON, SECOND, ARC, CPU]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", RADEON),
        (" 2 ", CPU),
        ("cpu", CPU),
        ("Integrated", ARC),
        ("discrete", RADEON),
        ("radeon", RADEON),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", CPU),
        ("ARC(TM)", ARC),
    ],
)
def test_a_device_is_found(text: str, found: DeviceInfo) -> None:
    assert find_device(text, [RADEON, ARC, CPU]) is found


def test_a_whole_name_goes_before_a_part_of_another() -> None:
    assert find_device("arc", [ARC, SHORT]) is SHORT


@pytest.mark.parametrize("text", ["radeon", "discrete", RADEON.name])
def test_two_equal_devices_are_told_apart_by_ordinal_only(text: str) -> None:
    with pytest.raises(DeviceError, match=r"fits several: 0: AMD.*; 3: AMD.*give the ordinal"):
        find_device(text, [RADEON, ARC, CPU, SECOND])
    assert find_device("3", [RADEON, ARC, CPU, SECOND]) is SECOND


@pytest.mark.parametrize("text", ["7", "-1", "geforce", "", "   ", "virtual"])
def test_what_fits_none_lists_the_candidates(text: str) -> None:
    with pytest.raises(DeviceError, match=r"no Vulkan device.*0: AMD.*1: Intel"):
        find_device(text, [RADEON, ARC])


def test_without_any_device_the_message_says_what_to_install() -> None:
    with pytest.raises(DeviceError, match="mesa-vulkan-drivers"):
        best_device([])


def test_the_environment_decides_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(choice, "Device", opened.append)
    monkeypatch.setattr(choice, "list_devices", lambda: [RADEON, ARC, CPU])
    monkeypatch.delenv("VKDECODE_DEVICE", raising=False)
    open_device()
    open_device("arc")
    open_device(2)
    monkeypatch.setenv("VKDECODE_DEVICE", "integrated")
    open_device()
    open_device("cpu")
    assert opened == [0, 1, 2, 1, 2]
    monkeypatch.setenv("VKDECODE_DEVICE", "geforce")
    with pytest.raises(DeviceError, match=r"'geforce' \(VKDECODE_DEVICE\)"):
        open_device()


def test_a_cpu_driver_is_chosen_with_a_warning_and_asked_for_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "Device", lambda ordinal: ordinal)
    monkeypatch.setattr(choice, "list_devices", lambda: [CPU])
    monkeypatch.delenv("VKDECODE_DEVICE", raising=False)
    with pytest.warns(VkDecodeWarning, match="no GPU found"):
        open_device()
    assert open_device("cpu") is not None
