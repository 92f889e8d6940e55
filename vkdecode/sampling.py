"""Choosing the next token from logits: greedy, or temperature with top-k, top-p and min-p.

The filters run in the order of Hugging Face transformers: temperature, top-k, top-p, min-p, each on the renormalized
survivors of the one before. This module knows nothing of models, text or devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import InvalidInputError, SamplingError, VkDecodeError

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1

# The nucleus is small as a rule: so many candidates are sorted first, and more only while their sum is too small.
_FIRST_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the default is greedy, so that the same prompt gives the same text.

    - `temperature`: 0 is greedy (the token with the highest logit, the lowest id among equals; the other fields then
      have no effect). Above 0, the logits are divided by it before softmax. At most 100.
    - `top_k`: keep the `top_k` most likely tokens (of equal ones at the border, the lowest ids); 0 keeps all.
    - `top_p`: keep the smallest set of most likely tokens whose probabilities reach `top_p`; in (0, 1], 1 keeps all.
    - `min_p`: drop tokens less likely than `min_p` times the most likely one; in [0, 1], 0 keeps all.
    - `seed`: starts the random generator (numpy's PCG64), 0 to 2**64 - 1; None takes entropy from the system.

    A field out of its range raises `SamplingError`, which names the field, the value and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_real(
            "temperature", self.temperature, 0.0 <= _as_float(self.temperature) <= MAX_TEMPERATURE, "from 0 to 100"
        )
        _check_int("top_k", self.top_k, MAX_TOP_K, "0 (off) or a whole number up to 2147483647")
        _check_real("top_p", self.top_p, 0.0 < _as_float(self.top_p) <= 1.0, "above 0 and at most 1")
        _check_real("min_p", self.min_p, 0.0 <= _as_float(self.min_p) <= 1.0, "from 0 to 1")
        if self.seed is not None:
            _check_int("seed", self.seed, MAX_SEED, "None or a whole number from 0 to 2**64 - 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


class Sampler:
    """Draws token ids; two samplers with the same parameters and a seed draw the same ids from the same logits."""

    def __init__(self, params: SamplingParams | None = None) -> None:
        if params is not None and not isinstance(params, SamplingParams):
            raise SamplingError(f"sampling is {_shown(params)}; give SamplingParams, or None for greedy")
        self.params = params if params is not None else SamplingParams()
        self._rng = np.random.Generator(np.random.PCG64(_seed_of(self.params)))

    def candidates_needed(self, vocab_size: int) -> int:
        """How many of the highest logits decide, so that `sample_candidates` gives what `sample` gives of the row.

        1 for greedy, `top_k` where it keeps fewer than all; 0 where it takes the whole row.
        """
        if self.params.is_greedy:
            return 1
        return int(self.params.top_k) if self.params.top_k < vocab_size else 0

    def sample_candidates(self, token_ids: NDArray[np.integer], logits: NDArray[np.float32]) -> int:
        """Choose one of the `candidates_needed` highest logits of a row: the same token, and the same use of the seed.

        Args:
            token_ids: [count], best first; of equal logits the lower ids first.
            logits: [count]; where the highest is not finite, the whole row, which the error then describes.

        Raises:
            InvalidInputError: the two are not non-empty rows of the same length.
            VkDecodeError: like `sample`.

        """
        ids, highest = np.asarray(token_ids), _checked_highest(logits)
        if ids.shape != np.shape(logits):
            raise InvalidInputError(f"{ids.size} token ids cannot go with {np.size(logits)} logits; give one of each")
        if self.params.is_greedy:
            return int(ids[0])
        ranks, weights = _survivors(np.asarray(logits), highest, self.params, np.arange(ids.size))
        return int(ids[self._draw(ranks, weights)])

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose one token id from `logits` [vocab], where -inf marks a token that must not be chosen.

        Raises `InvalidInputError` when `logits` is not one non-empty row of numbers, and `VkDecodeError` when it holds
        NaN or +inf, or nothing above -inf.
        """
        row, highest = np.asarray(logits), _checked_highest(logits)
        if self.params.is_greedy:
            return int(row.argmax())
        return self._draw(*_survivors(row, highest, self.params))

    def _draw(self, ids: NDArray[np.intp] | None, weights: NDArray[np.float64]) -> int:
        """Draw one of the ids (None: of the positions) by their weights."""
        cumulative = np.cumsum(weights)
        total = cumulative[-1]
        drawn = int(np.searchsorted(cumulative, self._rng.random() * total, side="right"))
        # Rounding can put the draw on the total itself; the last candidate with any weight is the first to reach it.
        drawn = min(drawn, int(np.searchsorted(cumulative, total, side="left")))
        return drawn if ids is None else int(ids[drawn])


def _checked_highest(logits: object) -> float:
    row = np.asarray(logits)
    if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "fiu":
        raise InvalidInputError(
            f"logits of shape {row.shape} and dtype {row.dtype} cannot be sampled; give one row of floats"
        )
    highest = float(row[0] if row.size == 1 else row.max())  # NaN anywhere makes this NaN
    if not math.isfinite(highest):
        raise VkDecodeError(_bad_logits(row, highest))
    return highest


def _survivors(
    row: NDArray[Any], highest: float, params: SamplingParams, top_k: NDArray[np.intp] | None = None
) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]]:
    """Return the ids that may be drawn (None: all, in id order) and their weights, which need not sum to 1.

    `top_k` are the survivors of top-k, best first, where they are known.
    """
    logits = row.astype(np.float64)
    with np.errstate(
        over="ignore", under="ignore"
    ):  # a tiny temperature sends all but the best to weight 0: that is right
        weights = np.exp((logits - highest) / float(params.temperature))
    ids = top_k
    if ids is None and 0 < params.top_k < row.size:
        ids = _most_likely(logits, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(logits, weights, ids, float(params.top_p))
    if ids is not None:
        weights = weights[ids]
    if params.min_p > 0.0:
        # The most likely token has weight exp(0) = 1.
        kept = np.flatnonzero(weights >= params.min_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def _most_likely(logits: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the ids of the `count` highest logits, best first, equal ones in id order, sorting only those."""
    size = logits.size
    if count < size:
        border = np.partition(logits, size - count)[size - count]
        above = np.flatnonzero(logits > border)
        level = np.flatnonzero(logits == border)[: count - above.size]
        ids = np.concatenate([above, level])
    else:
        ids = np.arange(size)
    return ids[np.lexsort((ids, -logits[ids]))]


def _nucleus(
    logits: NDArray[np.float64], weights: NDArray[np.float64], ids: NDArray[np.intp] | None, top_p: float
) -> NDArray[np.intp]:
    """Return the most likely ids, best first, up to and including the one whose probability sum reaches `top_p`.

    `ids` are the survivors of top-k in order, or None for the whole vocabulary.
    """
    if ids is not None:
        return ids[: _reach(weights[ids], top_p * float(weights[ids].sum()))]
    needed = top_p * float(weights.sum())
    count = min(_FIRST_CANDIDATES, logits.size)
    while True:
        ids = _most_likely(logits, count)
        reached = _reach(weights[ids], needed)
        if reached < count or count == logits.size:
            return ids[:reached]
        count = min(count * 8, logits.size)


def _reach(weights: NDArray[np.float64], needed: float) -> int:
    """Return how many of `weights` (in order) it takes for their sum to be `needed` or more; all if it never is."""
    return min(int(np.searchsorted(np.cumsum(weights), needed, side="left")) + 1, weights.size)


def _bad_logits(row: NDArray[Any], highest: float) -> str:
    if math.isnan(highest):
        return (
            f"{int(np.isnan(row).sum())} of {row.size} logits are NaN; the weights or the device gave no usable numbers"
        )
    if highest > 0:
        return f"{int(np.isposinf(row).sum())} of {row.size} logits are infinite; the computation overflowed"
    return f"all {row.size} logits are -inf; no token is left to choose"


def _seed_of(params: SamplingParams) -> int | None:
    return None if params.seed is None else int(params.seed)


def _as_float(value: object) -> float:
    """Return a real number as float, anything else as NaN, which is inside no range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_real(field: str, value: object, in_range: bool, allowed: str) -> None:
    if not in_range:
        raise SamplingError(f"{field} is {_shown(value)}; it must be a number {allowed}")


def _check_int(field: str, value: object, maximum: int, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) <= maximum:
        raise SamplingError(f"{field} is {_shown(value)}; it must be {allowed}")


def _shown(value: object) -> str:
    """Return a short one-line form of any value; even one whose `repr` fails, as of an int with too many digits."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__} that cannot be shown"
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
