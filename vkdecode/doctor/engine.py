"""Whole models through the engine: the tiny one against float64, and the user's own on every path."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode import KV_OFFSETS, DecodeMode, InferenceContext
from vkdecode.doctor import tiny_model
from vkdecode.doctor.report import FAULT, OK, Finding, Report
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model, load_model
from vkdecode.weights import open_weights

TOLERANCE = 2e-3
"""Difference of logits allowed against float32 weights in float64, absolute."""

_OWN_PROMPT, _OWN_TOKENS = 9, 4


def check_tiny(report: Report, device: Device) -> None:
    """The tiny model's prompt and decode logits on both KV-offset paths."""
    for kv_offset in KV_OFFSETS:
        report.run("golden model", f"offset by {kv_offset}", lambda path=kv_offset: _tiny(device, path))  # type: ignore[misc] # mypy does not infer a lambda's default


def _tiny(device: Device, kv_offset: str) -> Finding:
    with tempfile.TemporaryDirectory(prefix="vkdecode-doctor-") as folder:
        tiny_model.write_model(Path(folder))
        with closing(open_weights(folder)) as source:
            model = load_model(source, device)
    ids, split = tiny_model.TOKEN_IDS, tiny_model.PROMPT_TOKENS
    with model:
        got = logits_through(model, ids, split, DecodeMode(kv_offset=kv_offset), "all")
    return compared(got, tiny_model.logits_of(ids), TOLERANCE, f"{split} + {len(ids) - split} tokens")


def check_own(report: Report, device: Device, path: str) -> None:
    """Load a model and hold what it gives on both KV-offset paths against the step that is built anew."""
    held: list[Model] = []

    def loads() -> Finding:
        held.append(load(path, device=device))
        held_bytes = device.allocated_bytes
        return Finding(OK, f"{Path(path).name} is loaded", held_bytes / 2**20, "MiB")

    def agrees(kv_offset: str) -> Finding:
        ids = [(7 * i + 1) % held[0].vocab_size for i in range(_OWN_PROMPT + _OWN_TOKENS)]
        reference = logits_through(held[0], ids, _OWN_PROMPT, DecodeMode(rung="rebuild"))
        got = logits_through(held[0], ids, _OWN_PROMPT, DecodeMode(kv_offset=kv_offset))
        size = max(1.0, float(np.abs(reference).max()))
        return compared(got, reference.astype(np.float64), TOLERANCE * size, f"{len(ids)} tokens, against a rebuild")

    report.run("model", "load", loads)
    if held:
        with held[0]:
            for kv_offset in KV_OFFSETS:
                report.run("model", f"offset by {kv_offset}", lambda way=kv_offset: agrees(way))  # type: ignore[misc] # mypy does not infer a lambda's default


def logits_through(
    model: Model, ids: Sequence[int], split: int, mode: DecodeMode, logits: str = "last"
) -> NDArray[np.float32]:
    """Logits of a prompt of `split` tokens, after `all` or the `last` of them, and after each further token."""
    with closing(model.new_kv_cache(len(ids))) as kv, InferenceContext(model.device) as context:
        rows = [*np.atleast_2d(model.forward_with_kv_context_persistent(ids[:split], kv, context, mode, logits))]
        rows += [model.forward_with_kv_context_persistent([one], kv, context, mode) for one in ids[split:]]
        return np.stack(rows)


def compared(got: NDArray[np.float32], wanted: NDArray[np.float64], tolerance: float, what: str) -> Finding:
    """Whether all logits are within a tolerance."""
    with np.errstate(invalid="ignore"):
        difference = float(np.abs(got.astype(np.float64) - wanted).max())
    if difference <= tolerance:
        return Finding(OK, f"{what}: largest difference of a logit", difference)
    return Finding(FAULT, f"{what}: logits differ by {difference:.3g}, more than {tolerance:.3g}", difference)
