"""The bytes that decoding one token reads, from the plan that decodes it."""

from __future__ import annotations

from dataclasses import dataclass

from vkdecode.decode import KvGeometry, plan_step, prompt_steps
from vkdecode.graph import Graph, LinearAttrs, Op, WeightSpec
from vkdecode.models import Model
from vkdecode.runtime import Plan


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step reads: weights that kernels bind, of experts those of one token, and all cached rows."""

    weights: int
    kv_row: int

    def at(self, context: int) -> int:
        """Bytes of a step after this many cached rows."""
        return self.weights + self.kv_row * context


def decode_traffic(model: Model, geometry: KvGeometry) -> Traffic:
    """The traffic of a model's default decode step over a cache of this shape; activations are left out."""
    (options,) = prompt_steps(model, 1)
    graph, plan = plan_step(model, options, geometry)
    row = 2 * geometry.num_layers * geometry.num_key_value_heads * geometry.head_dim * geometry.dtype.itemsize
    return Traffic(_weight_bytes(model, graph, plan), row)


def _weight_bytes(model: Model, graph: Graph, plan: Plan) -> int:
    total = 0
    for dispatch in plan.dispatches:
        for node in dict.fromkeys(dispatch.bindings):
            if graph.node(node).op is Op.WEIGHT:
                spec = graph.attrs(node, WeightSpec)
                nbytes = model.weight_store.nbytes(spec)
                reader = graph.node(dispatch.node)
                if reader.op is Op.EMBED:
                    nbytes //= spec.units  # only one row is read
                elif spec.experts:
                    nbytes = nbytes * graph.attrs(reader.id, LinearAttrs).experts_used // spec.experts
                total += nbytes
    return total
