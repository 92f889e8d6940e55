"""The decode session: a step planned once and held, with only its data bound anew for each token.

Baked into the plan: the structure of the operations and the weights. Bound for each token: token ids, RoPE cosines
and sines, the mask or the KV offset, and the symbols. A held plan used for the wrong model or cache would be wrong at
full speed, a good one thrown away is a silent slow-down; `validity_for` is the one list of comparisons that decides.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.keys import KvAllocId
from vkdecode.decode.rebind import KvRebindSource, RebindRefusal, check_rebind
from vkdecode.decode.step_graph import StepGraph
from vkdecode.decode.top_k import Candidates, as_candidates, left_out, top_k_node
from vkdecode.errors import ClosedError, DeviceError, InvalidInputError
from vkdecode.gpu import Device, DeviceLocation, Recording
from vkdecode.graph import Graph, NodeId, OptimizedGraph, SymEnv
from vkdecode.runtime import Dispatch, Executable, StorageCache, check_topology
from vkdecode.weights.dtypes import DType

StepResult = NDArray[np.float32] | Candidates
"""What a step is run for: logits [rows, vocab] flat, or the highest of one row."""


class PlanValidity(enum.Enum):
    """Whether a held plan fits a step.

    ALLOCATION_CHANGED says only that a re-bind is worth trying: whether it is safe is `rebind_kv`'s question.
    """

    VALID = "valid"
    ALLOCATION_CHANGED = "allocation changed"
    STALE = "stale"


@dataclass(frozen=True)
class DecodeTokenData:
    """What is bound for one step.

    Attributes:
        token_ids: uint32 [seq], padded with any valid id.
        token_count: how many of them are real.
        rope_cos: float32 [seq, head_dim / 2].
        rope_sin: the same shape.
        mask: float32 [max_seq_len], 0 where a cached row counts and negative where not; only in the masked arm.
        offset: uint32 [cached_len, attended_len]; only on the device-offset path.
        extras: what only some models bind, by name; see `StepGraph`.

    """

    token_ids: NDArray[np.uint32]
    token_count: int
    rope_cos: NDArray[np.float32]
    rope_sin: NDArray[np.float32]
    mask: NDArray[np.float32] | None = None
    offset: NDArray[np.uint32] | None = None
    extras: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prebuilt:
    """What the first build of a graph leaves: the copied-out root, the optimization, and the kernels made ready."""

    effective_target: NodeId
    optimized: OptimizedGraph
    executable: Executable


class Capture(Protocol):
    """What a session keeps of its capture; see `CapturedDecodeSession`."""

    @property
    def is_current(self) -> bool:
        """Whether the session still binds the storages that were recorded."""
        ...

    def record(self, want: int) -> bool:
        """Record the plan for what is wanted where that has not been done; whether it was done now."""
        ...

    def run(self, device: Device, data: DecodeTokenData, sym_env: SymEnv, want: int = 0) -> StepResult:
        """Bind a step's data and submit the held recording."""
        ...

    def run_empty(self, device: Device, data: DecodeTokenData, want: int = 0) -> None:
        """Submit once with data of no tokens, where that was not done."""
        ...

    @property
    def needs_one_off(self) -> bool:
        """Whether each token also takes a one-off recording."""
        ...


class DecodeSession:
    """A held plan for one model and one KV allocation.

    Attributes:
        seq: tokens that a step has room for; 1 for decoding.
        graph: the held graph.
        logits_node: the logits, before their COPY to the host: what a capture targets.
        top_k_nodes: the lists of the highest logits behind them, the shorter first; none where a step has no row.
        token_ids_node: data constant, like `token_count_node`, `rope_cos_node`, `rope_sin_node`, `mask_node` (None in
            the bounded arm), `offset_node` (None on the SymEnv path) and `extra_nodes` (by name; see `StepGraph`).
        kv_nodes: K and V constant of each layer.
        cached_len_sym: the KV write offset on the SymEnv path.
        attended_len_sym: the attended length of the bounded arm on the SymEnv path.
        binding_epoch: how often the plan was re-bound.
        capture: the recordings that are held, or None.

    Args:
        device: where the plan runs.
        step: the step's graph, prepared and optimized, and the ids in it.
        prebuilt: what the first build left.
        base_cache: the storages of all constants; the data ones are overwritten for each step.
        max_seq_len: rows of the cache that the plan was built for.
        n_layers: layers of it.
        cache_dtype: element type of it.
        shape_key: the model's key.
        kv: the cache whose storages `base_cache` names.

    """

    def __init__(
        self,
        device: Device,
        step: StepGraph,
        prebuilt: Prebuilt,
        base_cache: StorageCache,
        max_seq_len: int,
        n_layers: int,
        cache_dtype: DType,
        shape_key: int,
        kv: KvRebindSource,
    ) -> None:
        self._device = device
        self._step = step
        self.seq = step.seq
        self.graph: Graph = step.graph
        self.logits_node, self.top_k_nodes = step.logits, step.top_k
        self.token_ids_node, self.token_count_node = step.token_ids, step.token_count
        self.rope_cos_node, self.rope_sin_node = step.rope_cos, step.rope_sin
        self.mask_node, self.offset_node, self.extra_nodes = step.mask, step.offset, step.extras
        self.kv_nodes = step.kv
        self.cached_len_sym, self.attended_len_sym = step.cached_len_sym, step.attended_len_sym
        self._prebuilt = prebuilt
        self._base_cache = base_cache
        self._max_seq_len = max_seq_len
        self._n_layers = n_layers
        self._cache_dtype = cache_dtype
        self._shape_key = shape_key
        self._alloc_id = kv.alloc_id
        self._closed = False
        self.binding_epoch = 0
        self.capture: Capture | None = None
        self._wanted: dict[int, NodeId] = {}
        self._left_out: dict[NodeId, frozenset[NodeId]] = {}

    @property
    def optimized(self) -> OptimizedGraph:
        """Roots and generation of the optimized graph."""
        return self._prebuilt.optimized

    @property
    def effective_target(self) -> NodeId:
        """The device-to-host COPY of the logits: the root that a plain realization asks for."""
        return self._prebuilt.effective_target

    def wanted_node(self, want: int) -> NodeId:
        """The node to run up to: the logits for 0, else the shortest list that holds so many of the highest.

        Raises:
            InvalidInputError: the plan has no list of so many.

        """
        node = self._wanted.get(want)
        if node is None:
            node = top_k_node(self._step, want) if want else self.logits_node
            if node is None:
                raise InvalidInputError(f"this plan has no list of the {want} highest logits; read all of them")
            self._wanted[want] = node
        return node

    @property
    def max_seq_len(self) -> int:
        """Rows of the cache that the plan was built for."""
        return self._max_seq_len

    @property
    def alloc_id(self) -> KvAllocId:
        """The KV allocation that the plan binds."""
        return self._alloc_id

    @property
    def graph_node_count(self) -> int:
        """Nodes of the held graph; the same from the second token on."""
        return len(self._step.graph)

    @property
    def base_cache(self) -> StorageCache:
        """The storages of the plan's constants."""
        return self._base_cache

    @property
    def executable(self) -> Executable:
        """The kernels made ready."""
        if self._closed:
            raise ClosedError("this DecodeSession was closed; let the next step build a new one")
        return self._prebuilt.executable

    @property
    def location(self) -> DeviceLocation | None:
        """Where the KV storages that the plan binds are proven to live, or None."""
        places = {
            self._base_cache[node].location for pair in self.kv_nodes for node in pair if node in self._base_cache
        }
        return places.pop() if len(places) == 1 else None

    def per_token_sym_env(self, cached_len: int, token_count: int = 1) -> SymEnv:
        """The symbols of one step: `cached_len`, `attended_len` = cached_len + seq, and the number of real tokens.

        All are bound on either path. On the device-offset path none of them is read, on the SymEnv path `cached_len`
        drives the KV write: a binding that looks dead in one model is live in another.
        """
        env = SymEnv()
        env.bind(self.cached_len_sym, cached_len)
        env.bind(self.attended_len_sym, cached_len + self.seq)
        env.bind(self._step.token_count_sym, token_count)
        return env

    def validity_for(
        self, seq: int, max_seq_len: int, n_layers: int, cache_dtype: DType | str, shape_key: int, alloc_id: KvAllocId
    ) -> PlanValidity:
        """Whether the plan fits a step with these parameters; the only list of comparisons there is.

        Args:
            seq: tokens of the step.
            max_seq_len: rows of its cache.
            n_layers: layers of its cache.
            cache_dtype: element type of its cache, as `DType` or by name.
            shape_key: its model's key.
            alloc_id: its cache's allocation.

        """
        held = (self.seq, self._max_seq_len, self._n_layers, self._cache_dtype, self._shape_key)
        if held != (seq, max_seq_len, n_layers, DType(cache_dtype), shape_key) or self._closed:
            return PlanValidity.STALE
        return PlanValidity.VALID if alloc_id == self._alloc_id else PlanValidity.ALLOCATION_CHANGED

    def is_valid_for(
        self, seq: int, max_seq_len: int, n_layers: int, cache_dtype: DType | str, shape_key: int, alloc_id: KvAllocId
    ) -> bool:
        """`validity_for(...) is PlanValidity.VALID`, and nothing else."""
        return self.validity_for(seq, max_seq_len, n_layers, cache_dtype, shape_key, alloc_id) is PlanValidity.VALID

    def rebind_kv(self, source: KvRebindSource) -> RebindRefusal | None:
        """Point the plan at another KV allocation; None where that was done, else why not, with nothing changed.

        A re-bind makes every capture of this session stale. Structural validity is not checked again: call this only
        where `validity_for` answered ALLOCATION_CHANGED.
        """
        executable = self.executable
        checked = check_rebind(source, self.location, self.kv_nodes, self._base_cache)
        if isinstance(checked, RebindRefusal):
            return checked
        executable.rebind(checked)
        for node, storage in checked.items():
            self._base_cache[node] = storage
        self._alloc_id = source.alloc_id
        self.binding_epoch += 1
        return None

    def bind(self, data: DecodeTokenData) -> None:
        """Put a step's data into the storages that the plan binds.

        Raises:
            InvalidInputError: an array is missing or has the wrong shape.

        """
        step = self._step
        self._write(step.token_ids, "token_ids", data.token_ids)
        self._write(step.token_count, "token_count", np.array([data.token_count], np.uint32))
        self._write(step.rope_cos, "rope_cos", data.rope_cos)
        self._write(step.rope_sin, "rope_sin", data.rope_sin)
        if step.mask is not None:
            self._write(step.mask, "mask", data.mask)
        if step.offset is not None:
            self._write(step.offset, "offset", data.offset)
        for name, node in step.extras.items():
            self._write(node, name, data.extras.get(name))

    def realize_token(self, device: Device, data: DecodeTokenData, sym_env: SymEnv) -> NDArray[np.float32]:
        """Realize the held plan for one step, recorded anew; logits [rows, vocab] flat. Raises like `run`."""
        return cast(NDArray[np.float32], self.run(device, data, sym_env))

    def realize_top_k(self, device: Device, data: DecodeTokenData, sym_env: SymEnv, k: int) -> Candidates:
        """The same, but only the `k` highest logits are read. Raises like `run`."""
        return cast(Candidates, self.run(device, data, sym_env, k))

    def run(
        self,
        device: Device,
        data: DecodeTokenData,
        sym_env: SymEnv,
        want: int = 0,
        recordings: Sequence[Recording] | None = None,
    ) -> StepResult:
        """Bind a step's data, submit, and read what is wanted.

        Args:
            device: the plan's.
            data: what is bound.
            sym_env: the symbols; read only where a recording is made.
            want: 0 for the logits, else how many of the highest.
            recordings: what to submit; None for recordings made now.

        Raises:
            TopologyChanged: the graph was changed since it was optimized; drop the session.
            DeviceError: `device` is not the plan's.
            InvalidInputError: the plan has no list of so many, or the data do not fit it.

        """
        node = self.wanted_node(want)
        if device is not self._device:
            raise DeviceError(f"the plan was made for {self._device!r}, not for {device!r}")
        check_topology(self.graph, self.optimized)
        executable = self.executable
        self.bind(data)
        for recording in self.record(sym_env, want) if recordings is None else recordings:
            recording.submit()
        if not want:
            return executable.read(node)
        best = as_candidates(executable.read(node, 2 * want))
        if math.isfinite(best.logits[0]):
            return best
        row = executable.fetch(self.logits_node)
        return Candidates(np.arange(row.size), row)

    def record(
        self, sym_env: SymEnv, want: int, include: Callable[[Dispatch], bool] = lambda _: True
    ) -> list[Recording]:
        """Record the plan for what is wanted, without the lists of the highest logits that this is not for."""
        node = self.wanted_node(want)
        if node not in self._left_out:
            self._left_out[node] = left_out(self._step, node)
        out = self._left_out[node]
        return self.executable.record(sym_env, lambda one: one.node not in out and include(one), (node,))

    def _write(self, node: NodeId, name: str, values: NDArray[np.generic] | None) -> None:
        shape = self.graph.node(node).shape
        if values is None or values.shape != shape:
            found = "nothing" if values is None else f"shape {values.shape}"
            raise InvalidInputError(f"step data {name} needs shape {shape}, got {found}")
        # A constant that no kernel of this plan reads has no storage.
        if node in self._base_cache:
            self._base_cache[node].write(values)

    def close(self) -> None:
        """Give back the activations and let go of all storages."""
        if not self._closed:
            self._closed = True
            self.capture = None
            self._base_cache = StorageCache()
            self._prebuilt.executable.close()
