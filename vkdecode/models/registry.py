"""Which file knows which `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.models import llama

ARCHITECTURES: Mapping[str, ModuleType] = {"llama": llama}


def architecture_of(config: Mapping[str, Any]) -> tuple[str, ModuleType]:
    """The model type of a config and the module that builds its graph.

    Raises:
        UnsupportedModelError: no module knows it.
        ModelFileError: the config does not say.

    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFileError("the config has no model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return model_type, ARCHITECTURES[model_type]
