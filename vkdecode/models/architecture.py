"""What an architecture's file hands to the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.models.rope import Rope, rope_from_config
from vkdecode.models.tensors import TensorTable

BuildStep = Callable[[Any, TensorTable, int, StepOptions, KvGeometry], StepGraph]
"""Config, tensors, rotated dimensions, options and cache; the graph of one step."""


def plain_rope(config: Mapping[str, Any], c: Any) -> Rope:
    """The rotation that a config describes, the same in all layers."""
    return rope_from_config(config, c.head_dim)


def no_more_checks(c: Any, tensors: TensorTable) -> None:
    """Nothing beyond what is checked for every family."""


@dataclass(frozen=True)
class Architecture:
    """One family: how its config is read and which graph that means.

    Attributes:
        parse_config: the config's dataclass, a `DecoderConfig`; raises what a config can be refused for. Nobody else
            looks inside.
        build_step: the graph of one step.
        rope: the rotation of q and k.
        layers: what the names of a layer's tensors begin with, up to its number.
        default_kv_offset: `device` or `symenv`: where the KV write takes its offset from unless asked otherwise.
        check_tensors: refuses tensors that the config does not account for, where that can be said more clearly than
            that nothing uses them.

    """

    parse_config: Callable[[Mapping[str, Any]], Any]
    build_step: BuildStep
    rope: Callable[[Mapping[str, Any], Any], Rope] = plain_rope
    layers: str = "model.layers."
    default_kv_offset: str = "device"
    check_tensors: Callable[[Any, TensorTable], None] = no_more_checks
