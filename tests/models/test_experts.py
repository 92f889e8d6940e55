"""Families with routed experts: options that no reference uses, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_files import convert_tiny
from numpy.typing import NDArray
from safetensors.numpy import load_file
from stepping import Logits, furthest, taken
from test_split_weights import small_buffers
from tiny_llama import TINY, changed_copy, golden

from vkdecode.bench import SyntheticSource
from vkdecode.decode import InferenceContext
from vkdecode.errors import DeviceError, UnsupportedModelError
from vkdecode.gpu import Device, lanes_of
from vkdecode.graph import Graph
from vkdecode.loading import load
from vkdecode.models import load_model
from vkdecode.runtime.kernels import choose_kernel
from vkdecode.weights import DType
from vkdecode.weights.jsonfile import read_json_object

MIXTURES = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")


def all_logits(folder: Path, device: Device, name: str) -> Logits:
    with load(folder, device=device) as model, closing(model.new_kv_cache(24)) as kv:
        return model.forward(golden(name).input_ids, kv, "all")


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("dense", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_a_layer_without_experts_is_one_whose_experts_are_all_alike(
    tmp_path: Path, device: Device, name: str, dense: Mapping[str, Any]
) -> None:
    """Where weights add up to 1, equal experts are one MLP. The shared one is closed by its gate."""
    layer = 0 if "decoder_sparse_step" in dense else 1
    mlp, parts = f"model.layers.{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
    first = load_file(TINY / name / "model.safetensors")
    one = {part: first[f"{mlp}.experts.2.{part}.weight"] for part in parts}
    alike: dict[str, NDArray[Any] | None] = {
        f"{mlp}.experts.{expert}.{part}.weight": one[part] for expert in range(4) for part in parts
    }
    if name == "qwen2_moe":
        alike[f"{mlp}.shared_expert.down_proj.weight"] = np.zeros((64, 64), np.float32)
    changes: dict[str, NDArray[Any] | None] = {key: None for key in first if key.startswith(mlp)}
    changes |= {f"{mlp}.{part}.weight": one[part] for part in parts}
    normalized = {"norm_topk_prob": True}
    equal = changed_copy(tmp_path / "alike", name, normalized, alike)
    config = {**normalized, **dense, "intermediate_size": 48}
    plain = changed_copy(tmp_path / "dense", name, config, changes)
    assert furthest(all_logits(equal, device, name), all_logits(plain, device, name)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt_oss", "q8_0"), ("mixtral", "bf16"), ("qwen2_moe", "bf16"), ("qwen3_moe", "q8_0")]
)
def test_experts_may_be_held_as_other_types(device: Device, name: str, dtype: str) -> None:
    """Rounding moves the logits a little, and far where it makes a token take another expert, which is seldom."""
    reference = golden(name)
    with load(TINY / name, device=device, weights=dtype) as model, closing(model.new_kv_cache(24)) as kv:
        held = {spec.dtype.value for spec in model.weight_specs() if spec.experts and not spec.vector}
        assert held <= {dtype, "f16"}
        off = np.abs(model.forward(reference.input_ids, kv, "all") - reference.logits)
        assert 1e-5 < np.median(off) < 0.04


def test_a_file_of_blocks_keeps_the_experts_as_stored(tmp_path: Path, device: Device) -> None:
    with load(convert_tiny(tmp_path / "m.gguf", TINY / "mixtral", "Q8_0"), device=device) as model:
        stacks = [spec for spec in model.weight_specs() if spec.experts]
    assert {spec.dtype.value for spec in stacks} == {"q8_0"}


def test_experts_that_are_stored_differently_are_refused(tmp_path: Path, device: Device) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    odd = load_file(TINY / "mixtral" / "model.safetensors")[name].astype(ml_dtypes.bfloat16)
    folder = changed_copy(tmp_path / "m", "mixtral", tensors={name: odd})
    with pytest.raises(UnsupportedModelError, match=r"experts\.3\.w2\.weight as bf16; .* must be stored alike"):
        load(folder, device=device)


def test_a_stack_that_no_buffer_holds_is_refused_with_both_numbers() -> None:
    stack = r"experts\.0\.w1\.weight to .*experts\.3\.w3\.weight, 8 tensors.*196608 .*150000"
    with small_buffers("subgroup", 150_000) as device:
        with pytest.raises(DeviceError, match=stack):
            load(TINY / "mixtral", device=device)
        assert device.allocated_bytes == 0


@pytest.mark.parametrize("name", MIXTURES)
def test_a_layer_takes_eight_dispatches(device: Device, name: str) -> None:
    """With norms of heads, or with a shared expert and its gate, it takes two or three more."""
    more = {"qwen3_moe": {"norm": 1, "kv_write": 1}, "qwen2_moe": {"linear": 3}}.get(name, {})
    with (
        load(TINY / name, device=device) as model,
        closing(model.new_kv_cache(8)) as kv,
        InferenceContext(device) as one,
    ):
        model.forward_with_kv_context_persistent([3], kv, one)
        session = taken(one)
        kernels = Counter(dispatch.kernel.key.split()[0] for dispatch in session.executable.plan.dispatches)
        session.close()
    kernels -= Counter(group_max=1, top_k=2)  # for candidates, whatever the model
    layer = Counter(linear=5, attention=1, route=1, expert_sum=1) + Counter(more)
    assert kernels == Counter({key: 2 * count for key, count in layer.items()}) + Counter(embed=1, linear=1)


def test_more_experts_than_the_kernel_ranks_are_refused(device: Device) -> None:
    graph = Graph()
    logits = graph.data("logits", (1, 1025))
    route = graph.route(logits, graph.data("token_count", (1,), DType.U32), 2, True)
    with pytest.raises(UnsupportedModelError, match="1025 experts are not supported; 1024 are the most"):
        choose_kernel(graph, route, lanes_of(device))


@pytest.mark.parametrize("name", MIXTURES)
def test_made_up_weights_of_any_of_them_run(device: Device, name: str) -> None:
    source = SyntheticSource(name, read_json_object(TINY / name / "config.json"))
    with load_model(source, device, open_source=lambda: source) as model, closing(model.new_kv_cache(8)) as kv:
        assert np.isfinite(model.forward([1, 2, 3], kv)).all()
