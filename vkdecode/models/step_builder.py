"""The parts that every architecture's step graph shares: inputs, KV caches, attention and the output.

An architecture's file reads as its forward pass; what is bound for each token and how rows reach the cache is said
here once.
"""

from __future__ import annotations

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.graph import AttentionAttrs, Graph, KvWriteAttrs, NodeId
from vkdecode.models.tensors import TensorTable
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
        self._tensors = tensors
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
                graph.kv(layer, 0, geometry.slot_shape, geometry.dtype),
                graph.kv(layer, 1, geometry.slot_shape, geometry.dtype),
            )
            for layer in range(geometry.num_layers)
        )
        self._effects: list[NodeId] = []
        self._cached_len = graph.symbol("cached_len")
        self._attended_len = graph.symbol("attended_len")
        self._token_count_sym = graph.symbol("token_count")

    def embed(self, name: str, vocab_size: int, hidden_size: int) -> NodeId:
        """Embeddings of this step's tokens, [seq, hidden_size]."""
        return self.graph.embed(self._token_ids, self.graph.weight(self._tensors.matrix(name, vocab_size, hidden_size)))

    def rms_norm(self, x: NodeId, name: str, epsilon: float) -> NodeId:
        """RMS norm with the weight of this name."""
        size = self.graph.node(x).shape[1]
        return self.graph.rms_norm(x, self.graph.weight(self._tensors.vector(name, size)), epsilon)

    def layer_norm(self, x: NodeId, name: str, epsilon: float) -> NodeId:
        """Layer norm with `name.weight` and `name.bias`."""
        size = self.graph.node(x).shape[1]
        weight, bias = (self.graph.weight(self._tensors.vector(f"{name}.{part}", size)) for part in ("weight", "bias"))
        return self.graph.layer_norm(x, weight, bias, epsilon)

    def linear(self, x: NodeId, name: str, rows: int, bias: bool = False) -> NodeId:
        """Product with `name.weight` [rows, features of x], plus `name.bias` where asked."""
        weight = self.graph.weight(self._tensors.matrix(f"{name}.weight", rows, self.graph.node(x).shape[1]))
        return self.graph.linear(
            x, weight, self.graph.weight(self._tensors.vector(f"{name}.bias", rows)) if bias else None
        )

    def rope(self, x: NodeId, heads: int) -> NodeId:
        """Turn each head of x by this step's positions."""
        return self.graph.rope(x, self._cos, self._sin, heads, self._geometry.head_dim, self._rotary_dim)

    def attention(self, layer: int, q: NodeId, k: NodeId, v: NodeId, heads: int) -> NodeId:
        """Causal attention over the layer's cache and this step's rows, which are put into the cache afterwards."""
        graph, geometry, options = self.graph, self._geometry, self.options
        on_device = self._offset is not None
        attrs = AttentionAttrs(
            heads=heads,
            kv_heads=geometry.num_key_value_heads,
            head_dim=geometry.head_dim,
            scale=geometry.head_dim**-0.5,
            arm=options.arm,
            offset_on_device=on_device,
            attended_len=None if on_device else self._attended_len,
        )
        reads_offset = self._offset if options.arm == "bounded" else None
        result = graph.attention((q, k, v), self._kv[layer], self._token_count, attrs, self._mask, reads_offset)
        write = KvWriteAttrs(
            geometry.num_key_value_heads,
            geometry.head_dim,
            None if on_device else self._cached_len,
            self._token_count_sym,
        )
        for x, cache in zip((k, v), self._kv[layer], strict=True):
            self._effects.append(graph.kv_write(x, cache, result, write, self._offset, self._token_count))
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
        """The finished step."""
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
        )
