"""Routed experts: of many MLPs a token takes the few that a router names, by the weights that it gives them.

Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.errors import ConfigError
from vkdecode.graph import NodeId, WeightSpec
from vkdecode.models.config import positive_int
from vkdecode.models.step_builder import StepBuilder


@dataclass(frozen=True)
class Experts:
    """How many experts a layer has, how many a token takes, the features inside of each, and what their weights are.

    The weights of a token's experts are a softmax over those where `normalized`, else over all.
    """

    count: int
    used: int
    intermediate_size: int
    normalized: bool


def experts_from_config(
    config: Mapping[str, Any], key: str, defaults: tuple[int, int], intermediate_size: int, normalized: bool
) -> Experts:
    """The experts of a config.

    Args:
        config: where `num_experts_per_tok` says how many a token takes.
        key: which one says how many there are.
        defaults: both numbers where they are absent.
        intermediate_size: of each expert.
        normalized: see `Experts`.

    Raises:
        ConfigError: a number is impossible, or a token is to take more than there are.

    """
    count = positive_int(config, key, defaults[0])
    used = positive_int(config, "num_experts_per_tok", defaults[1])
    if used > count:
        raise ConfigError(f"num_experts_per_tok is {used}, but {key} is {count}; a token takes no more than there are")
    return Experts(count, used, intermediate_size, normalized)


def expert_mlp(
    b: StepBuilder, h: NodeId, route: NodeId, e: Experts, hidden_size: int, tensor: Callable[[int, str], str]
) -> NodeId:
    """down(silu(gate(h)) * up(h)) of each of a token's experts, side by side.

    `tensor` is the name of an expert's `gate`, `up` or `down` matrix, each of which is a tensor of its own.
    """

    def stack(part: str, rows: int, columns: int) -> WeightSpec:
        return b.tensors.stack([tensor(expert, part) for expert in range(e.count)], rows, columns)

    graph = b.graph
    gate = graph.expert_linear(h, graph.weight(stack("gate", e.intermediate_size, hidden_size)), route)
    up = graph.expert_linear(h, graph.weight(stack("up", e.intermediate_size, hidden_size)), route)
    down = graph.weight(stack("down", hidden_size, e.intermediate_size))
    return graph.expert_linear(graph.mul(graph.silu(gate), up), down, route)
