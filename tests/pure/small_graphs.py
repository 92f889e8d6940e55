"""Small graphs for tests of the optimizer: the patterns that fuse, with the parts that tests vary."""

from __future__ import annotations

from vkdecode.graph import AttentionAttrs, Graph, KvWriteAttrs, NodeId, SymId, WeightSpec
from vkdecode.weights import DType

HIDDEN = 16
HEADS, KV_HEADS, HEAD_DIM, ROWS = 4, 2, 8, 12


class SmallGraph(Graph):
    """A graph with short ways to make what the patterns are made of."""

    def hidden(self, name: str = "x", features: int = HIDDEN) -> NodeId:
        return self.silu(self.data(name, (1, features)))

    def matrix(self, name: str, rows: int, columns: int = HIDDEN, dtype: DType = DType.F16) -> NodeId:
        return self.weight(WeightSpec((name,), (rows,), columns, dtype))

    def vector(self, name: str, size: int) -> NodeId:
        return self.weight(WeightSpec((name,), (size,), 1, DType.F32, vector=True))

    def product(self, x: NodeId, name: str, rows: int = HIDDEN, dtype: DType = DType.F16, bias: bool = False) -> NodeId:
        columns = self.node(x).shape[1]
        return self.linear(
            x, self.matrix(name, rows, columns, dtype), self.vector(f"{name}.bias", rows) if bias else None
        )

    def norm(self, x: NodeId, name: str = "norm") -> NodeId:
        return self.rms_norm(x, self.vector(name, self.node(x).shape[1]), 1e-5)

    def angles(self) -> tuple[NodeId, NodeId]:
        return self.data("cos", (1, HEAD_DIM // 2)), self.data("sin", (1, HEAD_DIM // 2))

    def turned(self, x: NodeId, heads: int, rotary_dim: int = HEAD_DIM) -> NodeId:
        return self.rope(x, *self.angles(), heads, HEAD_DIM, rotary_dim)

    def attend(
        self,
        q: NodeId,
        k: NodeId,
        v: NodeId,
        kv_offset: str = "device",
        arm: str = "bounded",
        sinks: NodeId | None = None,
    ) -> NodeId:
        """Attention over the caches of layer 0, behind the write of k and v."""
        masked = arm == "masked"
        written = self.written(k, v, kv_offset, arm)
        attended: SymId | int | None = None
        if kv_offset == "symenv":
            attended = ROWS + 1 if masked else self.symbol("attended_len")
        attrs = AttentionAttrs(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=0.5,
            max_seq_len=ROWS,
            masked=masked,
            attended_len=attended,
            sinks=sinks is not None,
        )
        mask = self.data("mask", (ROWS,)) if masked else None
        return self.attention(q, self.caches(), written, self.token_count(), attrs, mask, self.offset(kv_offset), sinks)

    def written(self, k: NodeId, v: NodeId, kv_offset: str = "device", arm: str = "bounded") -> NodeId:
        """Put k and v into the caches of layer 0."""
        first: SymId | int | None = None
        if kv_offset == "symenv":
            first = ROWS if arm == "masked" else self.symbol("cached_len")
        attrs = KvWriteAttrs(KV_HEADS, HEAD_DIM, first)
        return self.kv_write(k, v, self.caches(), self.token_count(), attrs, self.offset(kv_offset))

    def caches(self) -> tuple[NodeId, NodeId]:
        shape = (KV_HEADS, 2 * ROWS, HEAD_DIM)
        return self.kv(0, 0, shape, DType.F32), self.kv(0, 1, shape, DType.F32)

    def token_count(self) -> NodeId:
        return self.data("token_count", (1,), DType.U32)

    def offset(self, kv_offset: str) -> NodeId | None:
        return self.data("offset", (2,), DType.U32) if kv_offset == "device" else None

    def write_of(self, attention: NodeId) -> NodeId:
        """What wrote the rows that an attention reads."""
        return self.node(attention).inputs[3]
