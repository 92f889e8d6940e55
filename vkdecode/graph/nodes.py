"""Nodes of the graph: operations, their attributes, and what constants stand for.

Activations are float32 [tokens, features]. A graph knows no device: weights are named, not held.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from vkdecode.graph.symbols import SymId
from vkdecode.weights.dtypes import DType

NodeId = NewType("NodeId", int)


class Op(enum.Enum):
    """What a node computes."""

    WEIGHT = "weight"  # constant: rows of a model's tensors
    DATA = "data"  # constant: bound anew for each step
    KV = "kv"  # constant: one K or V cache, written in place
    EMBED = "embed"
    RMS_NORM = "rms_norm"
    LAYER_NORM = "layer_norm"
    LINEAR = "linear"
    ROPE = "rope"
    ADD = "add"
    MUL = "mul"
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    SCALE = "scale"
    SOFTCAP = "softcap"
    ATTENTION = "attention"
    KV_WRITE = "kv_write"  # effect: puts the step's rows into the KV constants of a layer
    KV_MOVE = "kv_move"  # effect: moves them from the landing rows to their place
    ROUTE = "route"  # which experts a token takes, and how much of each
    EXPERT_SUM = "expert_sum"
    LAST_ROW = "last_row"
    GROUP_MAX = "group_max"  # the highest value of each group of a row
    TOP_K = "top_k"  # the highest values of a row, best first
    VIEW = "view"  # columns of another node, without a kernel
    CONCAT = "concat"  # columns of two nodes side by side
    CONTIGUIZE = "contiguize"  # a view's columns, copied together
    COPY = "copy"  # the same values at another place


CONSTANTS = frozenset({Op.WEIGHT, Op.DATA, Op.KV})


@dataclass(frozen=True)
class RowPick:
    """Which rows of its tensor a part of a constant takes.

    Runs of `run` rows, `stride` rows apart, the first at `start`; a `run` of 0 is a single run of all. Where
    `interleaved` is not 0, each head of that many rows has its pairs (2i, 2i + 1) put to (i, i + interleaved / 2).
    """

    start: int = 0
    run: int = 0
    stride: int = 0
    interleaved: int = 0


@dataclass(frozen=True)
class WeightSpec:
    """A constant made of a model's tensors: which, in which row order, and how it is held.

    `order` is `plain` (the tensors' rows one after another), `gated` (row i of the first tensor paired with row i of
    the second) or `rope` (rows of each head paired as the rotation pairs them; needs `head_dim` and `rotary_dim`). A
    `vector` is a 1-D tensor, held as plain float32 in the same row order; it may list a missing tensor as None, which
    stands for zeros. `first_unit` and `unit_count` name a part of a split weight: units are rows, or pairs of rows in a
    paired order; a count of 0 means all.

    `picks` says for each part which rows of its tensor it takes; empty where all are whole tensors in their own order.
    The tensors of a `transposed` constant are [columns, rows] in the file. `plus_one` adds 1 to each value of a vector.

    A constant of `experts` holds as many matrices of the same size, each from a whole block of rows on: the parts' rows
    are those of all experts, one after another. Its tensors are one for each expert, or one for all, then with an axis
    for them before the others.
    """

    names: tuple[str | None, ...]
    part_rows: tuple[int, ...]
    columns: int
    dtype: DType
    order: str = "plain"
    head_dim: int = 0
    rotary_dim: int = 0
    vector: bool = False
    first_unit: int = 0
    unit_count: int = 0
    picks: tuple[RowPick, ...] = ()
    transposed: bool = False
    plus_one: bool = False
    experts: int = 0

    @property
    def rows(self) -> int:
        """Rows of all tensors together, whatever part of them this is."""
        return sum(self.part_rows)

    @property
    def units(self) -> int:
        """Rows, or pairs of rows in a paired order, that this constant holds."""
        return self.unit_count or (self.rows if self.order == "plain" else self.rows // 2)

    @property
    def title(self) -> str:
        """The names of its tensors, for errors; of a stack of many the first and the last."""
        names = [name or "zeros" for name in self.names]
        return " + ".join(names) if len(names) < 5 else f"{names[0]} to {names[-1]}, {len(names)} tensors"


@dataclass(frozen=True)
class DataAttrs:
    """A data constant's role, e.g. `token_ids`."""

    name: str


@dataclass(frozen=True)
class KvAttrs:
    """A layer's K (`which` 0) or V (1), [kv_heads, cache rows, head_dim]."""

    layer: int
    which: int


@dataclass(frozen=True)
class RopeAttrs:
    """A rotation of the first `rotary_dim` dimensions of every head."""

    heads: int
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True)
class NormAttrs:
    """A norm's epsilon, and into how many groups of features it takes a token apart, each normalized by itself.

    The weight is for all features; or for those of one group and then the same in each; or for those of two, one for
    the first `first_groups` and one for the others. Inputs: x, weight, bias, cos and sin where `rope` turns the heads
    afterwards, and what is added then where `residual` says so.
    """

    epsilon: float
    groups: int = 1
    first_groups: int = 0
    bias: bool = False
    rope: RopeAttrs | None = None
    residual: bool = False


@dataclass(frozen=True)
class FactorAttrs:
    """The number that values are multiplied with, or the one that caps them."""

    factor: float


@dataclass(frozen=True)
class KvWriteAttrs:
    """Where a KV write puts the rows of K and V.

    Inputs: k, v, K cache, V cache, token count, and the offset data where `cached_len` is None. Otherwise that is the
    row of the step's first token: a symbol, or the first landing row.
    """

    kv_heads: int
    head_dim: int
    cached_len: SymId | int | None


@dataclass(frozen=True)
class LinearAttrs:
    """What is fused around a product.

    Inputs: x, weight, then bias, norm weight and norm bias, residual or what the rope epilogue takes, and the ROUTE
    that says which experts' matrices count, as far as they are present.
    `norm` is `rms` or `layer` and counts only where `norm_epsilon` is given. `epilogue` is `plain` (the activation,
    then the residual, as far as there are any), `gated` (the activation of a pair's first row times the second, or
    both in one CLAMPED_SWIGLU) or `rope`: q, k and v, of which q is the value, and k and v go into the cache as `write`
    says; it takes cos and sin, where `rotary_dim` is not 0, and what a KV_WRITE takes behind k and v. With
    `experts_used` a token has as many products side by side, one for each expert; x has one row for all of them, or one
    for each side by side.
    """

    bias: bool = False
    norm_epsilon: float | None = None
    norm: str = "rms"
    norm_bias: bool = False
    epilogue: str = "plain"
    activation: Op | None = None
    residual: bool = False
    rotary_dim: int = 0
    write: KvWriteAttrs | None = None
    experts_used: int = 0


@dataclass(frozen=True)
class RouteAttrs:
    """How many experts a token takes, and whether their weights add up to 1.

    A row of logits, one for each expert, becomes 2 * `used` unsigned words: the experts, best first, of equal ones the
    lower first, and then the bits of their weights. Those are a softmax over the chosen ones where `normalized`, else
    over all; Shazeer et al. 2017. Rows behind the step's tokens have experts of all ones, which are none.
    """

    used: int
    normalized: bool


@dataclass(frozen=True)
class ExpertSumAttrs:
    """What is added up: the outputs of `used` experts side by side, by their weights.

    Inputs: the outputs, the ROUTE, then the output of a shared expert and the logit of its gate (where `shared` says
    so), which counts by the gate's sigmoid, and what is added to all (where `residual` does).
    """

    used: int
    shared: bool = False
    residual: bool = False


@dataclass(frozen=True)
class AttentionAttrs:
    """Geometry of attention and how it knows which rows of the cache count.

    Inputs: q, K cache, V cache, what wrote this step's rows, token count, then the sinks (where `sinks` says so), the
    mask (where `masked`) and the offset data (where `attended_len` is None).

    The step's rows end before row `attended_len`, which counts the room of the step. Of the rows before them all count,
    or in the masked arm those of the `max_seq_len` first that the mask shows.
    A token sees the `window` positions up to its own, or all where that is 0; in the masked arm the mask then holds the
    rows' ages. A score s becomes cap tanh(s / cap) with the cap `softcap`, where that is not 0. A sink is one more
    logit of its head in the softmax's denominator.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    max_seq_len: int
    masked: bool
    attended_len: SymId | int | None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class KvMoveAttrs:
    """Which landing rows move where: so many as `token_count` says, from row `max_seq_len` to row `cached_len`.

    Inputs: K cache, V cache, and the attention that must have read the landing rows.
    """

    kv_heads: int
    head_dim: int
    max_seq_len: int
    max_tokens: int
    cached_len: SymId
    token_count: SymId


@dataclass(frozen=True)
class GroupMaxAttrs:
    """How a row is cut: blocks of `width` groups, each group `length` columns that are `width` apart.

    Pairs of a sort key and a column come out, [1, 2 * groups], as unsigned words.
    """

    width: int
    length: int


@dataclass(frozen=True)
class TopKAttrs:
    """How many values are wanted. Inputs: x [1, columns] and its GROUP_MAX.

    Pairs of a column and the value's bits come out, best first, [1, 2 * k], as unsigned words; of equal values the
    lower columns go first, and NaN goes before all.
    """

    k: int


@dataclass(frozen=True)
class ViewAttrs:
    """Columns `offset` to `offset + shape[1]` of the viewed node."""

    offset: int


@dataclass(frozen=True)
class CopyAttrs:
    """Where a copy's values go: `host` or `device`."""

    to: str


Attrs = (
    WeightSpec
    | DataAttrs
    | KvAttrs
    | NormAttrs
    | FactorAttrs
    | RopeAttrs
    | LinearAttrs
    | RouteAttrs
    | ExpertSumAttrs
    | AttentionAttrs
    | KvWriteAttrs
    | KvMoveAttrs
    | GroupMaxAttrs
    | TopKAttrs
    | ViewAttrs
    | CopyAttrs
    | None
)


@dataclass(frozen=True)
class Node:
    """One value (or effect) in single-assignment form."""

    id: NodeId
    op: Op
    inputs: tuple[NodeId, ...]
    shape: tuple[int, ...]
    dtype: DType = DType.F32
    attrs: Attrs = None
