"""Devices and models that exist as numbers only, for tests of what is planned or refused before any upload."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from vkdecode.gpu import Device, DeviceInfo, DeviceLocation, Lanes, Limits, largest_buffer, shared_lanes
from vkdecode.models import Model
from vkdecode.runtime import WeightStore
from vkdecode.weights import DType, TensorInfo, WeightSource

SMALLEST: dict[str, Any] = {
    "max_storage_buffer_range_bytes": 1 << 27,
    "max_memory_allocation_bytes": 1 << 30,
    "max_memory_allocation_count": 4096,
    "max_compute_work_group_count": (65535, 65535, 65535),
    "max_compute_work_group_size": (128, 128, 64),
    "max_compute_work_group_invocations": 128,
    "max_compute_shared_memory_bytes": 16384,
    "max_push_constants_bytes": 128,
    "max_storage_buffers_per_stage": 4,
}
"""The least that Vulkan 1.1 requires of a device (specification, "Required Limits")."""

ROOMY = Limits(
    max_storage_buffer_range_bytes=(1 << 32) - 1,
    max_memory_allocation_bytes=1 << 32,
    max_memory_allocation_count=1 << 32,
    max_compute_work_group_count=((1 << 31) - 1, 65535, 65535),
    max_compute_work_group_size=(1024, 1024, 64),
    max_compute_work_group_invocations=1024,
    max_compute_shared_memory_bytes=49152,
    max_push_constants_bytes=256,
    max_storage_buffers_per_stage=1 << 20,
)
GPU = DeviceInfo(0, "Made-Up 9000", "AMD", "discrete", "none", "1.3.0", 64 << 30, ((64 << 30, True),), 32, True, ROOMY)
SUBGROUPS = Lanes("subgroup", 8, 8, 8, 4, 16, 8)


def gpu(heap_bytes: int = 64 << 30, **limits: Any) -> DeviceInfo:
    """The made-up GPU with these limits."""
    return replace(GPU, heap_bytes=heap_bytes, limits=replace(ROOMY, **limits))


class MadeUpDevice:
    """What planning asks of a device. Allocating on it is a fault."""

    def __init__(self, info: DeviceInfo, lanes: Lanes | None = None) -> None:
        self.info = info
        self.location = DeviceLocation("vulkan", 0)
        self.lock = threading.RLock()
        self.closed = False
        self.free_bytes = info.heap_bytes
        self.free_allocations = info.limits.max_memory_allocation_count
        self.largest_buffer_bytes = largest_buffer(info)
        self.lanes = lanes or shared_lanes(info)

    def allocate(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("something was allocated")

    allocate_parts = allocate


class MadeUpSource:
    """A model file's headers."""

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: DType) -> None:
        self.path = Path("made-up")
        self.config = config
        self._infos = {name: TensorInfo(name, shape, dtype, dtype.value) for name, shape in shapes.items()}

    def names(self) -> Sequence[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]


class PlannedStore(WeightStore):
    """A weight store that uploads nothing."""

    def load(self, *_: object, **__: object) -> None:
        pass


def planned_model(
    monkeypatch: Any,
    info: DeviceInfo,
    source: MadeUpSource | None = None,
    lanes: Lanes | None = None,
    weights: DType | None = None,
) -> Model:
    """A model as it is when it was planned and would be uploaded."""
    monkeypatch.setattr("vkdecode.models.model.WeightStore", PlannedStore)
    device = cast(Device, MadeUpDevice(info, lanes))
    return Model(cast(WeightSource, source or llama_8b()), device, weights)


def llama_8b(dtype: DType = DType.F16, **config: Any) -> MadeUpSource:
    """The shapes of Llama 3 8B, or others."""
    c: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        **config,
    }
    head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    heads, kv = (c[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c["vocab_size"], hidden),
    }
    for layer in range(c["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("post_attention_layernorm", (hidden,)),
                ("self_attn.q_proj", (heads, hidden)),
                ("self_attn.k_proj", (kv, hidden)),
                ("self_attn.v_proj", (kv, hidden)),
                ("self_attn.o_proj", (hidden, heads)),
                ("mlp.gate_proj", (inner, hidden)),
                ("mlp.up_proj", (inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
            )
        }
    return MadeUpSource(c, shapes, dtype)


def smollm2(layers: int = 30, dtype: DType = DType.F16) -> MadeUpSource:
    """The shapes of SmolLM2 135M."""
    source = llama_8b(
        dtype,
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    shapes = {name: source.info(name).shape for name in source.names() if name != "lm_head.weight"}
    return MadeUpSource(source.config, shapes, dtype)


def phi_2(dtype: DType = DType.F16, layers: int = 32) -> MadeUpSource:
    """The shapes of Phi 2."""
    c: dict[str, Any] = {
        "model_type": "phi",
        "vocab_size": 51_200,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.4,
        "hidden_act": "gelu_new",
    }
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    matrices = {"model.embed_tokens": (c["vocab_size"], hidden)}
    linears = {"lm_head": (c["vocab_size"], hidden)}
    norms = ["model.final_layernorm"]
    for layer in range(c["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norms.append(f"{name}.input_layernorm")
        linears |= {f"{name}.self_attn.{one}": (hidden, hidden) for one in ("q_proj", "k_proj", "v_proj", "dense")}
        linears |= {f"{name}.mlp.fc1": (inner, hidden), f"{name}.mlp.fc2": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in {**matrices, **linears}.items()}
    shapes |= {f"{name}.bias": (shape[0],) for name, shape in linears.items()}
    shapes |= {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
    return MadeUpSource(c, shapes, dtype)


def mixtral_8x7b(layers: int = 32) -> MadeUpSource:
    """The shapes of Mixtral 8x7B."""
    dense = llama_8b(vocab_size=32_000, num_hidden_layers=layers)
    shapes = {name: dense.info(name).shape for name in dense.names() if ".mlp." not in name}
    hidden, inner = dense.config["hidden_size"], dense.config["intermediate_size"]
    for layer in range(layers):
        name = f"model.layers.{layer}.block_sparse_moe"
        shapes[f"{name}.gate.weight"] = (8, hidden)
        for expert in range(8):
            shapes |= {f"{name}.experts.{expert}.{part}.weight": (inner, hidden) for part in ("w1", "w3")}
            shapes[f"{name}.experts.{expert}.w2.weight"] = (hidden, inner)
    return MadeUpSource({**dense.config, "model_type": "mixtral"}, shapes, DType.F16)
