"""Splitting: a weight larger than one storage buffer may be becomes several, by rows, and so does what uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vkdecode.errors import DeviceError
from vkdecode.graph.graph import Graph
from vkdecode.graph.nodes import LinearAttrs, NodeId, Op, WeightSpec

# How many rows, or pairs of rows, of a weight like this one storage buffer may hold.
MaxUnits = Callable[[WeightSpec], int]


def split_weights(graph: Graph, roots: tuple[NodeId, ...], max_units: MaxUnits) -> tuple[NodeId, ...]:
    """Replace each product and embedding with too large a weight by parts that are joined again, in place.

    Raises:
        DeviceError: not even the smallest part fits.

    """
    for node_id in graph.reachable(roots):
        node = graph.node(node_id)
        if node.op not in (Op.LINEAR, Op.EMBED):
            continue
        spec = graph.attrs(node.inputs[1], WeightSpec)
        if spec.experts:
            continue  # the experts of one token may lie anywhere in it; too large a stack is refused with its plan
        if spec.units > max_units(spec):
            parts = _parts(spec, max_units(spec))
            if node.op is Op.LINEAR:
                _split_linear(graph, node_id, parts)
            else:
                _split_embedding(graph, node_id, parts)
    return roots


def _parts(spec: WeightSpec, step: int) -> list[WeightSpec]:
    """Parts of equal size but for the last."""
    if step < 1:
        raise DeviceError(f"not even one block of rows of {spec.title} fits one storage buffer of this device")
    return [
        replace(spec, first_unit=first, unit_count=min(step, spec.units - first))
        for first in range(0, spec.units, step)
    ]


def _split_linear(graph: Graph, node_id: NodeId, parts: list[WeightSpec]) -> None:
    node = graph.node(node_id)
    attrs = graph.attrs(node_id, LinearAttrs)
    x, _, *rest = node.inputs
    bias = graph.attrs(rest.pop(0), WeightSpec) if attrs.bias else None
    residual = rest.pop() if attrs.residual else None
    inner = replace(attrs, residual=False)
    joined: NodeId | None = None
    width = 0
    for part in parts:
        inputs = [x, graph.weight(part)]
        if bias is not None:
            inputs.append(graph.weight(replace(bias, first_unit=part.first_unit, unit_count=part.unit_count)))
        made = graph.add_node(Op.LINEAR, [*inputs, *rest], (node.shape[0], part.units), inner)
        width += part.units
        last = part is parts[-1] and residual is None
        if joined is None:
            joined = made
        elif last:
            graph.rewrite(node_id, Op.CONCAT, [joined, made], None)
        else:
            joined = graph.add_node(Op.CONCAT, [joined, made], (node.shape[0], width))
    if residual is not None and joined is not None:
        graph.rewrite(node_id, Op.ADD, [residual, joined], None)


def _split_embedding(graph: Graph, node_id: NodeId, parts: list[WeightSpec]) -> None:
    """Each part gives the rows that it holds and passes on the others' rows."""
    node = graph.node(node_id)
    token_ids = node.inputs[0]
    held = graph.add_node(Op.EMBED, [token_ids, graph.weight(parts[0])], node.shape)
    for part in parts[1:-1]:
        held = graph.add_node(Op.EMBED, [token_ids, graph.weight(part), held], node.shape)
    graph.rewrite(node_id, Op.EMBED, [token_ids, graph.weight(parts[-1]), held], None)
