"""One kernel by itself on a device, and the comparison of what it left with a reference."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.gpu import Algorithm, Device, Download, Recording, Run, Storage, StorageKind, Upload, registry
from vkdecode.weights.dtypes import DType

Words = NDArray[np.uint32]

# A NaN as float32, as two float16 and as two bfloat16, with bits that no arithmetic gives.
UNSET = np.uint32(0x7FC1_7FC3)
_GUARD_WORDS = 16
TOLERANCE = 1e-4
"""Error allowed, relative to the largest value of a result; float32 sums and a GPU's `exp` stay well below."""


class Wrong(Exception):
    """A kernel left something else than the reference; the message says what."""


def generator(*what: object) -> np.random.Generator:
    """Random numbers that are the same on every machine and differ by subject."""
    return np.random.default_rng(zlib.crc32(repr(what).encode()))


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Float32 values of the standard normal distribution."""
    return rng.standard_normal(shape).astype(np.float32)


def unset(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    """An array of NaN: an output, or an input that must not count."""
    count = int(np.prod(shape))
    words = np.full(-(-count * np.dtype(dtype).itemsize // 4), UNSET, np.uint32)
    return np.array(words.view(dtype)[:count].reshape(shape))


def float_bits(value: float) -> int:
    """The bits of a float32, as specialization constants carry it."""
    return int(np.float32(value).view(np.uint32))


def run_kernel(
    device: Device,
    key: str,
    buffers: Mapping[str, NDArray[Any]],
    spec: Mapping[str, int],
    workgroups: tuple[int, int, int],
    push: Mapping[str, int] | None = None,
) -> dict[str, Words]:
    """Dispatch a kernel once on buffers by binding name, and return the words of those that it writes.

    Each lies somewhere inside of a larger one, as values do that share an arena.

    Raises:
        Wrong: it wrote before the beginning or behind the end of one.
        VkDecodeError: it cannot be dispatched.

    """
    name, *terms = key.split()
    kernel = registry().get(name, **dict(term.split("=", 1) for term in terms))
    wholes: list[Storage] = []
    parts: dict[str, Storage] = {}
    try:
        for number, binding in enumerate(kernel.bindings):
            words = np.ascontiguousarray(buffers[binding.name]).reshape(-1).view(np.uint32)
            # A kernel that does not ask where a part begins is bound to whole buffers.
            start = 16 * (3 + number) if f"{binding.name}_first" in kernel.push else 0
            whole = device.allocate(start + words.nbytes + 4 * _GUARD_WORDS, DType.U32, StorageKind.STAGED)
            wholes.append(whole)
            whole.data.view(np.uint32)[:] = UNSET
            whole.data.view(np.uint32)[start // 4 : start // 4 + words.size] = words
            parts[binding.name] = whole.part(start, whole.nbytes - start)
        algorithm = Algorithm(device, kernel, list(parts.values()), spec, workgroups)
        written = [binding.name for binding in kernel.bindings if binding.access != "read"]
        outputs = Download(tuple(parts[name].whole for name in written))
        Recording(device, [Upload(tuple(wholes)), Run(algorithm, push or {}), outputs]).submit()
        return {name: _left(parts[name], buffers[name].nbytes // 4, name) for name in written}
    finally:
        for whole in wholes:
            whole.close()


def _left(part: Storage, size: int, name: str) -> Words:
    """A copy of the words of a part, whose surroundings must be as they were."""
    words = part.whole.data.view(np.uint32)
    start = part.first_byte // 4
    if (words[:start] != UNSET).any() or (words[start + size :] != UNSET).any():
        raise Wrong(f"wrote before the beginning or behind the end of '{name}'")
    return np.array(words[start : start + size])


def error_of(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest error, relative to the largest expected value or 1.

    Raises:
        Wrong: it is beyond `TOLERANCE`, or a value is not finite.

    """
    actual = np.asarray(actual, np.float64).reshape(expected.shape)
    size = max(1.0, float(np.abs(expected).max()))
    with np.errstate(invalid="ignore"):
        errors = np.abs(actual - expected) / size
        bad = ~(errors <= TOLERANCE)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise Wrong(
            f"{int(bad.sum())} of {bad.size} values are wrong, first at {list(at)}: {actual[at]:.6g} instead of "
            f"{float(expected[at]):.6g}"
        )
    return float(errors.max())


def floats(words: Words) -> NDArray[np.float32]:
    """Words read as float32."""
    return words.view(np.float32)
