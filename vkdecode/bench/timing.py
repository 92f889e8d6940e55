"""Timing an action: whole calls, and how much of each was spent inside submissions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
    seconds: list[float] = []
    host: list[float] = []
    while not seconds or (len(seconds) < repeats and sum(seconds) < budget_seconds):
        in_submissions, started = submitted(), clock()
        action()
        spent = clock() - started
        seconds.append(spent)
        host.append(spent - (submitted() - in_submissions))
    return Timing(tuple(seconds), tuple(host))


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    return measure(action, 1, lambda: 0.0, clock=clock).seconds[0]
