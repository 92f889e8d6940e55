"""A device of paper: it allocates and records, and runs nothing; what is made on it can be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from made_up import GPU, SUBGROUPS, MadeUpDevice, MadeUpSource
from numpy.typing import NDArray
from order_check import Access, Bytes

from vkdecode.gpu import Barrier, Command, Device, Download, Kernel, Run, Storage, StorageKind, Upload
from vkdecode.models import Model
from vkdecode.runtime import Executable, OrderStep, WeightStore
from vkdecode.weights import DType, WeightSource


class PaperTensor:
    def __init__(self, nbytes: int) -> None:
        self._words = np.zeros(nbytes // 4, np.float32)

    def data(self) -> NDArray[np.float32]:
        return self._words


class PaperDevice(MadeUpDevice):
    """A device whose storages are memory of the host; `allocated` holds the bytes of each that was ever made."""

    _give_back = staticmethod(lambda *_: None)
    allocate_parts = cast(Any, Device.allocate_parts)

    def __init__(self) -> None:
        super().__init__(GPU, SUBGROUPS)
        self.allocated: list[int] = []
        self.room = 1 << 40

    def allocate(  # type: ignore[override]  # the one that it is made of refuses all
        self, nbytes: int, dtype: DType, kind: StorageKind = StorageKind.DEVICE, encoding: str = "plain"
    ) -> Storage:
        self.room -= nbytes
        if self.room < 0:
            raise MemoryError
        nbytes = -(-nbytes // 16) * 16
        self.allocated.append(nbytes)
        return Storage(PaperTensor(nbytes), cast(Any, self), dtype, nbytes, kind, encoding)


class PaperStore(WeightStore):
    """A weight store that allocates what it should, and fills nothing."""

    def _fill(self, *_: object) -> None:
        pass


class PaperUploader:
    def __init__(self, device: object) -> None: ...

    def close(self) -> None: ...


class PaperAlgorithm:
    def __init__(
        self,
        device: object,
        kernel: Kernel,
        storages: Sequence[Storage],
        spec: Mapping[str, int],
        workgroups: tuple[int, int, int],
    ) -> None:
        self.kernel, self.spec, self.workgroups = kernel, spec, workgroups
        self.storages = tuple(storage.whole for storage in storages)


class PaperRecording:
    def __init__(self, device: object, commands: Sequence[Command]) -> None:
        self.commands = tuple(commands)

    def submit(self) -> None:
        pass


def paper_model(monkeypatch: Any, source: MadeUpSource) -> Model:
    """A model on a device of paper; what is recorded from now on is `PaperRecording`s."""
    monkeypatch.setattr("vkdecode.models.model.WeightStore", PaperStore)
    monkeypatch.setattr("vkdecode.runtime.weight_store.Uploader", PaperUploader)
    monkeypatch.setattr("vkdecode.runtime.executable.Algorithm", PaperAlgorithm)
    monkeypatch.setattr("vkdecode.runtime.executable.Recording", PaperRecording)
    return Model(cast(WeightSource, source), cast(Device, PaperDevice()))


def commands_of(recordings: Sequence[Any]) -> list[tuple[Command, ...]]:
    return [recording.commands for recording in recordings]


def on_storages(
    executable: Executable, kept: Sequence[int], commands: Sequence[Sequence[Command]]
) -> tuple[list[list[OrderStep]], list[Access]]:
    """Recorded commands as steps over the storages that are bound, and the accesses of all dispatches, for the judge.

    `kept` are the dispatches that were recorded, in order; each must run with its own storages and their starts.
    """
    dispatches = executable.plan.dispatches
    accesses = []
    for run in dispatches:
        parts: dict[str, list[Bytes]] = {"read": [], "write": []}
        for node, binding in zip(run.bindings, run.kernel.bindings, strict=True):
            one = executable.storage(node)
            for what, found in parts.items():
                if what in binding.access:
                    found.append(Bytes(id(one.whole), one.first_byte, one.first_byte + one.nbytes))
        accesses.append(Access(tuple(parts["read"]), tuple(parts["write"])))
    left = iter(kept)
    order: list[list[OrderStep]] = []
    for each in commands:
        steps = []
        for command in each:
            if isinstance(command, Run):
                index = next(left)
                _check_bound(executable, index, command)
                steps.append(OrderStep("run", dispatch=index))
            elif isinstance(command, Barrier):
                steps.append(OrderStep("barrier", tuple(id(one.whole) for one in command.storages)))
            else:
                assert isinstance(command, Upload | Download)
        order.append(steps)
    assert next(left, None) is None
    return order, accesses


def _check_bound(executable: Executable, index: int, command: Run) -> None:
    run = executable.plan.dispatches[index]
    bound = [executable.storage(node) for node in run.bindings]
    algorithm = cast(PaperAlgorithm, command.algorithm)
    assert algorithm.kernel is run.kernel
    assert (dict(algorithm.spec), algorithm.workgroups) == (dict(run.spec), run.workgroups)
    assert algorithm.storages == tuple(one.whole for one in bound)
    firsts = {f"{binding.name}_first": one for binding, one in zip(run.kernel.bindings, bound, strict=True)}
    assert {name: command.push[name] for name in firsts} == {name: one.first_byte // 16 for name, one in firsts.items()}
    assert command.push.keys() - firsts.keys() == run.push.keys()
