"""Which file knows which `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.models import llama, phi
from vkdecode.models.rope import Rope
from vkdecode.models.tensors import TensorTable


class Architecture(Protocol):
    """What an architecture's module offers. Its config is a dataclass of its own; nobody else looks inside."""

    DEFAULT_KV_OFFSET: str

    def parse_config(self, config: Mapping[str, Any], /) -> Any:
        """Read and check a config."""
        ...

    def rope(self, config: Mapping[str, Any], c: Any, /) -> Rope:
        """The rotation of q and k."""
        ...

    def check_tensors(self, c: Any, tensors: TensorTable, /) -> None:
        """Refuse a file whose tensors the config does not account for."""
        ...

    def build_step(
        self, c: Any, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry, /
    ) -> StepGraph:
        """The graph of one step."""
        ...


ARCHITECTURES: Mapping[str, Architecture] = {"llama": llama, "phi": phi}


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
