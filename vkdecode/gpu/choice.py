"""Choosing a device: by ordinal, by kind, by name or a part of it, or the best there is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from vkdecode.errors import DeviceError, InvalidInputError, VkDecodeWarning
from vkdecode.gpu.device import Device
from vkdecode.gpu.vulkan_info import DeviceInfo, list_devices

DEVICE_VARIABLE = "VKDECODE_DEVICE"
_PREFERENCE = {"discrete": 0, "integrated": 1, "virtual": 2, "other": 3, "cpu": 4}


def open_device(wanted: int | str | None = None) -> Device:
    """Open the device that is asked for, or the best one.

    Args:
        wanted: an ordinal, or text as `find_device` takes it; None for what the environment variable VKDECODE_DEVICE
            says, and without it the best device, a CPU driver only with a warning.

    Raises:
        DeviceError: there is no such device, or more than one.

    """
    if isinstance(wanted, int):
        return Device(wanted)
    if wanted is not None and not isinstance(wanted, str):
        raise InvalidInputError(f"a device is an ordinal or text, not {wanted!r}")
    text = wanted if wanted is not None else os.environ.get(DEVICE_VARIABLE, "")
    devices = list_devices()
    if wanted is not None or text.strip():
        source = "" if wanted is not None else f" ({DEVICE_VARIABLE})"
        return Device(find_device(text, devices, source).ordinal)
    best = best_device(devices)
    if best.kind == "cpu":
        warnings.warn(f"no GPU found, using the CPU driver {best.name}", VkDecodeWarning, stacklevel=2)
    return Device(best.ordinal)


def best_device(devices: Sequence[DeviceInfo]) -> DeviceInfo:
    """Discrete before integrated before virtual before CPU; among equals the lowest ordinal.

    Raises:
        DeviceError: there is none.

    """
    if not devices:
        raise DeviceError(
            "no Vulkan device on this machine; install a driver (on Debian without a GPU: mesa-vulkan-drivers)"
        )
    return min(devices, key=lambda info: (_PREFERENCE.get(info.kind, _PREFERENCE["other"]), info.ordinal))


def find_device(text: str, devices: Sequence[DeviceInfo], source: str = "") -> DeviceInfo:
    """The one device that a text means: an ordinal, a kind such as `integrated`, a name, or a part of a name.

    Case does not count. A whole name is preferred to a part of another one.

    Raises:
        DeviceError: no device fits, or several do; the message lists the candidates.

    """
    word = text.strip().casefold()
    ways = (
        [info for info in devices if word.isdecimal() and info.ordinal == int(word)],
        [info for info in devices if info.kind == word],
        [info for info in devices if info.name.casefold() == word],
        [info for info in devices if word and not word.isdecimal() and word in info.name.casefold()],
    )
    fitting = next((found for found in ways if found), [])
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        listed = "; ".join(map(str, fitting))
        raise DeviceError(f"device {text!r}{source} fits several: {listed}; give the ordinal")
    listed = "; ".join(map(str, devices)) or "none"
    raise DeviceError(f"there is no Vulkan device {text!r}{source}; devices: {listed}")
