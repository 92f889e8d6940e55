"""The speed of a loaded model: first token, prefill, decode, the rungs, and what a change of cache costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from vkdecode.bench.options import SPARE_ROWS, BenchPlan
from vkdecode.bench.result import RungSpeed, Speed
from vkdecode.bench.timing import Timing, measure, measure_in_turns
from vkdecode.decode import KV_OFFSETS, RUNGS, DecodeMode, InferenceContext, KvCache
from vkdecode.models import Model
from vkdecode.sampling import Sampler
from vkdecode.token_model import KvFeed

_TOKEN_ID = 1


def prompt_ids(model: Model, tokens: int) -> list[int]:
    """A prompt of this many tokens, none of them special in any way."""
    return [(_TOKEN_ID + 7 * position) % model.vocab_size for position in range(tokens)]


def first_token(model: Model, kv: KvCache, context: InferenceContext, tokens: int) -> None:
    """A prompt's pass from an empty cache, and the greedy choice of the token after it."""
    kv.truncate_to(0)
    KvFeed(model, kv.max_seq_len, kv, context).next_token(prompt_ids(model, tokens), Sampler())


def prefill_speeds(model: Model, kv: KvCache, context: InferenceContext, plan: BenchPlan) -> list[Speed]:
    """Prompts from an empty cache, the plans for them held; the cache then holds the longest of them."""
    found = []
    for tokens in plan.prefills:
        kv.truncate_to(0)
        model.prepare(kv, context, tokens)
        ids = prompt_ids(model, tokens)

        def prompt(ids: list[int] = ids) -> None:
            kv.truncate_to(0)
            model.forward_with_kv_context_persistent(ids, kv, context)

        found.append(Speed.of("prefill", tokens, 0, _measured(model, prompt, plan.slow_repeats)))
    return found


def decode_speeds(model: Model, kv: KvCache, context: InferenceContext, plan: BenchPlan) -> list[Speed]:
    """The generate loop's step, a captured pass and a greedy choice, at each context length by turns."""
    fill(model, kv, context, plan.contexts[-1])
    steps = [_decode_step(model, kv, context, cached) for cached in plan.contexts]
    for step in steps:
        step()
    timings = measure_in_turns(steps, plan.tokens, lambda: model.device.submission_seconds)
    return [Speed.of("decode", 1, cached, timing) for cached, timing in zip(plan.contexts, timings, strict=True)]


def _decode_step(model: Model, kv: KvCache, context: InferenceContext, cached: int) -> Callable[[], None]:
    feed, sampler = KvFeed(model, kv.max_seq_len, kv, context), Sampler()
    chosen = _TOKEN_ID

    def step() -> None:
        nonlocal chosen
        # The rows of the longest context stay in memory whatever number of them counts.
        kv.truncate_to(min(kv.cached_len, cached))
        kv.advance(cached - kv.cached_len)
        chosen = feed.next_token([chosen], sampler)

    return step


def rung_and_cache_speeds(model: Model, plan: BenchPlan) -> tuple[list[RungSpeed], list[Speed]]:
    """Steps at the shortest context on each rung and path, and across two caches of just that size."""
    cached = plan.contexts[0]
    with ExitStack() as stack:
        caches = [stack.enter_context(closing(model.new_kv_cache(cached + SPARE_ROWS))) for _ in range(2)]
        with InferenceContext(model.device) as context:
            for kv in caches:
                fill(model, kv, context, cached)
        return _rungs(model, caches[0], plan), _cache_changes(model, caches, plan)


def fill(model: Model, kv: KvCache, context: InferenceContext, rows: int) -> None:
    """Make a cache hold so many rows, computing those that it lacks."""
    if kv.cached_len < rows:
        model.forward_with_kv_context_persistent(prompt_ids(model, rows - kv.cached_len), kv, context)
    kv.truncate_to(rows)


def _rungs(model: Model, kv: KvCache, plan: BenchPlan) -> list[RungSpeed]:
    found = []
    for rung in RUNGS:
        for kv_offset in KV_OFFSETS:
            with InferenceContext(model.device) as context:
                step = _stepper(model, kv, context, DecodeMode(rung, kv_offset))
                if rung != "rebuild":
                    step()
                timing = _measured(model, step, plan.slow_repeats if rung == "rebuild" else plan.tokens)
            found.append(RungSpeed(rung, kv_offset, Speed.of(f"{rung}, {kv_offset}", 1, kv.cached_len, timing)))
    return found


def _cache_changes(model: Model, caches: Sequence[KvCache], plan: BenchPlan) -> list[Speed]:
    """A step on the same cache, on another one after a re-bind, and with the plan built anew."""
    first, second = caches
    cached = first.cached_len
    with InferenceContext(model.device) as context:
        reuse = _stepper(model, first, context, DecodeMode())
        other = _stepper(model, second, context, DecodeMode())
        turns = iter(range(2 * plan.slow_repeats))

        def rebound() -> None:
            (reuse if next(turns) % 2 else other)()

        def rebuilt() -> None:
            context.put_decode_session(None)
            reuse()

        reuse()
        return [
            Speed.of("same cache: plan reused", 1, cached, _measured(model, reuse, plan.tokens)),
            Speed.of("other cache: plan re-bound", 1, cached, _measured(model, rebound, plan.slow_repeats)),
            Speed.of("other cache: plan built anew", 1, cached, _measured(model, rebuilt, plan.slow_repeats)),
        ]


def _stepper(model: Model, kv: KvCache, context: InferenceContext, mode: DecodeMode) -> Callable[[], None]:
    """A step of one token that leaves the cache as long as it was."""

    def step() -> None:
        before = kv.cached_len
        model.forward_with_kv_context_persistent([_TOKEN_ID], kv, context, mode)
        kv.truncate_to(before)

    return step


def _measured(model: Model, action: Callable[[], None], repeats: int) -> Timing:
    return measure(action, repeats, lambda: model.device.submission_seconds)
