"""What a plan takes of a device, and whether the device's limits allow it; from numbers alone, before any upload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest

from vkdecode.gpu import DeviceInfo, Lanes, check_buffer, check_dispatch, largest_buffer, storage_bytes
from vkdecode.graph import AttentionAttrs, Graph, KvAttrs, NodeId, Op, WeightSpec
from vkdecode.runtime.passes import check_cached_rows
from vkdecode.runtime.plan import Plan, value_bytes
from vkdecode.runtime.weight_layout import weight_bytes
from vkdecode.weights import DType


@dataclass(frozen=True)
class PlanFootprint:
    """What an executable of a plan allocates beside weights and KV caches.

    Attributes:
        activations: bytes on the device of the arenas, the results and the data bound for each step.
        staging: bytes of the staging buffers of results and data.
        allocations: how many allocations that takes.

    """

    activations: int = 0
    staging: int = 0
    allocations: int = 0

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.activations + self.staging

    def __add__(self, other: PlanFootprint) -> PlanFootprint:
        return PlanFootprint(
            self.activations + other.activations,
            self.staging + other.staging,
            self.allocations + other.allocations,
        )


def footprint(*plans: tuple[Graph, Plan]) -> PlanFootprint:
    """What executables of these plans allocate that share their arenas and results, the largest one made first."""
    arenas: list[int] = []
    results: Counter[int] = Counter()
    data: list[int] = []
    for graph, plan in plans:
        arenas = list(map(max, zip_longest(arenas, plan.arena_bytes, fillvalue=0)))
        results |= Counter(map(storage_bytes, plan.results.values()))
        data.append(data_bytes(graph, plan.data))
    staging = sum(results.elements()) + sum(data)
    return PlanFootprint(sum(arenas) + staging, staging, len(arenas) + 2 * (results.total() + len(data)))


def data_bytes(graph: Graph, nodes: Iterable[NodeId]) -> int:
    """Bytes of the one storage that the data of a step lie in, one behind the other."""
    return sum(storage_bytes(value_bytes(graph, node)) for node in nodes)


def weight_constants(graph: Graph, plan: Plan) -> list[WeightSpec]:
    """The weights that a plan binds, each once."""
    found = (graph.attrs(node, WeightSpec) for node in plan.constants if graph.node(node).op is Op.WEIGHT)
    return list(dict.fromkeys(found))


def weights_bytes(specs: Iterable[WeightSpec], lanes: Lanes) -> int:
    """Bytes that these weights take on the device."""
    return sum(storage_bytes(weight_bytes(spec, lanes.tile, lanes.block_rows)) for spec in specs)


def check_plan(graph: Graph, plan: Plan, info: DeviceInfo, lanes: Lanes) -> None:
    """Refuse a plan that breaks a limit of the device.

    Raises:
        DeviceError: which buffer or kernel, which limit, both numbers, and for a stack of experts what would fit.

    """
    arenas = {node: plan.arena_bytes[-1 - span.place] for node, span in plan.spans.items()}
    values = {node: span.end - span.start for node, span in plan.spans.items()} | dict(plan.results)
    constants = {node: _constant_bytes(graph, node, lanes) for node in plan.constants}
    for node, nbytes in sorted(
        (values | constants).items(), key=lambda one: -one[1]
    ):  # what makes the largest fit is enough
        check_buffer(info, nbytes, _describe(graph, node), _instead(graph, node, info, lanes))
    sizes = values | constants | arenas
    for dispatch in plan.dispatches:
        bound = [storage_bytes(sizes[node]) for node in dispatch.bindings]
        check_dispatch(info, dispatch.kernel, dispatch.spec, dispatch.workgroups, bound)
        if graph.node(dispatch.node).op is Op.ATTENTION:
            attrs, cache = graph.attrs(dispatch.node, AttentionAttrs), graph.node(dispatch.bindings[1])
            check_cached_rows(info, lanes, attrs.head_dim, attrs.max_seq_len, cache.shape[1])


def _constant_bytes(graph: Graph, node_id: NodeId, lanes: Lanes) -> int:
    if graph.node(node_id).op is Op.WEIGHT:
        return weight_bytes(graph.attrs(node_id, WeightSpec), lanes.tile, lanes.block_rows)
    return value_bytes(graph, node_id)


def _describe(graph: Graph, node_id: NodeId) -> str:
    node = graph.node(node_id)
    if node.op is Op.WEIGHT:
        return f"the weight {graph.attrs(node_id, WeightSpec).title}"
    if node.op is Op.KV:
        attrs = graph.attrs(node_id, KvAttrs)
        return f"the {'KV'[attrs.which]} cache of layer {attrs.layer}, {node.shape[1]} rows,"
    return f"the {node.op.value} buffer {list(node.shape)}"


def _instead(graph: Graph, node_id: NodeId, info: DeviceInfo, lanes: Lanes) -> str:
    """What to do about a stack of experts, which is not split, where it is too large."""
    if graph.node(node_id).op is not Op.WEIGHT or not (spec := graph.attrs(node_id, WeightSpec)).experts:
        return ""
    whole = "the experts of a layer lie in one buffer"
    for dtype in (DType.F16, DType.Q8_0, DType.Q4_0):
        if not spec.vector and dtype.fits(spec.columns):
            nbytes = weight_bytes(replace(spec, dtype=dtype), lanes.tile, lanes.block_rows)
            if nbytes <= largest_buffer(info):
                return f"{whole}; load with weights={dtype.value!r}, which makes it {nbytes} bytes"
    return f"{whole}; use a device with larger storage buffers, or a file stored at fewer bits"
