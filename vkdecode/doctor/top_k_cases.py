"""The kernels that choose the highest values of a row, with ties, at an odd size against a stable sort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkdecode.doctor.dispatch import Wrong, generator, normal, run_kernel, unset
from vkdecode.gpu import Device, Lanes

_COLUMNS, _WIDTH, _LENGTH = 1003, 16, 7
_BLOCKS = -(-_COLUMNS // (_WIDTH * _LENGTH))
_K = 40

GROUP_MAX_KEYS = ["group_max"]


def top_k_keys(form: str) -> list[str]:
    """The one kernel of this form."""
    return [f"top_k LANES={form}"]


def check_group_max(device: Device, lanes: Lanes, key: str) -> float:
    """The highest value of each group."""
    x = _row()
    spec = {"WORKGROUP": _WIDTH, "COLUMNS": _COLUMNS, "LENGTH": _LENGTH}
    buffers = {"x": x, "best": unset(_BLOCKS * _WIDTH, 2)}
    left = run_kernel(device, key, buffers, spec, (_BLOCKS, 1, 1))["best"]
    if (left.reshape(-1, 2) != _group_max(x)).any():
        raise Wrong("the highest values of the groups are not those of the row")
    return 0.0


def check_top_k(device: Device, lanes: Lanes, key: str) -> float:
    """The highest value alone, and the highest 40."""
    x = _row()
    workgroup = lanes.tile if lanes.form == "subgroup" else lanes.workgroup
    for k in (1, _K):
        spec = {"WORKGROUP": workgroup, "COLUMNS": _COLUMNS, "GROUPS": _BLOCKS * _WIDTH, "K": k}
        spec |= {"LISTED": max(4 * k, workgroup), "BLOCK": _WIDTH, "LENGTH": _LENGTH}
        left = run_kernel(device, key, {"x": x, "best": _group_max(x), "y": unset(k, 2)}, spec, (1, 1, 1))["y"]
        order = np.lexsort((np.arange(_COLUMNS), -x))[:k]
        if (left.reshape(-1, 2) != np.stack([order, x.view(np.uint32)[order]], axis=1)).any():
            raise Wrong(f"the {k} highest values are not those of the row")
    return 0.0


def _row() -> NDArray[np.float32]:
    # A coarse grid makes ties common.
    return np.asarray(np.round(normal(generator("top_k"), _COLUMNS) * 8) / 4, np.float32)


def _group_max(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Sort key and column of each group's highest value, [groups, 2]; keys rise with the value, zeros are equal."""
    bits = (x + np.float32(0)).view(np.uint32)
    keys = np.zeros(_BLOCKS * _LENGTH * _WIDTH, np.uint32)
    keys[:_COLUMNS] = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))
    columns = np.arange(keys.size).reshape(_BLOCKS, _LENGTH, _WIDTH)
    first = keys.reshape(columns.shape).argmax(axis=1)[:, None]
    at = np.take_along_axis(columns, first, axis=1).reshape(-1)
    return np.stack([keys[at], at.astype(np.uint32)], axis=1)
