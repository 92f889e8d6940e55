"""Every rung of decoding against a checkpoint's reference."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from stepping import Logits, furthest, one_by_one, run
from tiny_llama import golden

from vkdecode.decode import DecodeMode
from vkdecode.models import Model
from vkdecode.runtime import InferenceContext

CONTRACT = 2e-3  # what the project promises
REGRESSION = 1e-4  # what it reaches, with room for another driver's rounding


def prompt_and_decode(
    model: Model, name: str, mode: DecodeMode, context: InferenceContext, tokens: int = 24, dtype: str = "f32"
) -> tuple[Logits, Logits]:
    """Logits of all prompt tokens in one call, then of the next tokens one at a time."""
    reference = golden(name)
    with closing(model.new_kv_cache(64, dtype)) as kv:
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
    """The captured and the held rung for 24 tokens, the rebuilt one for `rebuilt`: the reference, equal to the bit."""
    results: dict[str, tuple[Logits, Logits]] = {}
    for rung, tokens in (("captured", 24), ("held", 24), ("rebuild", rebuilt)):
        with InferenceContext(model.device) as context:
            results[rung] = prompt_and_decode(model, name, DecodeMode(rung, kv_offset, arm), context, tokens)
        check_reference(name, *results[rung], regression)
    prompt, decoded = results["captured"]
    for rung in ("held", "rebuild"):
        assert np.array_equal(results[rung][0], prompt)
        assert np.array_equal(results[rung][1], decoded[: len(results[rung][1])])
