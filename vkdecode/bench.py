"""Measuring a model's steps: the three rungs, both KV-offset paths, and what changing the KV cache costs.

Times are medians of whole calls from Python, logits on the host included. Speed is measured here, never in a test.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vkdecode.decode import KV_OFFSETS, RUNGS, DecodeMode, KvCache
from vkdecode.errors import InvalidInputError
from vkdecode.models import Model
from vkdecode.runtime import InferenceContext

# A rebuild takes as long as some tens of tokens; a few of them give a steady median.
_SLOW_REPEATS = 3
_TOKEN_ID = 1


@dataclass(frozen=True)
class Measurement:
    """One line: what was done, and the median milliseconds it took for one token."""

    group: str
    name: str
    milliseconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second at that time per token."""
        return 1000.0 / self.milliseconds


def bench(model: Model, tokens: int = 32, context_len: int = 64) -> list[Measurement]:
    """Measure a model.

    Args:
        model: the model.
        tokens: decode steps for each median of a fast way.
        context_len: cached rows before the measured steps.

    Raises:
        InvalidInputError: a count is not positive, or both together exceed the model's context.

    """
    room = context_len + tokens + 2
    if tokens < 1 or context_len < 1 or room > model.config.max_position_embeddings:
        limit = model.config.max_position_embeddings
        raise InvalidInputError(
            f"{context_len} cached and {tokens} measured tokens do not fit a context of 1 to {limit}"
        )
    caches = [model.new_kv_cache(room) for _ in range(2)]
    try:
        for kv in caches:
            with InferenceContext(model.device) as context:
                model.forward_with_kv_context_persistent([_TOKEN_ID] * context_len, kv, context)
        return [
            *_bench_prompt(model, caches[0], context_len),
            *_bench_decode(model, caches[0], tokens),
            *_bench_cache_change(model, caches, tokens),
        ]
    finally:
        for kv in caches:
            kv.close()


def _bench_prompt(model: Model, kv: KvCache, length: int) -> list[Measurement]:
    with InferenceContext(model.device) as context:

        def prompt() -> None:
            kv.truncate_to(0)
            model.forward_with_kv_context_persistent([_TOKEN_ID] * length, kv, context)

        prompt()
        return [Measurement("prompt", f"{length} tokens", _median(prompt, _SLOW_REPEATS) / length)]


def _bench_decode(model: Model, kv: KvCache, tokens: int) -> list[Measurement]:
    rows = []
    for rung in RUNGS:
        for kv_offset in KV_OFFSETS:
            with InferenceContext(model.device) as context:
                step = _stepper(model, kv, context, DecodeMode(rung, kv_offset))
                step()
                repeats = _SLOW_REPEATS if rung == "rebuild" else tokens
                rows.append(Measurement("decode", f"{rung}, offset by {kv_offset}", _median(step, repeats)))
    return rows


def _bench_cache_change(model: Model, caches: Sequence[KvCache], tokens: int) -> list[Measurement]:
    """One token on the same cache, on another one after a re-bind, and on another one with the plan built anew."""
    first, second = caches
    mode = DecodeMode()
    with InferenceContext(model.device) as context:
        reuse = _stepper(model, first, context, mode)
        reuse()
        rows = [Measurement("next token", "same cache: plan reused", _median(reuse, tokens))]
        others = [_stepper(model, kv, context, mode) for kv in (second, first)]
        turn = iter(range(2 * _SLOW_REPEATS))
        rows.append(
            Measurement(
                "next token", "other cache: plan re-bound", _median(lambda: others[next(turn) % 2](), _SLOW_REPEATS)
            )
        )

        def rebuilt() -> None:
            context.put_decode_session(None)
            reuse()

        rows.append(Measurement("next token", "other cache: plan built anew", _median(rebuilt, _SLOW_REPEATS)))
    return rows


def _stepper(model: Model, kv: KvCache, context: InferenceContext, mode: DecodeMode) -> Callable[[], None]:
    """A step of one token that leaves the cache as long as it was."""

    def step() -> None:
        before = kv.cached_len
        model.forward_with_kv_context_persistent([_TOKEN_ID], kv, context, mode)
        kv.truncate_to(before)

    return step


def _median(action: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(1000.0 * (time.perf_counter() - started))
    return statistics.median(times)
