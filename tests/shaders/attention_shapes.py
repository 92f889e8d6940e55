"""Sizes at which the attention kernels are tested."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one dispatch: `room` tokens, of which the `counts` are real in turn; `workgroup` is the shared form's.

    `fused` puts q among columns that belong to others.
    """

    kv_heads: int
    group: int
    query_heads: int
    query_tokens: int
    head_dim: int
    max_seq: int
    room: int
    counts: tuple[int, ...]
    workgroup: int
    fused: bool
    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


# For each number of queries five shapes, with all head sizes. Any three neighbours hold a decode and a prefill step, so
# that each kernel meets both at some width; those of many queries serve prompts alone.
SHAPES = {
    1: [
        Shape(2, 1, 1, 1, 64, 13, 1, (1,), 4, False, 0.125),
        Shape(1, 5, 1, 1, 20, 37, 8, (5, 8), 16, True, 0.3),
        Shape(1, 7, 1, 1, 128, 17, 1, (1,), 64, True, 0.09),
        Shape(3, 1, 1, 1, 80, 21, 8, (3,), 8, False, 2.0),
        Shape(2, 3, 1, 1, 4, 19, 1, (1,), 8, False, 0.5),
    ],
    2: [
        Shape(2, 2, 2, 1, 64, 13, 1, (1,), 16, True, 2.0),
        Shape(3, 1, 1, 2, 20, 37, 8, (5, 8), 8, False, 0.3),
        Shape(1, 2, 2, 1, 4, 19, 8, (7,), 16, True, 0.5),
        Shape(1, 6, 2, 1, 80, 21, 1, (1,), 64, False, 0.11),
        Shape(1, 5, 1, 2, 128, 17, 24, (9,), 8, True, 0.09),
    ],
    3: [
        Shape(2, 3, 3, 1, 20, 13, 1, (1,), 16, False, 0.3),
        Shape(1, 6, 3, 1, 64, 37, 8, (5, 8), 64, True, 0.125),
        Shape(1, 3, 3, 1, 4, 19, 8, (1,), 4, False, 0.5),
        Shape(1, 3, 3, 1, 68, 17, 1, (1,), 8, True, 1.0),
        Shape(2, 3, 3, 1, 80, 21, 8, (3,), 16, False, 0.11),
    ],
    4: [
        Shape(2, 4, 4, 1, 64, 13, 1, (1,), 16, True, 0.125),
        Shape(1, 8, 4, 1, 20, 37, 8, (5, 8), 64, True, 0.3),
        Shape(2, 2, 2, 2, 4, 19, 8, (7,), 8, False, 0.5),
        Shape(1, 4, 4, 1, 128, 17, 1, (1,), 64, True, 0.09),
        Shape(1, 1, 1, 4, 80, 21, 16, (9,), 16, False, 2.0),
    ],
    8: [
        Shape(1, 8, 8, 1, 64, 13, 8, (5, 8), 0, True, 0.125),
        Shape(2, 1, 1, 8, 20, 37, 16, (9, 16), 0, False, 0.3),
        Shape(1, 2, 2, 4, 4, 19, 8, (7,), 0, True, 0.5),
        Shape(2, 4, 4, 2, 80, 21, 16, (3,), 0, False, 2.0),
        Shape(1, 5, 1, 8, 128, 17, 16, (11,), 0, True, 0.09),
    ],
    12: [
        Shape(1, 3, 3, 4, 64, 21, 16, (5, 16), 0, True, 0.125),
        Shape(1, 12, 12, 1, 20, 37, 8, (5, 8), 0, False, 0.3),
        Shape(2, 6, 6, 2, 4, 19, 8, (7,), 0, True, 0.5),
        Shape(1, 3, 3, 4, 128, 17, 16, (9,), 0, False, 0.09),
        Shape(2, 6, 3, 4, 80, 21, 8, (3,), 0, True, 2.0),
    ],
}
