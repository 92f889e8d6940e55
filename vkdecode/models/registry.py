"""Which file knows which `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.models import (
    cohere,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi,
    phi3,
    qwen,
    qwen_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from vkdecode.models.architecture import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    "cohere": cohere.ARCHITECTURE,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gemma3_text": gemma.GEMMA3,
    "gpt2": gpt2.ARCHITECTURE,
    "gpt_neox": gpt_neox.ARCHITECTURE,
    "gpt_oss": gpt_oss.ARCHITECTURE,
    "granite": granite.ARCHITECTURE,
    "llama": llama.ARCHITECTURE,
    "ministral": mistral.ARCHITECTURE,
    "mistral": mistral.ARCHITECTURE,
    "mixtral": mixtral.ARCHITECTURE,
    "olmo2": olmo2.ARCHITECTURE,
    "phi": phi.ARCHITECTURE,
    "phi3": phi3.ARCHITECTURE,
    "qwen2": qwen.QWEN2,
    "qwen2_moe": qwen_moe.QWEN2_MOE,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen_moe.QWEN3_MOE,
    "smollm3": smollm3.ARCHITECTURE,
    "stablelm": stablelm.ARCHITECTURE,
    "starcoder2": starcoder2.ARCHITECTURE,
}


def architecture_of(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The model type of a config and the module that builds its graph.

    Raises:
        UnsupportedModelError: no module knows it.
        ModelFileError: the config does not say.

    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFileError("the config has no model_type")
    if model_type not in ARCHITECTURES:
        names = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; supported: {names}")
    return model_type, ARCHITECTURES[model_type]
