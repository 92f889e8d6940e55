"""The parts that every architecture's step graph shares: inputs, KV caches, attention and the output.

An architecture's file reads as its forward pass; what is bound for each token and how rows reach the cache is said
here once.
"""

from __future__ import annotations

from dataclasses import replace

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.graph import AttentionAttrs, Graph, KvMoveAttrs, KvWriteAttrs, NodeId, SymId
from vkdecode.models.tensors import Part, TensorTable
from vkdecode.weights import DType


class StepBuilder:
    """A graph of one step under construction.

    Args:
        tensors: the model's tensors.
        options: room, logits, KV-offset path and attention arm.
        geometry: the KV cache that the step runs over.
        rotary_dim: dimensions of each head that RoPE turns.

    """

    def __init__(self, tensors: TensorTable, options: StepOptions, geometry: KvGeometry, rotary_dim: int) -> None:
        graph = Graph()
        pairs = (options.seq, geometry.head_dim // 2)
        self.graph = graph
        self.options = options
        self.tensors = tensors
        self._geometry = geometry
        self._rotary_dim = rotary_dim
        self._token_ids = graph.data("token_ids", (options.seq,), DType.U32)
        self._token_count = graph.data("token_count", (1,), DType.U32)
        self._cos = graph.data("rope_cos", pairs)
        self._sin = graph.data("rope_sin", pairs)
        on_device = options.kv_offset == "device"
        self._offset = graph.data("offset", (2,), DType.U32) if on_device else None
        self._mask = graph.data("mask", (geometry.max_seq_len,)) if options.arm == "masked" else None
        self._kv = tuple(
            (
                graph.kv(layer, 0, geometry.shape, geometry.dtype),
                graph.kv(layer, 1, geometry.shape, geometry.dtype),
            )
            for layer in range(geometry.num_layers)
        )
        self._extras: dict[str, NodeId] = {}
        self._effects: list[NodeId] = []
        self._cached_len = graph.symbol("cached_len")
        self._attended_len = graph.symbol("attended_len")
        self._token_count_sym = graph.symbol("token_count")

    def embed(self, name: str, vocab_size: int, hidden_size: int) -> NodeId:
        """Embeddings of this step's tokens, [seq, hidden_size]."""
        return self.graph.embed(self._token_ids, self.graph.weight(self.tensors.matrix(name, vocab_size, hidden_size)))

    def position_embedding(self, name: str, positions: int, hidden_size: int) -> NodeId:
        """Embeddings of this step's positions, [seq, hidden_size]."""
        at = self._extra("positions", (self.options.seq,), DType.U32)
        return self.graph.embed(at, self.graph.weight(self.tensors.matrix(name, positions, hidden_size)))

    def rms_norm(self, x: NodeId, name: str, epsilon: float, plus_one: bool = False) -> NodeId:
        """RMS norm with the weight of this name, or with 1 more."""
        weight = self.tensors.vector(name, self.graph.node(x).shape[1])
        return self.graph.rms_norm(x, self.graph.weight(replace(weight, plus_one=plus_one)), epsilon)

    def head_norm(self, x: NodeId, name: str, epsilon: float, plus_one: bool = False) -> NodeId:
        """RMS norm of each head of x by itself, with one weight for all."""
        head_dim = self._geometry.head_dim
        weight = self.graph.weight(replace(self.tensors.vector(name, head_dim), plus_one=plus_one))
        return self.graph.rms_norm(x, weight, epsilon, self.graph.node(x).shape[1] // head_dim)

    def layer_norm(self, x: NodeId, name: str, epsilon: float, bias: bool = True) -> NodeId:
        """Layer norm with `name.weight` and, unless it has none, `name.bias`."""
        size = self.graph.node(x).shape[1]
        weight = self.graph.weight(self.tensors.vector(f"{name}.weight", size))
        shift = self.graph.weight(self.tensors.vector(f"{name}.bias", size)) if bias else None
        return self.graph.layer_norm(x, weight, shift, epsilon)

    def linear(
        self, x: NodeId, name: str, rows: int, bias: bool = False, part: Part | None = None, transposed: bool = False
    ) -> NodeId:
        """Product with `name.weight` [rows, features of x], plus `name.bias` where asked.

        Args:
            x: what is multiplied.
            name: of the module.
            rows: features of the product.
            bias: whether it has one.
            part: which rows of the tensors these are, where they have others too or in another order.
            transposed: the file has the weight as [features of x, rows].

        """
        columns = self.graph.node(x).shape[1]
        weight = self.graph.weight(self.tensors.matrix(f"{name}.weight", rows, columns, part, transposed))
        shift = self.graph.weight(self.tensors.vector(f"{name}.bias", rows, part)) if bias else None
        return self.graph.linear(x, weight, shift)

    def route(self, logits: NodeId, used: int, normalized: bool) -> NodeId:
        """The experts that each token takes, from one logit for each; see `RouteAttrs`."""
        return self.graph.route(logits, self._token_count, used, normalized)

    def activation(self, x: NodeId, kind: str) -> NodeId:
        """`silu`, `gelu` or `gelu_tanh` of x."""
        return {"silu": self.graph.silu, "gelu": self.graph.gelu, "gelu_tanh": self.graph.gelu_tanh}[kind](x)

    def rope(self, x: NodeId, local: bool = False) -> NodeId:
        """Turn each head of x by this step's positions; `local` for the angles of windowed layers."""
        cos, sin, head_dim = self._cos, self._sin, self._geometry.head_dim
        if local:
            cos, sin = (self._extra(name, self.graph.node(cos).shape) for name in ("local_rope_cos", "local_rope_sin"))
        return self.graph.rope(x, cos, sin, self.graph.node(x).shape[1] // head_dim, head_dim, self._rotary_dim)

    def attention(
        self,
        layer: int,
        q: NodeId,
        k: NodeId,
        v: NodeId,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: NodeId | None = None,
    ) -> NodeId:
        """Causal attention over the layer's cache, into which this step's rows are put before.

        Args:
            layer: whose cache.
            q: queries [seq, heads * head_dim]; how many heads follows from it.
            k: keys [seq, kv_heads * head_dim].
            v: values, like `k`.
            scale: factor of the scores; None for 1 / sqrt(head_dim).
            window: how many positions a token sees, its own included; 0 for all.
            softcap: c where a score s becomes c tanh(s / c); 0 for none.
            sinks: for each head one more logit in the softmax's denominator, [heads].

        """
        graph, geometry, options = self.graph, self._geometry, self.options
        masked = self._mask is not None
        mask = self._extra("ages", (geometry.max_seq_len,)) if masked and window else self._mask
        cached_len: SymId | int | None = None
        attended_len: SymId | int | None = None
        if self._offset is None and not masked:
            cached_len, attended_len = self._cached_len, self._attended_len
        elif self._offset is None:  # a held recording cannot know the offset: this step's rows land behind all others
            cached_len, attended_len = geometry.max_seq_len, geometry.max_seq_len + options.seq
        heads, head_dim = geometry.num_key_value_heads, geometry.head_dim
        caches, count = self._kv[layer], self._token_count
        written = graph.kv_write(k, v, caches, count, KvWriteAttrs(heads, head_dim, cached_len), self._offset)
        attrs = AttentionAttrs(
            heads=graph.node(q).shape[1] // head_dim,
            kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            max_seq_len=geometry.max_seq_len,
            masked=masked,
            attended_len=attended_len,
            window=window,
            softcap=softcap,
            sinks=sinks is not None,
        )
        result = graph.attention(q, caches, written, count, attrs, mask, self._offset, sinks)
        if isinstance(cached_len, int):
            move = KvMoveAttrs(
                heads, head_dim, geometry.max_seq_len, options.seq, self._cached_len, self._token_count_sym
            )
            self._effects.append(graph.kv_move(caches, result, move))
        return result

    def wants_logits(self) -> bool:
        """Whether anyone reads this step's logits."""
        return self.options.logits != "none"

    def last_row(self, x: NodeId) -> NodeId:
        """Only the last real token's row, unless all logits are wanted or there is just one."""
        if self.options.logits == "all" or self.options.seq == 1:
            return x
        return self.graph.last_row(x, self._token_count)

    def finish(self, logits: NodeId) -> StepGraph:
        """The finished step; one without logits ends in a single row, which tells that it ran."""
        if not self.wants_logits():
            logits = self.last_row(logits)
        return StepGraph(
            self.graph,
            self.options.seq,
            logits,
            tuple(self._effects),
            self._token_ids,
            self._token_count,
            self._cos,
            self._sin,
            self._mask,
            self._offset,
            self._kv,
            self._cached_len,
            self._attended_len,
            self._token_count_sym,
            extras=self._extras,
        )

    def _extra(self, name: str, shape: tuple[int, ...], dtype: DType = DType.F32) -> NodeId:
        """A data constant that only some models have."""
        return self._extras.setdefault(name, self.graph.data(name, shape, dtype))
