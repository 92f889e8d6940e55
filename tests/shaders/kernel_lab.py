"""One kernel by itself: poisoned buffers, canaries behind each, and the comparison with float64 references.

Every word that a test does not set is a NaN, read as float32, as two float16 or as two bfloat16: a kernel that reads
what it should not gives NaN. Inputs hold POISON and outputs CANARY there. The two differ because hardware hands a NaN's
bits on: a word that was written without being asked to, even from POISON, is no longer CANARY.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from vkdecode.gpu import (
    Algorithm,
    Device,
    Download,
    Recording,
    Run,
    Storage,
    StorageKind,
    Upload,
    list_devices,
    registry,
)
from vkdecode.weights.dtypes import DType

Words = NDArray[np.uint32]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]

POISON = np.uint32(0x7FC0_7FC1)
CANARY = np.uint32(0x7FC1_7FC3)
GUARD_WORDS = 64
UNIT_ROUNDOFF = 2.0**-24
ELEMENTS: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
WIDTHS_BITS = {4: 128, 8: 256, 16: 512}
"""Lanes of a lavapipe subgroup, and the vector width that gives them."""

EXPECTED_LANES = "VKDECODE_TEST_LANES"
"""Set in the processes that `test_lanes.py` starts: the subgroup size that the device must have there."""

TURN = {"4": 1, "16": 2}.get(os.environ.get(EXPECTED_LANES, ""), 0)
"""Which of its shapes a kernel is tested with: another one at each width."""

HERE = {0: (0, 2), 1: (1,), 2: (3,)}[TURN]
"""Of cases numbered modulo 4, those that are run at this width: half at the device's own, a quarter at each other."""

DISPATCHED_FILE = "VKDECODE_TEST_DISPATCHED"
"""Where to leave the keys of all kernels that this process dispatched, one a line."""

_dispatched: set[str] = set()


@functools.cache
def device() -> Device:
    """The CPU driver where there is one, so that no GPU changes the results; opened once per process."""
    best = min(list_devices(), key=lambda info: (info.kind != "cpu", info.ordinal))
    opened = Device(best.ordinal)
    atexit.register(opened.close)
    return opened


def subgroup() -> int:
    """Lanes of a subgroup of the device."""
    return device().info.subgroup_size


def variants(name: str, **axes: Sequence[object]) -> list[str]:
    """Keys of all combinations, e.g. `embed DTYPE=f32`."""
    terms = [[f"{axis}={value}" for value in values] for axis, values in axes.items()]
    return [" ".join([name, *one]) for one in itertools.product(*terms)]


def axes_of(key: str) -> dict[str, str]:
    """The variant of a key by axis."""
    return dict(term.split("=", 1) for term in key.split()[1:])


def generator(*what: object) -> np.random.Generator:
    """Random numbers that are the same in every run and differ from test to test."""
    return np.random.default_rng(zlib.crc32(repr(what).encode()))


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape).astype(np.float32)


def blank(words: int) -> Words:
    """An output that holds nothing yet."""
    return np.full(words, CANARY, np.uint32)


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any] | type = np.float32) -> NDArray[Any]:
    """An input of NaN."""
    count = int(np.prod(shape))
    words = np.full(ceil_div(count * np.dtype(dtype).itemsize, 4), POISON, np.uint32)
    return words.view(dtype)[:count].reshape(shape).copy()


def words_of(values: NDArray[Any]) -> Words:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint32)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Part:
    """What one or several names of a kernel bind: a part of a storage that begins behind words that must not count."""

    storage: Storage
    first: int
    unset: np.uint32
    contents: NDArray[Any]

    def fill(self) -> None:
        values, words = words_of(self.contents), self.storage.data.view(np.uint32)
        assert 16 * self.first + values.nbytes + 4 * GUARD_WORDS <= words.nbytes
        words[:] = self.unset
        words[4 * self.first : 4 * self.first + values.size] = values

    def left(self, name: str) -> Words:
        """The words of the part, with those behind the contents."""
        words = self.storage.data.view(np.uint32)
        assert (words[: 4 * self.first] == self.unset).all(), f"{name} was written before its part"
        return np.array(words[4 * self.first :])


class Trial:
    """One kernel with its buffers, dispatched any number of times.

    Args:
        key: the kernel's.
        buffers: contents by binding name; the same array under two names is one part of one storage, bound twice.
        spec: specialization constants.
        workgroups: dispatch size.

    """

    def __init__(
        self, key: str, buffers: Mapping[str, NDArray[Any]], spec: Mapping[str, int], workgroups: tuple[int, int, int]
    ) -> None:
        name, *_ = key.split()
        self.kernel = registry().get(name, **axes_of(key))
        assert {binding.name for binding in self.kernel.bindings} == set(buffers), key
        self._written = [binding.name for binding in self.kernel.bindings if binding.access != "read"]
        parts: dict[int, Part] = {}
        for values in buffers.values():
            if id(values) not in parts:
                names = [name for name, one in buffers.items() if one is values]
                # A kernel that does not ask where a part begins can be bound to whole storages only.
                first = 3 + len(parts) if all(f"{name}_first" in self.kernel.push for name in names) else 0
                nbytes = 16 * first + values.nbytes + 4 * GUARD_WORDS
                storage = device().allocate(nbytes, DType.U32, StorageKind.STAGED)
                unset = CANARY if set(names) & set(self._written) else POISON
                parts[id(values)] = Part(storage, first, unset, values)
        self._parts = tuple(parts.values())
        self._bound = {name: parts[id(values)] for name, values in buffers.items()}
        starts = {f"{name}_first": part.first for name, part in self._bound.items()}
        self._push = {name: first for name, first in starts.items() if name in self.kernel.push}
        in_order = [self._bound[binding.name].storage for binding in self.kernel.bindings]
        self._algorithm = Algorithm(device(), self.kernel, in_order, spec, workgroups)

    def run(self, push: Mapping[str, int] | None = None, **changed: NDArray[Any]) -> dict[str, Words]:
        """Fill all buffers anew, dispatch, and return the words of what is writable, with those behind the contents."""
        for name, values in changed.items():
            self._bound[name].contents = values
        for part in self._parts:
            part.fill()
        # Before a submission a recording marks what it downloads, so what it uploads must be something else.
        Recording(device(), [Upload(tuple(part.storage for part in self._parts))]).submit()
        run = Run(self._algorithm, {**self._push, **(push or {})})
        written = Download(tuple(self._bound[name].storage for name in self._written))
        Recording(device(), [run, written]).submit()
        _dispatched.add(self.kernel.key)
        return {name: self._bound[name].left(name) for name in self._written}

    def close(self) -> None:
        for part in self._parts:
            part.storage.close()


def run_once(
    key: str,
    buffers: Mapping[str, NDArray[Any]],
    spec: Mapping[str, int],
    workgroups: tuple[int, int, int],
    push: Mapping[str, int] | None = None,
) -> dict[str, Words]:
    trial = Trial(key, buffers, spec, workgroups)
    out = trial.run(push)
    trial.close()
    return out


def check(
    words: Words,
    expected: NDArray[Any],
    magnitude: NDArray[Any] | float,
    promised: Mask | None = None,
    allowed: Mask | None = None,
    roundings: float = 16,
) -> None:
    """Assert that the promised float32 values are right and that nothing else was written.

    Args:
        words: what the kernel left, with the words behind it.
        expected: float64 values, of any shape.
        magnitude: sum of the absolute values that each was summed from; the error is relative to it.
        promised: which values must be there; all by default.
        allowed: which others may hold anything.
        roundings: how many half units in the last place of the magnitude the error may be.

    """
    promised = np.ones(expected.shape, bool) if promised is None else np.broadcast_to(promised, expected.shape)
    allowed = promised if allowed is None else promised | np.broadcast_to(allowed, expected.shape)
    actual = words[: expected.size].view(np.float32).astype(np.float64).reshape(expected.shape)
    bound = np.broadcast_to(roundings * UNIT_ROUNDOFF * np.asarray(magnitude, np.float64), expected.shape)
    with np.errstate(invalid="ignore"):
        wrong = promised & ~((np.abs(actual - expected) <= bound) | (actual == expected))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {int(promised.sum())} values are wrong; first at {at}: {actual[at]!r} instead of "
            f"{expected[at]!r}, error {abs(actual[at] - expected[at]):.3g}, allowed {bound[at]:.3g}"
        )
    kept = np.ones(words.size, bool)
    kept[: expected.size] = ~allowed.reshape(-1)
    check_kept(words, blank(words.size), kept)


def check_kept(words: Words, before: Words, kept: Mask) -> None:
    """Assert that these words were left as they were."""
    changed = np.flatnonzero(kept & (words != before))
    assert changed.size == 0, f"{changed.size} words outside the output were written, first at {changed[0]}"


def tiled(rows: NDArray[Any], tile: int) -> Words:
    """A plain weight as `weights.glsl` describes it, word by word: rows [slots, columns], whole blocks of 4 tiles."""
    slots, columns = rows.shape
    row_words = ceil_div(columns, 32) * 32 * rows.dtype.itemsize // 4
    padded = np.zeros((slots, row_words * 4 // rows.dtype.itemsize), rows.dtype)
    padded[:, :columns] = rows
    words = padded.view(np.uint32)
    out = np.zeros(slots * row_words, np.uint32)
    slot, word = np.ogrid[:slots, :row_words]
    block, inside = np.divmod(slot, 4 * tile)
    out[((block * row_words + word) * tile + inside % tile) * 4 + inside // tile] = words
    return out


def _leave_dispatched() -> None:
    if DISPATCHED_FILE in os.environ:
        Path(os.environ[DISPATCHED_FILE]).write_text("\n".join(sorted(_dispatched)))


atexit.register(_leave_dispatched)
