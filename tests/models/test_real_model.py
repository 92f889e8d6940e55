"""SmolLM2-135M-Instruct from its GGUF file against its reference: ids, logits, greedy tokens and a chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from model_files import golden_smollm2, smollm2_path
from stepping import Logits, run

from vkdecode.decode import InferenceContext
from vkdecode.generate import generate
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

TOP = 0.05
NEAR_TIE = 0.1

GOLDEN = golden_smollm2()
CHAT = GOLDEN["chat"]


@pytest.fixture(scope="module")
def smollm2(device: Device) -> Iterator[Model]:
    with load(smollm2_path(), device=device) as model:
        yield model


@pytest.fixture(scope="module")
def context(device: Device) -> Iterator[InferenceContext]:
    with InferenceContext(device) as opened:
        yield opened


def greedy(model: Model, context: InferenceContext, prompt: list[int], count: int) -> tuple[list[int], list[Logits]]:
    """The most likely tokens, and the logits that each was taken from."""
    ids: list[int] = []
    seen: list[Logits] = []
    with closing(model.new_kv_cache(128)) as kv:
        logits = run(model, prompt, kv, context)
        for _ in range(count):
            seen.append(logits)
            ids.append(int(logits.argmax()))
            if len(ids) < count:
                logits = run(model, ids[-1:], kv, context)
    return ids, seen


def check_greedy(ids: list[int], seen: list[Logits], wanted: list[int]) -> int:
    """Tokens must be equal up to the first near tie that falls otherwise; how many are equal."""
    for step, logits in enumerate(seen):
        if ids[step] != wanted[step]:
            second, first = np.sort(logits)[-2:]
            assert first - second <= NEAR_TIE, f"token {step} is {ids[step]}, not {wanted[step]}"
            return step
    return len(seen)


@pytest.mark.parametrize("case", GOLDEN["completions"], ids=lambda case: case["prompt"][:12])
def test_a_completion_is_the_reference(smollm2: Model, context: InferenceContext, case: dict[str, Any]) -> None:
    assert smollm2.tokenizer.encode(case["prompt"]) == case["ids"]
    ids, seen = greedy(smollm2, context, case["ids"], len(case["greedy"]))
    logits = seen[0]
    top = [token for token, _ in case["top10"]]
    assert np.abs(logits[top] - [value for _, value in case["top10"]]).max() <= TOP
    # Nothing outside the ten may be above them by more than the tolerance of both.
    others = np.delete(logits, top)
    assert others.max() <= case["top10"][-1][1] + TOP
    assert abs(logits.mean() - case["logits_mean"]) <= TOP
    assert abs(logits.std() - case["logits_std"]) <= TOP
    check_greedy(ids, seen, case["greedy"])
    assert context.stats.plans_built == 1


def test_the_chat_is_rendered_and_cut_into_tokens_as_the_reference(smollm2: Model) -> None:
    assert smollm2.tokenizer.render_chat(CHAT["messages"]) == CHAT["rendered"]
    assert smollm2.tokenizer.encode_chat(CHAT["messages"]) == CHAT["ids"]


def test_the_chat_answers_with_the_capital(smollm2: Model, context: InferenceContext) -> None:
    ids, seen = greedy(smollm2, context, CHAT["ids"], len(CHAT["greedy"]))
    check_greedy(ids, seen, CHAT["greedy"])
    answer = generate(smollm2, smollm2.tokenizer.encode_chat(CHAT["messages"]), max_tokens=32)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_weights_keep_the_types_of_the_file_and_are_the_only_copy(smollm2: Model) -> None:
    specs = smollm2.weight_specs()
    assert {spec.dtype.value for spec in specs if not spec.vector} == {"q4_1", "q8_0"}
    parameters = sum(spec.rows * spec.columns for spec in specs)
    assert 134_000_000 < parameters < 136_000_000
    held = sum(smollm2.weight_store.nbytes(spec) for spec in specs)
    assert held <= 2.02 * parameters
