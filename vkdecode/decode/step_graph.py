"""What a model's step graph offers to a session, and how a step can be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.kv_cache import KvGeometry
from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Device
from vkdecode.graph import Graph, NodeId, SymId
from vkdecode.runtime import WeightStore


@dataclass(frozen=True)
class StepOptions:
    """Which step graph to build.

    Attributes:
        seq: tokens the step has room for.
        logits: `last`, `all`, or `none` for a chunk of a prompt whose logits nobody reads.
        kv_offset: `device` (the KV write reads its offset from device memory) or `symenv` (from push constants).
        arm: `bounded` (attention reads the cached rows only) or `masked` (all rows, under a mask).

    """

    seq: int
    logits: str
    kv_offset: str
    arm: str


@dataclass(frozen=True)
class StepGraph:
    """A step's graph and the ids that a session binds.

    `logits` is the value wanted, `effects` the moves of rows from the landing rows, where they land there. `offset`
    exists only on the device-offset path, `mask` only in the masked arm. `top_k` are lists of the highest logits, the
    shorter first; see `decode.top_k`.
    `extras` are the data constants that only some models have, by name: `positions` (uint32 [seq]),
    `ages` (float32 [max_seq_len]: how many positions a cached row lies before the step, negative where it does not
    count; the mask of windowed layers), and `local_rope_cos` and `local_rope_sin` (the angles of windowed layers).
    """

    graph: Graph
    seq: int
    logits: NodeId
    effects: tuple[NodeId, ...]
    token_ids: NodeId
    token_count: NodeId
    rope_cos: NodeId
    rope_sin: NodeId
    mask: NodeId | None
    offset: NodeId | None
    kv: tuple[tuple[NodeId, NodeId], ...]
    cached_len_sym: SymId
    attended_len_sym: SymId
    token_count_sym: SymId
    top_k: tuple[NodeId, ...] = ()
    extras: Mapping[str, NodeId] = field(default_factory=dict)


class PlannedModel(Protocol):
    """What the decode floor needs of a model to plan its steps: no weights."""

    @property
    def device(self) -> Device:
        """Whose limits and kernel shape count."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token."""
        ...

    @property
    def default_kv_offset(self) -> str:
        """`device` or `symenv`."""
        ...

    def max_step_tokens(self, logits: str) -> int:
        """How many tokens a step may have room for, so that no activation exceeds the device's storage buffers."""
        ...

    def kv_geometry(self, max_seq_len: int, dtype: str) -> KvGeometry:
        """The shape of a cache for this model."""
        ...

    def build_step(self, options: StepOptions, geometry: KvGeometry) -> StepGraph:
        """A new graph of one step."""
        ...


class DecodeModel(PlannedModel, Protocol):
    """What the decode floor needs of a model to run its steps."""

    @property
    def weight_store(self) -> WeightStore:
        """The uploaded weights."""
        ...

    @property
    def shape_key(self) -> int:
        """64 bits over architecture, structure and identity."""
        ...

    @property
    def max_positions(self) -> int | None:
        """How many positions the model can tell apart, where that is limited."""
        ...

    def rope_cos_sin(
        self, positions: NDArray[np.int64], max_seq_len: int | None = None, local: bool = False
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines [positions, head_dim / 2] over a cache of that length, or those of windowed layers."""
        ...

    def check_open(self) -> None:
        """Raise `ClosedError` where the model was closed."""
        ...


def check_token_ids(token_ids: Sequence[int] | NDArray[np.integer], vocab_size: int) -> NDArray[np.uint32]:
    """The ids as uint32 [n].

    Raises:
        InvalidInputError: there are none, or one is not an integer in the vocabulary.

    """
    # Every decoded token passes here: one alone needs none of what follows.
    alone = token_ids[0] if isinstance(token_ids, list) and len(token_ids) == 1 else None
    if type(alone) is int and 0 <= alone < vocab_size:
        return np.array(token_ids, np.uint32)
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise InvalidInputError("token_ids must be a non-empty flat sequence of integers")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidInputError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    return ids.astype(np.uint32)
