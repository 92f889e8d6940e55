"""Every rung of decoding against a checkpoint's reference."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from poison import poison_cache
from stepping import Logits, furthest, one_by_one, run
from tiny_llama import golden

from vkdecode.decode import DecodeMode, InferenceContext
from vkdecode.models import Model

CONTRACT = 2e-3  # what the project promises
REGRESSION = 1e-4  # what it reaches, with room for another driver's rounding


def prompt_and_decode(
    model: Model, name: str, mode: DecodeMode, context: InferenceContext, tokens: int = 24, dtype: str = "f32"
) -> tuple[Logits, Logits]:
    """Logits of all prompt tokens in one call, then of the next tokens one at a time."""
    reference = golden(name)
    with closing(model.new_kv_cache(64, dtype)) as kv:
        poison_cache(model.device, kv)
        prompt = run(model, reference.input_ids, kv, context, mode, "all")
        assert kv.cached_len == 24
        decoded = one_by_one(model, reference.decode_ids[:tokens], kv, context, mode)
        assert kv.cached_len == 24 + tokens
    return prompt, decoded


def check_reference(name: str, prompt: Logits, decoded: Logits, regression: float = REGRESSION) -> None:
    """Hold logits against the reference; `regression` is how close they are known to come."""
    reference = golden(name)
    for computed, wanted in ((prompt, reference.logits), (decoded, reference.decode_logits[: len(decoded)])):
        assert furthest(computed, wanted) <= CONTRACT
        assert furthest(computed, wanted) <= regression


def check_rungs(
    model: Model, name: str, kv_offset: str, arm: str, rebuilt: int, regression: float = REGRESSION
) -> None:
    """The captured and the held rung for 24 tokens, the rebuilt one for `rebuilt`: the reference, equal to the bit.

    The held rung runs the plans of the captured one, on another cache; a context of its own would build the same again.
    """
    results: dict[str, tuple[Logits, Logits]] = {}
    with InferenceContext(model.device) as context:
        for rung in ("captured", "held"):
            results[rung] = prompt_and_decode(model, name, DecodeMode(rung, kv_offset, arm), context)
        assert (context.stats.plans_built, context.stats.prefill_plans_built) == (1, 1)
    with InferenceContext(model.device) as context:
        results["rebuild"] = prompt_and_decode(model, name, DecodeMode("rebuild", kv_offset, arm), context, rebuilt)
        assert context.stats.plans_built == rebuilt
    prompt, decoded = results["captured"]
    for rung, (its_prompt, its_decoded) in results.items():
        check_reference(name, its_prompt, its_decoded, regression)
        assert np.array_equal(its_prompt, prompt), rung
        assert np.array_equal(its_decoded, decoded[: len(its_decoded)]), rung
