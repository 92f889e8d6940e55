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
from vkdecode.graph import NodeId, TopKAttrs, splice_host_copy

MOST_CANDIDATES = 64


@dataclass(frozen=True)
class Candidates:
    """The highest logits of a row and whose they are.

    Where the best logit is not finite, these are the whole row in the order of ids, so that an error can say what is
    in it.

    Attributes:
        token_ids: int64 [count], best first; of equal logits the lower ids.
        logits: float32 [count], to the bit those of the row.

    """

    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32]


def with_candidates(step: StepGraph, options: StepOptions) -> StepGraph:
    """The step with its lists of candidates, where it ends in one row of logits; the graph is changed in place."""
    if options.logits != "last":
        return step
    graph = step.graph
    groups = graph.group_max(step.logits)
    counts = sorted({1, min(MOST_CANDIDATES, graph.node(step.logits).shape[1])})
    return replace(step, candidates=tuple(graph.top_k(step.logits, groups, count) for count in counts))


def host_copies(step: StepGraph) -> tuple[NodeId, ...]:
    """A device-to-host COPY behind each list of candidates, as `prepare` puts one behind the logits."""
    return tuple(splice_host_copy(step.graph, node) for node in step.candidates)


def candidates_node(step: StepGraph, count: int) -> NodeId | None:
    """The shortest list that holds `count` candidates, or None."""
    return next((node for node in step.candidates if step.graph.attrs(node, TopKAttrs).k >= count), None)


def left_out(step: StepGraph, wanted: NodeId) -> frozenset[NodeId]:
    """The nodes behind the logits that nobody needs who wants this one."""
    behind = set(step.graph.reachable(step.candidates)) - set(step.graph.reachable([step.logits]))
    return frozenset(behind - set(step.graph.reachable([wanted])))


def as_candidates(pairs: NDArray[np.float32]) -> Candidates:
    """What a TOP_K node left, pairs of an id's bits and a logit."""
    return Candidates(pairs.view(np.uint32)[::2].astype(np.int64), pairs[1::2])
