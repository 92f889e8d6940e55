"""An executable: a plan's kernels made ready on a device, and recordings of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vkdecode.gpu import (
    Algorithm,
    Barrier,
    Command,
    Device,
    Download,
    Recording,
    Run,
    Storage,
    StorageKind,
    Upload,
    first_units,
)
from vkdecode.graph import NodeId, SymEnv
from vkdecode.runtime.arena import ArenaPool
from vkdecode.runtime.plan import Dispatch, Plan, steps_for


class StorageCache:
    """The storages of a graph's constants: weights, KV caches and the data of a step."""

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

    Making an algorithm is nearly all that a plan costs. Dispatches that differ only in where their values lie, as those
    of the layers do, share one; where that is comes with the dispatch.

    Args:
        device: where it runs.
        plan: what runs.
        cache: storages of the plan's constants; read now, and again for the nodes named to `rebind`.
        pool: where activations and results come from that other plans use too; results are gone when one of them runs.

    Attributes:
        bytes_read: how many bytes of results were copied out of the staging buffers so far.

    """

    def __init__(self, device: Device, plan: Plan, cache: StorageCache, pool: ArenaPool) -> None:
        self.plan = plan
        self._device = device
        self._storages = {node: cache[node] for node in plan.constants}
        self.bytes_read = 0
        others = pool.held
        try:
            results = pool.take(list(plan.results.values()), StorageKind.STAGED)
            self._storages |= zip(plan.results, results, strict=True)
            self._arenas = pool.take(plan.arena_bytes, StorageKind.DEVICE)
            for node, span in plan.spans.items():
                self._storages[node] = self._arenas[-1 - span.place].part(span.start, span.end - span.start)
            self._algorithms = list(self._make(range(len(plan.dispatches))).values())
        except BaseException:
            # Now, not when the error is forgotten: whoever handles it may want the memory.
            for storage in pool.held:
                if storage not in others:
                    storage.close()
            raise

    @property
    def arenas(self) -> tuple[Storage, ...]:
        """The memory of the activations."""
        return tuple(self._arenas)

    def storage(self, node: NodeId) -> Storage:
        """The storage of a constant, a result or an activation; an activation's holds others before and after it."""
        return self._storages[node]

    def rebind(self, storages: Mapping[NodeId, Storage]) -> None:
        """Point constants at other storages and make the algorithms that bind them again; recordings become stale.

        Where one cannot be made, everything stays as it was.
        """
        before = self._storages
        self._storages = {**before, **storages}
        try:
            remade = self._make(
                index
                for index, dispatch in enumerate(self.plan.dispatches)
                if any(node in storages for node in dispatch.bindings)
            )
        except BaseException:
            self._storages = before
            raise
        for index, algorithm in remade.items():
            self._algorithms[index] = algorithm

    def record(
        self, env: SymEnv, include: Callable[[Dispatch], bool] = lambda _: True, results: Sequence[NodeId] | None = None
    ) -> list[Recording]:
        """Record the submissions with these symbol values, leaving out dispatches for which `include` says no.

        Leaving one out is right only where nothing that stays depends on it. `results` are those to be copied to the
        host at the end, None for all.
        """
        order = steps_for(self.plan, include)
        wholes = {self.storage(node).whole: None for node in self.plan.data}
        recordings: list[Recording] = []
        for number, steps in enumerate(order):
            made: list[Command] = [Upload(tuple(wholes))] if wholes and number == 0 else []
            for step in steps:
                if step.kind == "run":
                    made.append(self._run(step.dispatch, env))
                else:
                    made.append(Barrier(tuple({self._at(place): None for place in step.places})))
            if number == len(order) - 1:
                wanted = self.plan.results if results is None else results
                made.append(Download(tuple(self.storage(node) for node in wanted)))
            recordings.append(Recording(self._device, made))
        return recordings

    def record_effects(self, env: SymEnv, include: Callable[[Dispatch], bool]) -> Recording:
        """Record only the chosen dispatches, which must not depend on one another."""
        chosen = [index for index, dispatch in enumerate(self.plan.dispatches) if include(dispatch)]
        return Recording(self._device, [self._run(index, env) for index in chosen])

    def read(self, node: NodeId, count: int | None = None) -> NDArray[np.float32]:
        """A copy of a result's values, or of so many from the first on, flat, after a submission that copied it.

        A storage is rounded up to 16 bytes; what is behind the values is left out.
        """
        values = np.array(self.storage(node).data[: self.plan.results[node] // 4 if count is None else count])
        self.bytes_read += values.nbytes
        return values

    def fetch(self, node: NodeId) -> NDArray[np.float32]:
        """Copy a result to the host that the last submission left out, and read it."""
        Recording(self._device, [Download((self.storage(node),))]).submit()
        return self.read(node)

    def close(self) -> None:
        """Let go of everything; activations and results are freed with the last plan that uses them."""
        self._algorithms.clear()
        self._storages = {}
        self._arenas = []

    def _at(self, place: int) -> Storage:
        return self._arenas[-1 - place] if place < 0 else self.storage(NodeId(place)).whole

    def _run(self, index: int, env: SymEnv) -> Run:
        dispatch = self.plan.dispatches[index]
        push = {name: env.resolve(value) for name, value in dispatch.push.items()}
        return Run(self._algorithms[index], push | first_units(dispatch.kernel, self._bound(dispatch)))

    def _bound(self, dispatch: Dispatch) -> list[Storage]:
        return [self._storages[node] for node in dispatch.bindings]

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
