"""How often the loops of a kernel may turn: Mesa's CPU driver ends all loops of an invocation after 65,535 passes.

It does so without a sign, and ways out of a loop count too. Products are cut into more workgroups on every device;
attention cannot be, so the caches that it reads are bounded on such a driver.
"""

from __future__ import annotations

from vkdecode.errors import DeviceError
from vkdecode.gpu import DeviceInfo, Lanes
from vkdecode.weights.block_layout import PACK

MAX_PRODUCT_PASSES = 30_000
"""Passes that an invocation of linear.comp may take, with room to spare."""

_MAX_QUERIES = 4  # of a workgroup of attention.comp in the shared form
_MAX_ATTENTION_PASSES = 60_000  # over the rows of the cache; the rest is room to spare
_ATTENTION_WORKGROUP = 64


def linear_passes(chunks: int, workgroup: int, staged: int, lanes: Lanes, tokens: int) -> tuple[int, int]:
    """Loop passes of an invocation of linear.comp at most: before its first group, and in each group.

    A chunk takes at most six. The subgroup form reads x once before its groups, the shared form stages it in each and
    adds up the groups of lanes too.
    """
    measured = 2 * (1 + -(-chunks * PACK // (4 * workgroup)))
    inner = 6
    if lanes.form == "subgroup":
        return measured + chunks, 2 + chunks * inner
    split = workgroup // lanes.tile
    stages = -(-chunks * PACK // staged)
    per_stage = 3 + -(-staged // (4 * workgroup)) + -(-staged // (PACK * split)) * inner
    summed = tokens * (1 + split)
    return measured + tokens * 2 * (1 + workgroup.bit_length()), 2 + stages * per_stage + summed


def attention_workgroup(lanes: Lanes) -> int:
    """Invocations of a workgroup of attention.comp."""
    return lanes.tile if lanes.form == "subgroup" else min(_ATTENTION_WORKGROUP, lanes.workgroup)


def max_cached_rows(lanes: Lanes, head_dim: int) -> int:
    """Rows of a KV cache that attention.comp gets through before Mesa's CPU driver would end its loops."""
    workgroup, words = attention_workgroup(lanes), head_dim // 4
    if lanes.form == "subgroup":
        each = 1 + 1 + -(-words // workgroup)
    else:
        parts = max(workgroup // words, 1)
        reductions = _MAX_QUERIES * (1 + workgroup.bit_length())
        each = 1 + (1 + words) + reductions + (1 + -(-workgroup // parts))
    return _MAX_ATTENTION_PASSES // each * workgroup


def check_cached_rows(info: DeviceInfo, lanes: Lanes, head_dim: int, max_seq_len: int, rows: int) -> None:
    """Refuse a cache that attention would read only the beginning of; `rows` counts the landing rows too.

    Raises:
        DeviceError: the device is a CPU driver and the cache is longer; the longest length is named.

    """
    most = max_cached_rows(lanes, head_dim)
    if info.kind == "cpu" and rows > most:
        raise DeviceError(
            f"a KV cache of {max_seq_len} rows is too long for device {info}: CPU drivers end the loops of a kernel "
            f"before attention has read them all; use max_seq_len up to {most - (rows - max_seq_len)}, or a GPU"
        )
