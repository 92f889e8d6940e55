"""A vocabulary that does not fill the last 16 bytes of the logits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_llama import TINY, changed_copy

from vkdecode.decode import DecodeMode, InferenceContext
from vkdecode.gpu import Device
from vkdecode.loading import load


@pytest.mark.parametrize("rung", ["captured", "held", "rebuild"])
def test_there_are_as_many_logits_as_tokens(tmp_path: Path, device: Device, rung: str) -> None:
    held = load_file(TINY / "llama" / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    whole = len(held[names[0]])
    short = {name: np.ascontiguousarray(held[name][: whole - 3]) for name in names}
    folder = changed_copy(tmp_path / "odd", config={"vocab_size": whole - 3}, tensors=short)
    logits = {}
    for path, vocab in ((TINY / "llama", whole), (folder, whole - 3)):
        with load(path, device=device) as model, closing(model.new_kv_cache(8)) as kv, InferenceContext(device) as one:
            prompt = model.forward_with_kv_context_persistent([1, 2, 3], kv, one, DecodeMode(rung), "all")
            last = model.forward_with_kv_context_persistent([4], kv, one, DecodeMode(rung))
            assert prompt.shape == (3, vocab) and last.shape == (vocab,)
            logits[vocab] = np.vstack([prompt, last])
    np.testing.assert_allclose(logits[whole - 3], logits[whole][:, :-3], rtol=0, atol=1e-5)
