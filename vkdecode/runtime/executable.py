"""An executable: a plan's kernels made ready on a device, and recordings of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import DeviceLostError
from vkdecode.gpu import Algorithm, Device, Recording, Run, Step, Storage, Sync, Upload, first_units
from vkdecode.graph import NodeId, SymEnv
from vkdecode.runtime.plan import Dispatch, Plan, steps_for
from vkdecode.runtime.slots import SlotPool

# A NaN that no arithmetic gives: quiet NaNs from a shader carry no such payload.
_UNWRITTEN = 0x7FEDDEAD


class StorageCache:
    """The storages of a graph's constants: weights, KV slots and per-step data."""

    def __init__(self, storages: Mapping[NodeId, Storage] | None = None) -> None:
        self._storages = dict(storages or {})

    def __getitem__(self, node: NodeId) -> Storage:
        return self._storages[node]

    def __setitem__(self, node: NodeId, storage: Storage) -> None:
        self._storages[node] = storage

    def __contains__(self, node: NodeId) -> bool:
        return node in self._storages

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._storages)

    def __len__(self) -> int:
        return len(self._storages)

    def clone(self) -> StorageCache:
        """Another cache that names the same storages."""
        return StorageCache(self._storages)


class Executable:
    """A plan with its storages and algorithms.

    Making an algorithm is nearly all that a plan costs. So dispatches that differ only in where their weights lie in
    one buffer, as those of a prompt's layers do, share one, and where that is comes with the dispatch.

    Args:
        device: where it runs.
        plan: what runs.
        cache: storages of the plan's constants; read now, and again for the nodes named to `rebind`.
        pool: where activations come from that other plans use too; None for storages of its own.

    Attributes:
        bytes_read: how many bytes of results were copied out of the host-visible twins so far.

    """

    def __init__(self, device: Device, plan: Plan, cache: StorageCache, pool: SlotPool | None = None) -> None:
        self.plan = plan
        self._device = device
        self._constants = {node: cache[node] for node in plan.constants}
        self._slots: list[Storage] = []
        self._shared = pool is not None
        self._algorithms: list[Algorithm] = []
        self.bytes_read = 0
        try:
            self._slots = (pool or SlotPool(device)).take(plan.slot_bytes)
            self._algorithms = list(self._make(range(len(plan.dispatches))).values())
        except BaseException:
            self.close()
            raise

    def storage(self, node: NodeId) -> Storage:
        """The storage of a constant or of an activation; an activation's is reused by later segments."""
        if node in self._constants:
            return self._constants[node]
        return self._slots[self.plan.slots[node]]

    def rebind(self, storages: Mapping[NodeId, Storage]) -> None:
        """Point constants at other storages and make the algorithms that bind them again; recordings become stale.

        Where one cannot be made, everything stays as it was.
        """
        before = self._constants
        self._constants = {**before, **storages}
        try:
            remade = self._make(
                index
                for index, dispatch in enumerate(self.plan.dispatches)
                if any(node in storages for node in dispatch.bindings)
            )
        except BaseException:
            self._constants = before
            raise
        for index, algorithm in remade.items():
            self._algorithms[index] = algorithm

    def record(self, env: SymEnv, include: Callable[[Dispatch], bool] = lambda _: True) -> list[Recording]:
        """Record the segments with these symbol values, leaving out dispatches for which `include` says no.

        Leaving one out is right only where nothing that stays depends on it.
        """
        recordings: list[Recording] = []
        targets = {id(self.storage(node)) for node in self.plan.targets}
        for steps in steps_for(self.plan, include):
            made: list[Step] = []
            for step in steps:
                if step.kind == "run":
                    made.append(self._run(step.dispatch, env))
                else:
                    storages = tuple(self.storage(node) for node in step.buffers)
                    made.append(Upload(storages) if step.kind == "upload" else Sync(storages))
            recordings.append(Recording(self._device, made))
            recordings[-1].watched = tuple(one for one in recordings[-1].synced if id(one) in targets)
        return recordings

    def record_effects(self, env: SymEnv, include: Callable[[Dispatch], bool]) -> Recording:
        """Record only the chosen dispatches, which must not depend on one another."""
        chosen = [index for index, dispatch in enumerate(self.plan.dispatches) if include(dispatch)]
        return Recording(self._device, [self._run(index, env) for index in chosen])

    def submit(self, recordings: Sequence[Recording]) -> None:
        """Run recordings of this executable, the last of which copies the targets to the host.

        Kompute does not report a lost device. So the targets' host copies are marked before, and must have been written
        over afterwards.

        Raises:
            DeviceLostError: it was not.

        """
        marks = [storage.words for recording in recordings for storage in recording.watched]
        for mark in marks:
            mark[0] = _UNWRITTEN
        for recording in recordings:
            recording.submit()
        if any(mark[0] == _UNWRITTEN for mark in marks):
            kernels = [key for recording in recordings for key in recording.kernels]
            raise DeviceLostError(
                f"device {self._device.info} did not finish a submission of {len(kernels)} dispatches, the last of "
                f"them '{kernels[-1]}'; close the device and open a new one"
            )

    def read(self, node: NodeId, count: int | None = None) -> NDArray[np.float32]:
        """A copy of a target's values, or of so many from the first on, flat, after a submission.

        A storage is rounded up to 16 bytes; what is behind the values is left out.
        """
        if count is None:
            count = self.plan.slot_bytes[self.plan.slots[node]] // 4
        values = np.array(self.storage(node).data[:count], np.float32)
        self.bytes_read += values.nbytes
        return values

    def close(self) -> None:
        """Give the activations back, unless another plan uses them, and let go of the constants."""
        self._algorithms.clear()
        self._constants = {}
        if not self._shared:
            for storage in self._slots:
                storage.close()
        self._slots.clear()

    def _run(self, index: int, env: SymEnv) -> Run:
        dispatch = self.plan.dispatches[index]
        push = {name: env.resolve(value) for name, value in dispatch.push.items()}
        return Run(self._algorithms[index], push | first_units(dispatch.kernel, self._bound(dispatch)))

    def _bound(self, dispatch: Dispatch) -> list[Storage]:
        return [self.storage(node) for node in dispatch.bindings]

    def _make(self, indices: Iterable[int]) -> dict[int, Algorithm]:
        """Algorithms for these dispatches, one for all that are alike."""
        made: dict[tuple[object, ...], Algorithm] = {}
        by_index = {}
        for index in indices:
            dispatch = self.plan.dispatches[index]
            storages = self._bound(dispatch)
            wholes = tuple(storage.whole for storage in storages)
            key = (dispatch.kernel.key, wholes, tuple(dispatch.spec.items()), dispatch.workgroups)
            if key not in made:
                made[key] = Algorithm(self._device, dispatch.kernel, storages, dispatch.spec, dispatch.workgroups)
            by_index[index] = made[key]
        return by_index
