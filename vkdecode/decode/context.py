"""The inference context: realizes graphs on a device, counts what it built, and keeps the sessions of its owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.session import DecodeSession, Prebuilt
from vkdecode.decode.step_graph import StepOptions
from vkdecode.errors import ClosedError, InvalidInputError
from vkdecode.gpu import Device, lanes_of
from vkdecode.graph import FUSIONS, Fusion, Graph, NodeId, OptimizedGraph, SymEnv, optimize_graph, splice_host_copy
from vkdecode.runtime import (
    WORK_PER_SUBMISSION,
    ArenaPool,
    Executable,
    StorageCache,
    buffer_of,
    check_plan,
    check_topology,
    lower,
    max_units,
)


@dataclass
class Stats:
    """How often the costly things happened. Decode steps and prefill chunks are counted apart.

    `tokens_replayed` counts submissions of a held recording; `one_off_recordings` the moves of a step's K
    and V rows on the SymEnv path.
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

    def count_recording(self, seq: int) -> None:
        """Count a recording of a plan with room for `seq` tokens."""
        if seq == 1:
            self.recordings_made += 1
        else:
            self.prefill_recordings_made += 1

    def count_replay(self, seq: int, one_off: bool) -> None:
        """Count a submission of a held recording."""
        if seq == 1:
            self.tokens_replayed += 1
        else:
            self.prefill_replays += 1
        self.one_off_recordings += one_off


def optimize_for(
    device: Device, graph: Graph, roots: tuple[NodeId, ...], fusions: Sequence[Fusion] = FUSIONS
) -> OptimizedGraph:
    """Optimize a graph for a device: placed on it, and with no weight larger than its buffers may be."""
    most = max_units(device.largest_buffer_bytes, lanes_of(device).block_rows, f"device {device.info}")
    return optimize_graph(graph, roots, device.location, fusions=fusions, max_units=most)


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
        self._decode_session: DecodeSession | None = None
        self._held: dict[StepOptions, DecodeSession] = {}
        self._pool = ArenaPool(device)
        self._closed = False

    def prebuild_optimized_as_with_env(
        self,
        graph: Graph,
        target: NodeId,
        effects: Sequence[NodeId],
        bind: Callable[[Graph, Sequence[NodeId]], StorageCache],
    ) -> tuple[Prebuilt, StorageCache]:
        """Prepare (splice the device-to-host copy at the target), optimize, plan, and make the kernels ready.

        Args:
            graph: changed in place.
            target: the node whose value is wanted.
            effects: nodes realized for what they write.
            bind: gives the storages of the constants that the plan needs.

        Raises:
            DeviceError: the plan breaks a limit of the device; nothing was bound or allocated.

        """
        if self._closed:
            raise ClosedError("this InferenceContext was closed; make a new one")
        effective_target = splice_host_copy(graph, target)
        optimized = optimize_for(self.device, graph, (effective_target, *effects), self.fusions)
        device, lanes = self.device, lanes_of(self.device)
        plan = lower(graph, optimized, lanes, device.largest_buffer_bytes, self._work_per_submission)
        check_plan(graph, plan, device.info, lanes)
        cache = bind(graph, plan.constants)
        return Prebuilt(effective_target, optimized, Executable(device, plan, cache, self._pool)), cache

    def realize_prebuilt_as_with_env(self, graph: Graph, prebuilt: Prebuilt, env: SymEnv) -> NDArray[np.float32]:
        """Record and run a prebuilt graph once, without preparing or optimizing it again; the target's values, flat.

        Raises:
            TopologyChanged: the graph was changed since.

        """
        check_topology(graph, prebuilt.optimized)
        for recording in prebuilt.executable.record(env):
            recording.submit()
        return prebuilt.executable.read(buffer_of(graph, prebuilt.effective_target))

    @property
    def has_decode_session(self) -> bool:
        """Whether a decode session is kept."""
        return self._decode_session is not None

    def take_decode_session(self) -> DecodeSession | None:
        """Hand over the kept decode session, or None; the context no longer holds it."""
        session, self._decode_session = self._decode_session, None
        return session

    def put_decode_session(self, session: DecodeSession | None) -> None:
        """Keep a decode session for the next step; one that was kept before is closed."""
        if self._decode_session is not None and self._decode_session is not session:
            self._decode_session.close()
        self._decode_session = session

    @property
    def held(self) -> dict[StepOptions, DecodeSession]:
        """The plans of prompts kept between steps; the context closes them with itself."""
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
