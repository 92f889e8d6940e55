"""What a model is before its weights are on a device: its config, the steps it can run, and the memory they take."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode import (
    KvGeometry,
    MemoryReport,
    StepGraph,
    StepOptions,
    make_shape_key,
    memory_report,
    new_model_instance_id,
    plan_load,
)
from vkdecode.errors import InvalidInputError
from vkdecode.gpu import Device
from vkdecode.graph import WeightSpec
from vkdecode.models.config import DecoderConfig
from vkdecode.models.registry import architecture_of
from vkdecode.models.rope import RopeRows
from vkdecode.models.tensors import TensorTable
from vkdecode.weights import DType, WeightSource


class ModelPlan:
    """A model's config and steps for a device; nothing is allocated, and nothing held against the device's limits.

    Attributes: `config` (the architecture's dataclass), `device`, `shape_key`, `path`, `load_plan`.

    Args:
        source: the open files; read now, and not needed afterwards.
        device: whose limits and kernel shape count.
        dtype: what matrices are held as; None for what the files have.

    Raises:
        VkDecodeError: the model or its tensors do not allow it, or no kernel has its geometry.

    """

    def __init__(self, source: WeightSource, device: Device, dtype: DType | None = None) -> None:
        model_type, self._architecture = architecture_of(source.config)
        self.path: Path = source.path
        self.config: DecoderConfig = self._architecture.parse_config(source.config)
        self._rope = self._architecture.rope(source.config, self.config)
        pairs = self.config.head_dim // 2
        self._rope_rows = [RopeRows(self._rope, pairs), RopeRows(self._rope.local or self._rope, pairs)]
        c = self.config
        self._kv_geometry = KvGeometry(c.num_hidden_layers, c.num_key_value_heads, 1, c.head_dim, DType.F32)
        self._tensors = TensorTable(source, dtype)
        self._tensors.check_layers(self._architecture.layers, self.config.num_hidden_layers)
        self._architecture.check_tensors(self.config, self._tensors)
        self.device = device
        self.instance_id = new_model_instance_id()
        structure = {
            **asdict(self.config),
            "rotary_dim": self._rope.rotary_dim,
            "dtype": dtype.value if dtype else None,
        }
        self.shape_key = make_shape_key(model_type, structure, self.instance_id)
        self.load_plan = plan_load(self)
        self._tensors.check_all_used()

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token."""
        return int(self.config.vocab_size)

    @property
    def default_kv_offset(self) -> str:
        """`device` or `symenv`: where the KV write takes its offset from unless asked otherwise."""
        return self._architecture.default_kv_offset

    def weight_specs(self) -> list[WeightSpec]:
        """The weight constants of the optimized decode step; every other step uses the same ones."""
        return list(self.load_plan.weights)

    def max_step_tokens(self, logits: str) -> int:
        """How many tokens a step may have room for, so that no activation exceeds the device's storage buffers."""
        return self.load_plan.max_tokens_of_all_logits if logits == "all" else self.load_plan.max_tokens

    def memory_report(self, max_seq_len: int | None = None, kv_dtype: str = "f32") -> MemoryReport:
        """The bytes that the model takes on its device, part by part; computed from plans, nothing is allocated.

        Args:
            max_seq_len: rows of the KV cache; None for the model's max_position_embeddings.
            kv_dtype: `f32` or `f16`.

        Raises:
            InvalidInputError: the length is not positive or the dtype unknown.

        """
        rows = self.config.max_position_embeddings if max_seq_len is None else max_seq_len
        check_cache(rows, kv_dtype)
        return memory_report(self, self.load_plan.weights, rows, kv_dtype)

    def kv_geometry(self, max_seq_len: int, dtype: str) -> KvGeometry:
        """The shape of a cache for this model."""
        known = self._kv_geometry  # every step asks for that of its cache
        if (known.max_seq_len, known.dtype.value) != (max_seq_len, dtype):
            self._kv_geometry = known = replace(known, max_seq_len=max_seq_len, dtype=DType(dtype))
        return known

    def build_step(self, options: StepOptions, geometry: KvGeometry) -> StepGraph:
        """A new, unoptimized graph of one step."""
        return self._architecture.build_step(self.config, self._tensors, self._rope.rotary_dim, options, geometry)

    @property
    def max_positions(self) -> int | None:
        """How many positions the model can tell apart; None where it takes any."""
        return self._rope.max_positions

    def rope_cos_sin(
        self, positions: NDArray[np.int64], max_seq_len: int | None = None, local: bool = False
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines [positions, head_dim / 2]; pairs that are not turned get 1 and 0.

        Args:
            positions: from 0 on.
            max_seq_len: rows of the cache that they are for; long-context scaling can depend on it.
            local: those of the windowed layers, for a model whose layers differ.

        """
        return self._rope_rows[local].cos_sin(positions, max_seq_len)


def check_cache(max_seq_len: int, dtype: str) -> None:
    """Raise `InvalidInputError` where a KV cache cannot have this length or element type."""
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 1:
        raise InvalidInputError(f"max_seq_len must be a positive integer, not {max_seq_len!r}")
    if dtype not in ("f32", "f16"):
        raise InvalidInputError(f"a KV cache is 'f32' or 'f16', not {dtype!r}")
