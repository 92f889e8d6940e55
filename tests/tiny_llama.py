"""The tiny Llama checkpoints for tests: files, references, step graphs without a device, and changed copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.gpu import DeviceLocation, Lanes
from vkdecode.graph import FUSIONS, Graph, OptimizedGraph, optimize_graph, splice_host_copy
from vkdecode.models.llama import build_step, parse_config, rope
from vkdecode.models.tensors import TensorTable
from vkdecode.runtime import WORK_PER_SUBMISSION, Plan, lower
from vkdecode.weights import DType, open_weights

TINY = Path(__file__).with_name("data") / "tiny"
NAMES = (
    "llama",
    "llama-bias-headdim",
    "llama-rope-linear",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "llama-tied-mqa",
)
PATHS = (("device", "bounded"), ("device", "masked"), ("symenv", "masked"), ("symenv", "bounded"))
LANES = {"subgroup": Lanes("subgroup", 8, 8, 8, 4, 16, 8), "shared": Lanes("shared", 8, 256, 64, 4, 8, 8)}
LOCATION = DeviceLocation("vulkan", 0)

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Golden:
    """One checkpoint's reference: a prompt in one pass, then tokens one at a time."""

    input_ids: NDArray[np.int64]
    logits: Logits
    decode_ids: NDArray[np.int64]
    decode_logits: Logits


def golden(name: str) -> Golden:
    with np.load(TINY / name / "expected.npz") as arrays:
        return Golden(**{key: arrays[key] for key in ("input_ids", "logits", "decode_ids", "decode_logits")})


def step_graph(
    name: str = "llama", options: StepOptions | None = None, max_seq_len: int = 40, dtype: DType = DType.F32
) -> StepGraph:
    """The unoptimized step graph of a checkpoint, made without a device."""
    source = open_weights(TINY / name)
    try:
        config = parse_config(source.config)
        geometry = KvGeometry(config.num_hidden_layers, config.num_key_value_heads, max_seq_len, config.head_dim, dtype)
        rotary_dim = rope(source.config, config).rotary_dim
        options = options or StepOptions(1, "last", "device", "bounded")
        return build_step(config, TensorTable(source), rotary_dim, options, geometry)
    finally:
        source.close()


def planned(
    name: str = "llama",
    options: StepOptions | None = None,
    lanes: str = "subgroup",
    fused: bool = True,
    work: int = WORK_PER_SUBMISSION,
    max_buffer_bytes: int = 1 << 30,
) -> tuple[Graph, OptimizedGraph, Plan]:
    """The optimized graph of a step and its plan, as an `InferenceContext` makes them."""
    step = step_graph(name, options)
    target = splice_host_copy(step.graph, step.logits)
    fusions = FUSIONS if fused else ()
    optimized = optimize_graph(step.graph, (target, *step.effects), LOCATION, fusions=fusions)
    return step.graph, optimized, lower(step.graph, optimized, LANES[lanes], max_buffer_bytes, work)


def changed_copy(
    folder: Path,
    name: str = "llama",
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
) -> Path:
    """A copy of an unsharded checkpoint with other config values and tensors; None takes one out."""
    shutil.copytree(TINY / name, folder)
    path = folder / "config.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    held.update(config or {})
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not None}), encoding="utf-8")
    if tensors:
        weights = folder / "model.safetensors"
        arrays = {**load_file(weights), **tensors}
        save_file({key: value for key, value in arrays.items() if value is not None}, weights)
    return folder
