"""The graph of one step and its optimization; knows no device."""

from vkdecode.graph.fusion import FUSIONS, Fusion
from vkdecode.graph.graph import Graph, OptimizedGraph
from vkdecode.graph.nodes import (
    AttentionAttrs,
    CopyAttrs,
    DataAttrs,
    ExpertSumAttrs,
    FactorAttrs,
    GroupMaxAttrs,
    KvAttrs,
    KvMoveAttrs,
    KvWriteAttrs,
    LinearAttrs,
    Node,
    NodeId,
    NormAttrs,
    Op,
    RopeAttrs,
    RouteAttrs,
    RowPick,
    TopKAttrs,
    ViewAttrs,
    WeightSpec,
)
from vkdecode.graph.optimize import optimize_graph
from vkdecode.graph.placement import HOST, splice_host_copy
from vkdecode.graph.split import MaxUnits
from vkdecode.graph.symbols import SymEnv, SymId

__all__ = [
    "FUSIONS",
    "HOST",
    "AttentionAttrs",
    "CopyAttrs",
    "DataAttrs",
    "ExpertSumAttrs",
    "FactorAttrs",
    "Fusion",
    "Graph",
    "GroupMaxAttrs",
    "KvAttrs",
    "KvMoveAttrs",
    "KvWriteAttrs",
    "LinearAttrs",
    "MaxUnits",
    "Node",
    "NodeId",
    "NormAttrs",
    "Op",
    "OptimizedGraph",
    "RopeAttrs",
    "RouteAttrs",
    "RowPick",
    "SymEnv",
    "SymId",
    "TopKAttrs",
    "ViewAttrs",
    "WeightSpec",
    "optimize_graph",
    "splice_host_copy",
]
