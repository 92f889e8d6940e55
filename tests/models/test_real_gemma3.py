"""Gemma 3 270M from its GGUF file against the reference: mixed block types, windows of 512, a vocabulary of 262,144."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import DATA

from vkdecode.decode import InferenceContext
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((DATA / "gemma3.json").read_text(encoding="utf-8"))["completions"]
STEPS = 8


@pytest.fixture(scope="module")
def gemma3(device: Device) -> Iterator[Model]:
    """The model; its file is fetched where it is not there yet."""
    script = ROOT / "scripts" / "fetch_gemma3.py"
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with load(ROOT / done.stdout.strip(), device=device) as model:
        yield model


@pytest.mark.parametrize("case", [GOLDEN[1], GOLDEN[3]], ids=["English", "Chinese"])
def test_logits_and_greedy_tokens_are_the_reference(gemma3: Model, case: dict[str, Any]) -> None:
    assert gemma3.tokenizer.encode(case["prompt"]) == case["ids"]
    with closing(gemma3.new_kv_cache(len(case["ids"]) + STEPS)) as kv, InferenceContext(gemma3.device) as context:
        logits = gemma3.forward_with_kv_context_persistent(case["ids"], kv, context)
        for token, value in case["top10"]:
            assert abs(logits[token] - value) <= 0.05
        for wanted in case["greedy"][:STEPS]:
            second, first = np.sort(logits)[-2:]
            if first - second < 0.1:
                break
            assert int(logits.argmax()) == wanted
            logits = gemma3.forward_with_kv_context_persistent([wanted], kv, context)


def test_config_and_tokens_of_the_real_file(gemma3: Model) -> None:
    assert gemma3.config.vocab_size == 262_144 == gemma3.tokenizer.vocab_size
    assert gemma3.tokenizer.eos_token_ids == {1, 106}
    for case in GOLDEN:
        assert gemma3.tokenizer.encode(case["prompt"]) == case["ids"]
        assert gemma3.tokenizer.decode(case["greedy"]) == case["text"]
