"""Timing an action: whole calls, and how much of each was spent inside submissions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Slow devices and large models: an action is repeated no longer than this, but at least once.
BUDGET_SECONDS = 20.0


@dataclass(frozen=True)
class Timing:
    """Seconds of each call, and of them the seconds outside the submissions (`host`)."""

    seconds: tuple[float, ...]
    host: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Seconds of the fastest call."""
        return min(self.seconds)

    @property
    def worst(self) -> float:
        """Seconds of the slowest call."""
        return max(self.seconds)

    @property
    def host_median(self) -> float:
        """Median seconds of a call outside the submissions."""
        return statistics.median(self.host)


def measure(
    action: Callable[[], object],
    repeats: int,
    submitted: Callable[[], float],
    *,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Call `action` up to `repeats` times.

    Args:
        action: what is timed.
        repeats: how often, unless the budget runs out first; at least once.
        submitted: the seconds that all submissions took so far.
        budget_seconds: no further call is begun after this long.
        clock: seconds that only rise.

    """
    (timing,) = measure_in_turns([action], repeats, submitted, budget_seconds=budget_seconds, clock=clock)
    return timing


def measure_in_turns(
    actions: Sequence[Callable[[], object]],
    repeats: int,
    submitted: Callable[[], float],
    *,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Like `measure` for several actions, one call of each by turns, so that noise which comes and goes meets all.

    The budget counts for each of them.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    host: list[list[float]] = [[] for _ in actions]
    rounds, began = 0, clock()
    while rounds == 0 or (rounds < repeats and clock() - began < budget_seconds * len(actions)):
        for action, spent, outside in zip(actions, seconds, host, strict=True):
            in_submissions, started = submitted(), clock()
            action()
            spent.append(clock() - started)
            outside.append(spent[-1] - (submitted() - in_submissions))
        rounds += 1
    return [Timing(tuple(spent), tuple(outside)) for spent, outside in zip(seconds, host, strict=True)]


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    return measure(action, 1, lambda: 0.0, clock=clock).seconds[0]
