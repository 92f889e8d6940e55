"""The kernels that choose experts and add up what they give, against float64 numpy."""

from __future__ import annotations

import numpy as np

from vkdecode.doctor.dispatch import Wrong, error_of, floats, generator, normal, run_kernel, unset
from vkdecode.gpu import Device, Lanes

_WORKGROUP, _TOKENS, _COUNT, _EXPERTS, _USED, _COLUMNS = 64, 3, 2, 67, 5, 37
_NONE = np.uint32(0xFFFF_FFFF)

EXPERT_KEYS = ["route", "expert_sum"]


def check_experts(device: Device, lanes: Lanes, key: str) -> float:
    """Run one of them; the error relative to the largest value."""
    return _check_route(device, key) if key == "route" else _check_sum(device, key)


def _check_route(device: Device, key: str) -> float:
    """With ties; the last token is not one of the step's."""
    logits = np.asarray(np.round(normal(generator(key), _TOKENS, _EXPERTS) * 4) / 2, np.float32)
    buffers = {
        "x": logits,
        "token_count": np.array([_COUNT], np.uint32),
        "route": unset(_TOKENS, 2 * _USED, dtype=np.uint32),
    }
    worst = 0.0
    for normalized in (0, 1):
        spec = {"WORKGROUP": _WORKGROUP, "EXPERTS": _EXPERTS, "USED": _USED, "NORMALIZED": normalized}
        left = run_kernel(device, key, buffers, spec, (_TOKENS, 1, 1))["route"].reshape(_TOKENS, 2 * _USED)
        if (left[_COUNT:, :_USED] != _NONE).any():
            raise Wrong("a row behind the step's tokens names an expert")
        for token in range(_COUNT):
            chosen = np.lexsort((np.arange(_EXPERTS), -logits[token]))[:_USED]
            if (left[token, :_USED] != chosen).any():
                raise Wrong(f"the experts of token {token} are not those with the highest logits")
            shares = np.exp(logits[token].astype(np.float64))
            shares /= shares[chosen].sum() if normalized else shares.sum()
            worst = max(worst, error_of(floats(left[token, _USED:]), shares[chosen]))
    return worst


def _check_sum(device: Device, key: str) -> float:
    """With a shared expert and a residual."""
    rng = generator(key)
    x, weights = normal(rng, _TOKENS, _USED, _COLUMNS), normal(rng, _TOKENS, _USED)
    shared, gate, residual = normal(rng, _TOKENS, _COLUMNS), normal(rng, _TOKENS, 1), normal(rng, _TOKENS, _COLUMNS)
    route = np.zeros((_TOKENS, 2, _USED), np.uint32)
    route[:, 1] = weights.view(np.uint32)
    buffers = {"x": x, "route": route, "from_shared": shared, "shared_gate": gate, "residual": residual}
    spec = {"WORKGROUP": _WORKGROUP, "COLUMNS": _COLUMNS, "USED": _USED, "HAS_SHARED": 1, "HAS_RESIDUAL": 1}
    left = run_kernel(device, key, {**buffers, "y": unset(_TOKENS, _COLUMNS)}, spec, (1, _TOKENS, 1))["y"]
    expected = (weights[..., None].astype(np.float64) * x).sum(axis=1)
    expected += shared / (1 + np.exp(-gate.astype(np.float64))) + residual
    return error_of(floats(left), expected)
