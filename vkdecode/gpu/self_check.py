"""The check of a device at start-up: whether it does what every kernel relies on and no Vulkan property says.

It takes two dispatches and some milliseconds. On a device that fails it kernels would give wrong answers silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import DeviceError
from vkdecode.gpu.device import Device
from vkdecode.gpu.kernels import registry
from vkdecode.gpu.recorder import Algorithm, Download, Recording, Run, Upload
from vkdecode.gpu.storage import Storage, StorageKind
from vkdecode.gpu.vulkan_info import DeviceInfo
from vkdecode.weights.dtypes import DType

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Words = NDArray[np.uint32]
Mask = NDArray[np.bool_]

_ROUNDS = 5
_UNWRITTEN = np.uint32(0x7FC1_7FC3)
_LARGEST_HALF = 65504.0
_SMALLEST_NORMAL_HALF = 2.0**-14
_HIDDEN = np.float32(-3.0e38)
_NAN, _INF = np.nan, np.inf

_HALVES = np.array(
    [1, -2.5, _LARGEST_HALF, 2.0**-14, 2.0**-24, -1023 * 2.0**-24, _INF, -_INF, 0.1, -(2.0**-15), 0, 3], np.float16
)
_BFLOATS = np.array([1, -2.5, 3e38, 2.0**-126, _INF, -_INF, 0.1, -7], ml_dtypes.bfloat16)
_PACKED = np.array([1, -2.5, _LARGEST_HALF, 1e5, -3e38, 2.0**-14, 0.1, -1e-6], np.float32)
_SELECTS = np.array([[_NAN, -1], [_NAN, -_INF], [_INF, -1], [2.5, 0], [-1e30, 0]], np.float32)
_EXPS = np.array([0, 1, -1, -20, -100, -1000, -3e38, -_INF], np.float32)
_SILUS = np.array([0, 1, -1, 20, -1000, -1e30, 3e38], np.float32)
_ROOTS = np.array([1, 4, 1e-12, 3e30, 1.0000001], np.float32)


@dataclass(frozen=True)
class SelfCheck:
    """What a device was found to do right.

    Attributes:
        subgroup: a workgroup of subgroup_size invocations is one full subgroup with right sum, maximum and shuffle.
        shared: shared memory keeps the order that barriers give it.
        numbers: 16-bit values are unpacked and packed right, what a mask hides does not leak, and `exp`, divisions by
            infinity and `inversesqrt` give what the kernels expect at the ends of their range.
        details: one line for each thing that is wrong.

    """

    subgroup: bool
    shared: bool
    numbers: bool
    details: tuple[str, ...] = ()


def run_self_check(device: Device, workgroup: int) -> SelfCheck:
    """Check an open device.

    Args:
        device: the device.
        workgroup: invocations of the workgroup that shared memory is checked with, a power of two.

    Raises:
        DeviceError: the device refuses to run the check at all.

    """
    subgroup = _subgroup_faults(device)
    shared, numbers = judge(workgroup, _run(device, workgroup))
    return SelfCheck(not subgroup, not shared, not numbers, (*subgroup, *shared, *numbers))


def subgroups_usable(info: DeviceInfo) -> bool:
    """Whether a device offers what a kernel of one subgroup needs; whether it keeps its word is checked apart."""
    size = info.subgroup_size
    return info.subgroup_ops and 4 <= size <= 64 and size & (size - 1) == 0


def subgroup_check(device: Device, size: int) -> bool:
    """Whether a workgroup of `size` invocations is one full subgroup whose sum, maximum and shuffle are right."""
    result = device.allocate(4 * size, DType.U32, StorageKind.STAGED)
    try:
        result.data[:] = 0
        algorithm = Algorithm(device, registry().get("subgroup_check"), [result], {"WORKGROUP": size}, (1, 1, 1))
        _run_over(device, algorithm, (result,))
        return bool((result.data[:size] == 1).all())
    finally:
        result.close()


def _subgroup_faults(device: Device) -> tuple[str, ...]:
    size = device.info.subgroup_size
    if not subgroups_usable(device.info):
        return (f"subgroup: subgroups of {size} with sum, maximum and shuffle are not offered in a usable size",)
    try:
        if subgroup_check(device, size):
            return ()
    except DeviceError as error:
        return (f"subgroup: {error}",)
    return (
        f"subgroup: a workgroup of {size} invocations is not one full subgroup with right sum, maximum and shuffle",
    )


def _run(device: Device, workgroup: int) -> Words:
    """Dispatch the check of shared memory and numbers; the words that it left."""
    operands = check_operands(workgroup)
    count = result_words(workgroup)
    source = device.allocate(operands.nbytes, DType.U32, StorageKind.STAGED)
    result = device.allocate(4 * count, DType.U32, StorageKind.STAGED)
    try:
        source.write(operands)
        result.data.view(np.uint32)[:] = _UNWRITTEN
        spec = check_constants(workgroup)
        algorithm = Algorithm(device, registry().get("self_check"), [source, result], spec, (1, 1, 1))
        _run_over(device, algorithm, (source, result))
        return np.array(result.data.view(np.uint32)[:count])
    finally:
        source.close()
        result.close()


def _run_over(device: Device, algorithm: Algorithm, storages: tuple[Storage, ...]) -> None:
    """Upload, run, and read back the last storage."""
    Recording(device, [Upload(storages), Run(algorithm), Download(storages[-1:])]).submit()


def _lane_values(workgroup: int) -> F32:
    """Whole numbers, so that sums are exact in any order, with the largest in the middle."""
    return ((np.arange(workgroup) * 5 + 3) % 101).astype(np.float32)


def check_constants(workgroup: int) -> dict[str, int]:
    """The check's specialization constants."""
    return {
        "WORKGROUP": workgroup,
        "ROUNDS": _ROUNDS,
        "HALVES": _HALVES.size // 2,
        "BFLOATS": _BFLOATS.size // 2,
        "PACKED": _PACKED.size,
        "SELECTS": len(_SELECTS),
        "EXPS": _EXPS.size,
        "SILUS": _SILUS.size,
        "ROOTS": _ROOTS.size,
    }


def result_words(workgroup: int) -> int:
    """How many words the check leaves."""
    return 3 * workgroup + sum(size for _, size, _ in _SECTIONS)


def check_operands(workgroup: int) -> Words:
    """What the check computes with."""
    parts = (_lane_values(workgroup), _HALVES, _BFLOATS, _PACKED, _SELECTS, _EXPS, _SILUS, _ROOTS)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint32) for part in parts])


def judge(workgroup: int, words: Words) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hold the words that the check left against what they must be.

    Returns:
        What is wrong with shared memory, and what with numbers; a line each, nothing where all is right.

    """
    lanes = words[: 3 * workgroup].view(np.float32).reshape(workgroup, 3)
    values = _lane_values(workgroup)
    handed = np.roll(values, -_ROUNDS) + _ROUNDS
    shared = [
        f"shared memory: the {name} over {workgroup} lanes is wrong in {int(bad.sum())} of them"
        for name, bad in (
            ("sum", lanes[:, 0] != values.sum()),
            ("maximum", lanes[:, 1] != values.max()),
            ("value handed on", lanes[:, 2] != handed),
        )
        if bad.any()
    ]
    numbers = []
    at = 3 * workgroup
    for name, size, right in _SECTIONS:
        good = right(words[at : at + size])
        at += size
        if not good.all():
            numbers.append(f"numbers: {name} is wrong for case {int(np.argmin(good))} of {good.size}")
    return tuple(shared), tuple(numbers)


def _halves_right(words: Words) -> Mask:
    """Vulkan lets a device flush what is below the normal range of a half to zero."""
    found, right = words.view(np.float32), _HALVES.astype(np.float32)
    flushed = (np.abs(right) < _SMALLEST_NORMAL_HALF) & (found == 0)
    return np.asarray((found == right) | flushed)


def _bfloats_right(words: Words) -> Mask:
    return np.asarray(words.view(np.float32) == _BFLOATS.astype(np.float32))


def _packed_right(words: Words) -> Mask:
    """Vulkan leaves open which neighbour a value is rounded to, and whether one below the normal range becomes zero."""
    stored = words.view(np.float16).astype(np.float64)
    wanted = np.clip(_PACKED.astype(np.float64), -_LARGEST_HALF, _LARGEST_HALF)
    _, exponent = np.frexp(wanted)
    gap = np.maximum(np.ldexp(1.0, exponent - 11), 2.0**-24)
    flushed = (np.abs(wanted) < _SMALLEST_NORMAL_HALF) & (stored == 0)
    return np.asarray((np.abs(stored - wanted) < gap) | flushed)


def _selects_right(words: Words) -> Mask:
    hidden = _SELECTS[:, 1] < 0
    got = words.view(np.float32).reshape(-1, 2)
    shown = np.where(hidden, np.float32(0), _SELECTS[:, 0])
    return np.asarray((got[:, 0] == np.where(hidden, _HIDDEN, shown)) & (got[:, 1] == shown))


def _near(values: F32, function: Callable[[F64], F64], words: Words, relative: float = 1e-5) -> Mask:
    """Float32 results within what Vulkan allows of float64 ones; what is below the normal range may be zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = function(values.astype(np.float64))
        got = words.view(np.float32).astype(np.float64)
        return np.asarray(np.abs(got - wanted) <= np.abs(wanted) * relative + 2.0**-126)


def _silu(x: F64) -> F64:
    return np.asarray(x / (1 + np.exp(-x)))


_SECTIONS: tuple[tuple[str, int, Callable[[Words], Mask]], ...] = (
    ("unpacking of float16", _HALVES.size, _halves_right),
    ("unpacking of bfloat16", _BFLOATS.size, _bfloats_right),
    ("packing to float16", _PACKED.size // 2, _packed_right),
    ("leaving out what a mask hides", 2 * len(_SELECTS), _selects_right),
    ("exp", _EXPS.size, lambda words: _near(_EXPS, np.exp, words)),
    ("division by an infinite exp", _SILUS.size, lambda words: _near(_SILUS, _silu, words)),
    ("inversesqrt", _ROOTS.size, lambda words: _near(_ROOTS, lambda x: np.asarray(x**-0.5), words)),
)
