"""The decode contract in plain Python: which plans a context holds, what each step costs, and what a re-bind answers.

Written from the contract, not from the package: nothing here imports it. Models, devices and allocations are numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

COUNTERS = (
    "plans_built",
    "recordings_made",
    "tokens_replayed",
    "one_off_recordings",
    "rebinds",
    "rebinds_refused",
    "prefill_plans_built",
    "prefill_recordings_made",
    "prefill_replays",
)
ROOMS = (16, 64, 256)

Path = tuple[str, str]


@dataclass
class CacheModel:
    """A KV cache: where it lives, its shape, its allocation, and the layers whose storages came from outside."""

    device: int
    shape: tuple[int, str]
    alloc: int
    outside: set[int] = field(default_factory=set)

    @property
    def known(self) -> bool:
        """Whether the place of every storage is proven."""
        return not self.outside


@dataclass
class PlanModel:
    """A held plan: what it bakes and which allocation it binds."""

    model: int
    room: int
    path: Path
    shape: tuple[int, str]
    device: int
    alloc: int
    known: bool
    captured: bool = False

    def validity(self, model: int, room: int, cache: CacheModel) -> str:
        """What `validity_for` must answer."""
        if (self.model, self.room, self.shape) != (model, room, cache.shape):
            return "STALE"
        return "VALID" if self.alloc == cache.alloc else "ALLOCATION_CHANGED"

    def rebind(self, cache: CacheModel) -> str | None:
        """What `rebind_kv` must answer where the validity is ALLOCATION_CHANGED; None re-binds."""
        if not (self.known and cache.known):
            return "RESIDENCY_UNKNOWN"
        if self.device != cache.device:
            return "RESIDENCY_DIFFERS"
        self.alloc = cache.alloc
        self.captured = False
        return None


@dataclass
class ContextModel:
    """A context: one decode plan, one prefill plan for each room and path, and the counters."""

    device: int
    decode: PlanModel | None = None
    prefill: dict[tuple[int, Path], PlanModel] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def step(self, model: int, cache: CacheModel, tokens: int, path: Path, rung: str) -> None:
        """A step of `tokens` tokens that is not refused: how it changes what is held and counted."""
        prefix = "" if tokens == 1 else "prefill_"
        if rung == "rebuild":
            self._count(prefix + "plans_built", prefix + "recordings_made")
            return
        room = self._room(tokens, path)
        plan = self._usable(self._take(room, path), model, room, cache)
        if plan is None:
            plan = PlanModel(model, room, path, cache.shape, cache.device, cache.alloc, cache.known)
            self._count(prefix + "plans_built")
        # A bounded attention on the SymEnv path bakes the attended length, so no recording of it can be kept.
        if rung == "captured" and path != ("symenv", "bounded"):
            if not plan.captured:
                self._count(prefix + "recordings_made")
            plan.captured = True
            self._count("tokens_replayed" if tokens == 1 else "prefill_replays")
            if path[0] == "symenv":
                self._count("one_off_recordings")
        else:
            self._count(prefix + "recordings_made")
        if room == 1:
            self.decode = plan
        else:
            self.prefill[room, path] = plan

    def _usable(self, plan: PlanModel | None, model: int, room: int, cache: CacheModel) -> PlanModel | None:
        if plan is None:
            return None
        validity = plan.validity(model, room, cache)
        if validity == "VALID":
            return plan
        if validity == "STALE":
            return None
        if plan.rebind(cache) is None:
            self._count("rebinds")
            return plan
        self._count("rebinds_refused")
        return None

    def _take(self, room: int, path: Path) -> PlanModel | None:
        if room > 1:
            return self.prefill.pop((room, path), None)
        plan, self.decode = self.decode, None
        return plan if plan is not None and plan.path == path else None

    def _room(self, tokens: int, path: Path) -> int:
        """The smallest room that suffices, or a larger one where a plan for it is held."""
        if tokens == 1:
            return 1
        fitting = [room for room in ROOMS if room >= tokens]
        return next((room for room in fitting if (room, path) in self.prefill), fitting[0])

    def _count(self, *names: str) -> None:
        for name in names:
            self.counts[name] += 1


class Allocations:
    """Allocation numbers that never repeat."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def new(self) -> int:
        return next(self._numbers)
