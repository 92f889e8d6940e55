"""The inference context: realizes graphs on a device, counts what it built, and keeps the sessions of its owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu import Device
from vkdecode.graph import FUSIONS, Fusion, Graph, NodeId, Op, OptimizedGraph, SymEnv, optimize_graph, splice_host_copy
from vkdecode.runtime.executable import Executable, StorageCache
from vkdecode.runtime.footprint import check_plan
from vkdecode.runtime.plan import WORK_PER_SUBMISSION, buffer_of, check_topology, lower
from vkdecode.runtime.slots import SlotPool
from vkdecode.runtime.weight_layout import most_units


@dataclass
class Stats:
    """How often the costly things happened. Decode steps and prefill chunks are counted apart.

    `tokens_replayed` counts submissions of a held recording; `one_off_recordings` the per-token KV writes of the
    SymEnv path.
    """

    plans_built: int = 0
    recordings_made: int = 0
    tokens_replayed: int = 0
    one_off_recordings: int = 0
    rebinds: int = 0
    rebinds_refused: int = 0
    prefill_plans_built: int = 0
    prefill_recordings_made: int = 0
    prefill_replays: int = 0


def optimize_for(
    device: Device, graph: Graph, roots: tuple[NodeId, ...], fusions: Sequence[Fusion] = FUSIONS
) -> OptimizedGraph:
    """Optimize a graph for a device: placed on it, and with no weight larger than its buffers may be."""
    most = most_units(device.largest_buffer_bytes, device.lanes.block_rows, f"device {device.info}")
    return optimize_graph(graph, roots, device.location, fusions=fusions, most_units=most)


class Closable(Protocol):
    """Anything a context can hold and must close."""

    def close(self) -> None:
        """Give back what it took."""
        ...


@dataclass(frozen=True)
class Prebuilt:
    """What the first build of a graph leaves: the copied-out root, the optimization, and the kernels made ready."""

    effective_target: NodeId
    optimized: OptimizedGraph
    executable: Executable


class InferenceContext:
    """Realizes graphs on one device. It belongs to the generate loop, and so do the sessions it keeps.

    Args:
        device: where graphs are realized.
        fusions: the optimizer's fusion passes; fewer make more, simpler dispatches with the same results within
            rounding.
        work_per_submission: most multiply-adds of one submission, unless a single kernel takes more. A driver kills
            what runs for seconds; results are the same whatever the cap.

    """

    def __init__(
        self, device: Device, fusions: Sequence[Fusion] = FUSIONS, work_per_submission: int = WORK_PER_SUBMISSION
    ) -> None:
        if work_per_submission < 1:
            raise InvalidInputError(f"work_per_submission must be positive, not {work_per_submission}")
        self.device = device
        self._work_per_submission = work_per_submission
        self.fusions = tuple(fusions)
        self.stats = Stats()
        self.result_bytes_read = 0  # what the host has read of logits and candidates, over all steps
        self._decode_session: Any = None
        self._held: dict[Any, Closable] = {}
        self._pool = SlotPool(device)
        self._closed = False

    def prebuild_optimized_as_with_env(
        self,
        graph: Graph,
        target: NodeId,
        effects: Sequence[NodeId],
        bind: Callable[[Graph, Sequence[NodeId]], StorageCache],
        cut_after: Collection[Op] = (),
        share_activations: bool = False,
    ) -> tuple[Prebuilt, StorageCache]:
        """Prepare (splice the device-to-host copy at the target), optimize, plan, and make the kernels ready.

        Args:
            graph: changed in place.
            target: the node whose value is wanted.
            effects: nodes realized for what they write.
            bind: gives the storages of the constants that the plan needs.
            cut_after: operations whose dispatch ends a submission.
            share_activations: with the other plans of this context that say so; results are gone when one of them runs.

        Raises:
            DeviceError: the plan breaks a limit of the device; nothing was bound or allocated.

        """
        if self._closed:
            raise ClosedError("this InferenceContext was closed; make a new one")
        effective_target = splice_host_copy(graph, target)
        optimized = optimize_for(self.device, graph, (effective_target, *effects), self.fusions)
        plan = lower(graph, optimized, self.device.lanes, cut_after, self._work_per_submission)
        check_plan(graph, plan, self.device.info, self.device.lanes)
        cache = bind(graph, plan.constants)
        pool = self._pool if share_activations else None
        return Prebuilt(effective_target, optimized, Executable(self.device, plan, cache, pool)), cache

    def realize_prebuilt_as_with_env(self, graph: Graph, prebuilt: Prebuilt, env: SymEnv) -> NDArray[np.float32]:
        """Record and run a prebuilt graph once, without preparing or optimizing it again; the target's values, flat.

        Raises:
            TopologyChanged: the graph was changed since.

        """
        check_topology(graph, prebuilt.optimized)
        prebuilt.executable.submit(prebuilt.executable.record(env))
        return prebuilt.executable.read(buffer_of(graph, prebuilt.effective_target))

    @property
    def has_decode_session(self) -> bool:
        """Whether a decode session is kept."""
        return self._decode_session is not None

    def take_decode_session(self) -> Any:
        """Hand over the kept decode session, or None; the context no longer holds it."""
        session, self._decode_session = self._decode_session, None
        return session

    def put_decode_session(self, session: Any) -> None:
        """Keep a decode session for the next step; one that was kept before is closed."""
        if self._decode_session is not None and self._decode_session is not session:
            self._decode_session.close()
        self._decode_session = session

    @property
    def held(self) -> dict[Any, Closable]:
        """Other plans kept between steps, by key; the context closes them with itself."""
        return self._held

    def close(self) -> None:
        """Close the sessions; the context cannot build any more."""
        self._closed = True
        self.put_decode_session(None)
        for one in self._held.values():
            one.close()
        self._held.clear()

    def __enter__(self) -> InferenceContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
