"""Small graphs for tests of the optimizer: the patterns that fuse, with the parts that tests vary."""

from __future__ import annotations

from vkdecode.graph import AttentionAttrs, Graph, KvWriteAttrs, NodeId, WeightSpec
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
        """Attention over caches of layer 0."""
        on_device = kv_offset == "device"
        attrs = AttentionAttrs(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=0.5,
            arm=arm,
            offset_on_device=on_device,
            attended_len=None if on_device else self.symbol("attended_len"),
            sinks=sinks is not None,
        )
        mask = self.data("mask", (ROWS,)) if arm == "masked" else None
        offset = self.data("offset", (2,), DType.U32) if on_device and arm == "bounded" else None
        return self.attention((q, k, v), self.caches(), self.token_count(), attrs, mask, offset, sinks)

    def caches(self) -> tuple[NodeId, NodeId]:
        shape = (KV_HEADS, ROWS, HEAD_DIM)
        return self.kv(0, 0, shape, DType.F32), self.kv(0, 1, shape, DType.F32)

    def token_count(self) -> NodeId:
        return self.data("token_count", (1,), DType.U32)

    def write(self, x: NodeId, which: int, after: NodeId, kv_offset: str = "device") -> NodeId:
        """Put x into the K (0) or V (1) cache of layer 0."""
        on_device = kv_offset == "device"
        attrs = KvWriteAttrs(KV_HEADS, HEAD_DIM, None if on_device else self.symbol("cached_len"))
        offset = self.data("offset", (2,), DType.U32) if on_device else None
        return self.kv_write(x, self.caches()[which], after, attrs, offset, self.token_count())
