"""A model's facts as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vkdecode.info.inspect_model import ModelInfo

_LABELS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden size",
    "intermediate_size": "feed-forward size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key and value heads",
    "head_dim": "head size",
    "num_experts": "experts",
    "num_experts_per_tok": "experts a token",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context length",
    "sliding_window": "sliding window",
}


def as_text(info: ModelInfo) -> str:
    """All facts, one a line; the last line says whether the model will run."""
    return "\n".join(_lines(info))


def _lines(info: ModelInfo) -> Iterator[str]:
    yield _line("model", Path(info.path).name)
    yield _line("architecture", info.model_type)
    count = f"{_short(info.parameters)}, " if info.parameters else ""
    yield _line("parameters", f"{count}{info.file_bytes / 1e6:,.1f} MB in files")
    for key, value in info.sizes.items():
        yield _line(_LABELS[key], f"{value:,}")
    for name, group in info.tensors.items():
        types = ", ".join(f"{count} {kind}" for kind, count in group.types.items())
        yield _line(f"{name} tensors", f"{_short(group.parameters):<8} {types}")
    if info.tokenizer_problem is not None:
        yield _line("tokenizer", f"none: {info.tokenizer_problem}")
    elif info.chat_template is not None:
        yield _line("chat template", "yes" if info.chat_template else "no; chat --plain and generate work without")
        yield _line("end tokens", ", ".join(f"{token} {text!r}" for token, text in info.ends.items()) or "none")
    if info.device is not None:
        yield _line("device", info.device)
    if info.memory is not None:
        yield from str(info.memory).splitlines()
    for problem in info.problems:
        yield _line("will not run here", problem)
    if info.runs:
        yield _line("runs here", "yes")


def _line(label: str, value: str) -> str:
    return f"{label:<24}{value}"


def _short(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
