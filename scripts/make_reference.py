"""Make a small random checkpoint of a model family, and the logits that transformers computes with it.

    python scripts/make_reference.py olmo
    python scripts/make_reference.py mistral --name mistral-sliding --set sliding_window=8 --store bf16

writes tests/data/tiny/NAME: config.json, model.safetensors, and expected.npz with `input_ids` [24] and `logits`
[24, vocab] of a prompt in one pass, then `decode_ids` [24] and `decode_logits` [24, vocab] of the tokens after it. It
needs torch and transformers, which nothing else here does, so run it with an interpreter that has them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny"
TOKENS = 24
# Grouped heads, an MLP of another width than 4 times the model's, and no size that another one could stand in for.
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STORED = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
QUERIES_AND_KEYS = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")
EMBEDDINGS = ("embed", "wte", "wpe")


def deviation_and_mean(name: str, shape: torch.Size, norms_around: float) -> tuple[float, float]:
    """How a parameter is drawn: so that attention is peaked, and a wrong position, mask or norm moves the logits."""
    if any(part in name for part in EMBEDDINGS):
        return 0.12, 0.0
    if len(shape) > 1:
        return (2.0 if any(part in name for part in QUERIES_AND_KEYS) else 0.8) / shape[-1] ** 0.5, 0.0
    if name.endswith("weight"):
        return 0.2, norms_around
    return 0.1, 0.0


def make(folder: Path, model_type: str, settings: dict[str, Any], stored: str, norms_around: float, seed: int) -> None:
    """Write a checkpoint and its logits, computed in float32 from the numbers as stored."""
    random = torch.Generator().manual_seed(seed)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        deviation, mean = deviation_and_mean(name, parameter.shape, norms_around)
        parameter.copy_(mean + deviation * torch.randn(parameter.shape, generator=random))
    model.to(STORED[stored]).save_pretrained(folder)

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, config.vocab_size, (2 * TOKENS,), generator=random)
    logits = reference(ids[None]).logits[0].float().numpy()
    tokens = ids.numpy().astype(np.int32)
    np.savez_compressed(
        folder / "expected.npz",
        input_ids=tokens[:TOKENS],
        logits=logits[:TOKENS],
        decode_ids=tokens[TOKENS:],
        decode_logits=logits[TOKENS:],
    )
    best = len(set(logits.argmax(-1).tolist()))
    print(f"{folder}: {best} distinct best tokens of {len(logits)}, logits spread by {logits.std():.2f}")


def setting(text: str) -> tuple[str, Any]:
    """A key and its JSON value."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=JSON")
    return key, json.loads(value)


def main() -> None:
    """Read the command line and make one reference."""
    parser = argparse.ArgumentParser(
        description="Make a small random checkpoint and the logits of transformers for it."
    )
    parser.add_argument("model_type")
    parser.add_argument("--name", help="of the folder; the model type unless given")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="KEY=JSON", help="of the config")
    parser.add_argument("--store", choices=STORED, default="f32", help="element type in the file")
    parser.add_argument("--norms-around", type=float, default=1.0, help="0 where the family adds 1 to norms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    folder = given.out / (given.name or given.model_type)
    with torch.no_grad():
        make(folder, given.model_type, {**SIZES, **dict(given.set)}, given.store, given.norms_around, given.seed)


if __name__ == "__main__":
    main()
