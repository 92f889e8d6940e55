"""The best tokens of a step, chosen on the device, so that the host need not read all logits for each token.

Every step that ends in one row of logits also has two lists of its highest values behind it: the best one alone, for
greedy decoding, and the best 64. A recording leaves out what it is not for, so a request for all logits pays for
neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.step_graph import StepGraph, StepOptions
from vkdecode.graph import NodeId, TopKAttrs

MAX_TOP_K = 64


@dataclass(frozen=True)
class Candidates:
    """The highest logits of a row and whose they are.

    Where the best logit is not finite, these are the whole row in the order of ids, so that an error can say what is in
    it.

    Attributes:
        token_ids: int64 [k], best first; of equal logits the lower ids.
        logits: float32 [k], to the bit those of the row.

    """

    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32]


def with_top_k(step: StepGraph, options: StepOptions) -> StepGraph:
    """The step with its lists of the highest logits, where it ends in one row; the graph is changed in place."""
    if options.logits != "last":
        return step
    graph = step.graph
    groups = graph.group_max(step.logits)
    sizes = sorted({1, min(MAX_TOP_K, graph.node(step.logits).shape[1])})
    return replace(step, top_k=tuple(graph.top_k(step.logits, groups, k) for k in sizes))


def top_k_node(step: StepGraph, k: int) -> NodeId | None:
    """The shortest list that holds `k` values, or None."""
    return next((node for node in step.top_k if step.graph.attrs(node, TopKAttrs).k >= k), None)


def left_out(step: StepGraph, wanted: NodeId) -> frozenset[NodeId]:
    """The nodes behind the logits that nobody needs who wants this one."""
    behind = set(step.graph.reachable(step.top_k)) - set(step.graph.reachable([step.logits]))
    return frozenset(behind - set(step.graph.reachable([wanted])))


def as_candidates(pairs: NDArray[np.float32]) -> Candidates:
    """What a TOP_K node left, pairs of an id's bits and a logit."""
    return Candidates(pairs.view(np.uint32)[::2].astype(np.int64), pairs[1::2])
