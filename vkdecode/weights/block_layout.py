"""Block formats in the order that the kernels read; pure numpy, the counterpart of `shaders/blocks.glsl`.

A device block is one or two blocks of the file (two where one would not fill whole words): first its scales, then the
integers of all its chunks of 32 columns as planes of low bits, then those of high bits. Only K-quants move bits; the
others move whole fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkdecode.weights.dtypes import DType

Bytes = NDArray[np.uint8]
Fields = tuple[Bytes, Bytes, Bytes | None]
"""Scale words, low plane and high plane as bytes: [n, 4 * scale words], [n, parts, 4 * bits]."""

PACK = 32
"""Columns of a chunk."""


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a device block: chunks in it, words of scales, and bits of an integer in each plane."""

    parts: int
    scale_words: int
    low_bits: int
    high_bits: int
    split: Callable[[Bytes], Fields]

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.parts * PACK

    @property
    def words(self) -> int:
        """32-bit words of a block."""
        return self.scale_words + self.parts * (self.low_bits + self.high_bits)


def block_words(raw: Bytes, dtype: DType) -> NDArray[np.uint32]:
    """Rows as files store them, uint8 [n, bytes], as device blocks, uint32 [n, blocks, words]."""
    layout = BLOCK_LAYOUTS[dtype]
    together = layout.columns // dtype.block_columns
    rows, stored = raw.shape[0], raw.shape[1] // dtype.block_bytes
    blocks = -(-stored // together)
    if blocks * together != stored:
        padded = np.zeros((rows, blocks * together * dtype.block_bytes), np.uint8)
        padded[:, : raw.shape[1]] = raw
        raw = padded
    scales, low, high = layout.split(np.ascontiguousarray(raw).reshape(rows * blocks, together * dtype.block_bytes))
    out = np.empty((rows * blocks, 4 * layout.words), np.uint8)
    start = 4 * layout.scale_words
    out[:, :start] = scales
    middle = start + 4 * layout.parts * layout.low_bits
    out[:, start:middle] = low.reshape(rows * blocks, -1)
    if high is not None:
        out[:, middle:] = high.reshape(rows * blocks, -1)
    return out.view(np.uint32).reshape(rows, blocks, layout.words)


def _fields(*sizes: int) -> Callable[[Bytes], list[Bytes]]:
    """A function that cuts the file's blocks [n, bytes] into fields of these sizes."""
    edges = np.cumsum(sizes)[:-1].tolist()

    def cut(blocks: Bytes) -> list[Bytes]:
        return np.split(blocks, edges, axis=-1)

    return cut


def _pairs(cut: Callable[[Bytes], list[Bytes]]) -> Callable[[Bytes], Fields]:
    """Two blocks of 32 columns: their scales share a word."""

    def split(blocks: Bytes) -> Fields:
        scale, *planes = cut(blocks.reshape(blocks.shape[0], 2, -1))
        return scale.reshape(-1, 4), planes[-1], planes[0] if len(planes) == 2 else None

    return split


def _single(cut: Callable[[Bytes], list[Bytes]]) -> Callable[[Bytes], Fields]:
    """A block of 32 columns with a scale and an offset in one word."""

    def split(blocks: Bytes) -> Fields:
        scale, *planes = cut(blocks)
        return scale, planes[-1], planes[0] if len(planes) == 2 else None

    return split


def _low_nibbles(qs: Bytes) -> Bytes:
    """Q4_K and Q5_K: a byte holds columns 32 apart; here, as in Q4_0, 16 apart."""
    halves = qs.reshape(-1, 4, 2, 16)
    out = np.empty((halves.shape[0], 4, 2, 16), np.uint8)
    out[:, :, 0] = halves[:, :, 0] & 15 | halves[:, :, 1] << 4
    out[:, :, 1] = halves[:, :, 0] >> 4 | halves[:, :, 1] & 0xF0
    return out.reshape(-1, 8, 16)


def _bit_plane(masks: Bytes) -> Bytes:
    """Bit c of byte b is column 32 c + b; here bit j of chunk c's word is its column j."""
    bits = masks[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return np.packbits(bits, axis=-1, bitorder="little")


def _two_bits(qs: Bytes) -> Bytes:
    """Field s of byte b of each 32 bytes is column 32 s + b of 128; here fields of a byte are 8 columns apart."""
    fields = qs.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    four = fields.reshape(-1, 8, 4, 8)
    return np.asarray(four[:, :, 0] | four[:, :, 1] << 2 | four[:, :, 2] << 4 | four[:, :, 3] << 6, np.uint8)


def _split_q2_k(blocks: Bytes) -> Fields:
    scales, qs, d = _fields(16, 64, 4)(blocks)
    return np.concatenate([d, scales], axis=1), _two_bits(qs), None


def _split_q3_k(blocks: Bytes) -> Fields:
    hmask, qs, scales, d = _fields(32, 64, 12, 2)(blocks)
    # The file has scales 0 to 7 in the low and 8 to 15 in the high nibbles of 8 bytes, and the two top bits of scale 4
    # f + b in field f of byte b; here scale i stands in nibble and field i.
    first, top = scales[:, :8], scales[:, 8:]
    nibbles = np.concatenate([first & 15, first >> 4], axis=1)
    low = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    fields = np.concatenate([top >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1, 4, 4)
    high = fields[:, :, 0] | fields[:, :, 1] << 2 | fields[:, :, 2] << 4 | fields[:, :, 3] << 6
    zero = np.zeros_like(d)
    return np.concatenate([d, zero, low, high], axis=1), _two_bits(qs), _bit_plane(hmask)


def _scales_and_minima(scales: Bytes) -> Bytes:
    """The eight 6-bit scales and minima of Q4_K and Q5_K, unpacked: a byte of each in turn."""
    d, m, both = scales[:, :4], scales[:, 4:8], scales[:, 8:]
    out = np.empty((scales.shape[0], 8, 2), np.uint8)
    out[:, :4, 0] = d & 0x3F
    out[:, :4, 1] = m & 0x3F
    out[:, 4:, 0] = both & 0x0F | d >> 2 & 0x30
    out[:, 4:, 1] = both >> 4 | m >> 2 & 0x30
    return out.reshape(-1, 16)


def _split_q4_k(blocks: Bytes) -> Fields:
    d, scales, qs = _fields(4, 12, 128)(blocks)
    return np.concatenate([d, _scales_and_minima(scales)], axis=1), _low_nibbles(qs), None


def _split_q5_k(blocks: Bytes) -> Fields:
    d, scales, qh, qs = _fields(4, 12, 32, 128)(blocks)
    return np.concatenate([d, _scales_and_minima(scales)], axis=1), _low_nibbles(qs), _bit_plane(qh)


def _split_q6_k(blocks: Bytes) -> Fields:
    ql, qh, scales, d = _fields(128, 64, 16, 2)(blocks)
    halves = ql.reshape(-1, 2, 2, 2, 16)  # half, columns 32 apart, columns 16 apart
    low = np.empty((halves.shape[0], 2, 2, 2, 16), np.uint8)
    low[:, :, 0] = halves[:, :, :, 0] & 15 | halves[:, :, :, 1] << 4
    low[:, :, 1] = halves[:, :, :, 0] >> 4 | halves[:, :, :, 1] & 0xF0
    return np.concatenate([d, np.zeros_like(d), scales], axis=1), low.reshape(-1, 8, 16), _two_bits(qh)


BLOCK_LAYOUTS = {
    DType.Q4_0: BlockLayout(2, 1, 4, 0, _pairs(_fields(2, 16))),
    DType.IQ4_NL: BlockLayout(2, 1, 4, 0, _pairs(_fields(2, 16))),
    DType.Q4_1: BlockLayout(1, 1, 4, 0, _single(_fields(4, 16))),
    DType.Q5_0: BlockLayout(2, 1, 4, 1, _pairs(_fields(2, 4, 16))),
    DType.Q5_1: BlockLayout(1, 1, 4, 1, _single(_fields(4, 4, 16))),
    DType.Q8_0: BlockLayout(2, 1, 8, 0, _pairs(_fields(2, 32))),
    DType.Q2_K: BlockLayout(8, 5, 2, 0, _split_q2_k),
    DType.Q3_K: BlockLayout(8, 4, 2, 1, _split_q3_k),
    DType.Q4_K: BlockLayout(8, 5, 4, 0, _split_q4_k),
    DType.Q5_K: BlockLayout(8, 5, 4, 1, _split_q5_k),
    DType.Q6_K: BlockLayout(8, 5, 4, 2, _split_q6_k),
}
"""What a device holds for each block format."""
