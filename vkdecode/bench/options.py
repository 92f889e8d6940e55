"""What to measure: context lengths, prompt lengths, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkdecode.errors import InvalidInputError

DEFAULT_CONTEXTS = (50, 250, 1000)
DEFAULT_PREFILLS = (16, 64, 256, 1000)
_DEFAULT_TOKENS = 32
_QUICK_TOKENS = 4
# Rows that a decode step needs beside the cached ones: its own, and one to spare.
SPARE_ROWS = 2


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; None for the defaults, as far as the model's context allows them.

    Attributes:
        contexts: cached rows before the decode steps that are measured.
        prefills: prompt lengths.
        tokens: decode steps for each median.
        quick: fewer of everything, for a run of seconds.

    Raises:
        InvalidInputError: a count is not positive, or a list is empty.

    """

    contexts: tuple[int, ...] | None = None
    prefills: tuple[int, ...] | None = None
    tokens: int | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        for name, values in (("contexts", self.contexts), ("prefills", self.prefills)):
            if values is not None and (not values or min(values) < 1):
                raise InvalidInputError(f"{name} must be one or more positive lengths, not {list(values)}")
        if self.tokens is not None and self.tokens < 1:
            raise InvalidInputError(f"tokens must be positive, not {self.tokens}")

    def within(self, positions: int) -> BenchPlan:
        """What to measure on a model with this many positions.

        Raises:
            InvalidInputError: a length that was asked for does not fit.

        """
        tokens = self.tokens or (_QUICK_TOKENS if self.quick else _DEFAULT_TOKENS)
        few = 1 if self.quick else None
        return BenchPlan(
            contexts=_fitting("context", self.contexts, DEFAULT_CONTEXTS[:few], positions - SPARE_ROWS, positions),
            prefills=_fitting("prompt", self.prefills, DEFAULT_PREFILLS[:few], positions, positions),
            tokens=tokens,
            slow_repeats=1 if self.quick else 3,
        )


@dataclass(frozen=True)
class BenchPlan:
    """Lengths in rising order, each once, that fit the model, and how often to repeat what is fast and what is slow."""

    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    tokens: int
    slow_repeats: int

    @property
    def rows(self) -> int:
        """Rows of the KV cache that all of it takes."""
        return max(*self.prefills, self.contexts[-1] + SPARE_ROWS)


def counts(text: str, option: str) -> tuple[int, ...]:
    """A list such as "50,1000" as numbers.

    Raises:
        InvalidInputError: it is not a list of positive whole numbers.

    """
    try:
        found = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InvalidInputError(f"{option} {text!r:.60} is not a list of positive whole numbers such as 50,1000")
    return found


def _fitting(
    what: str, asked: Sequence[int] | None, default: Sequence[int], most: int, positions: int
) -> tuple[int, ...]:
    if asked is None:
        return tuple(one for one in default if one <= most) or (max(most, 1),)
    if max(asked) > most:
        raise InvalidInputError(
            f"a {what} of {max(asked)} tokens does not fit: the model has {positions} positions, so at most {most}"
        )
    return tuple(sorted(set(asked)))
