"""What a table of one GGUF architecture says: names, config keys, and how the file keeps each tensor.

Names on the GGUF side follow llama.cpp's conversion scripts and the `gguf` package's `MODEL_TENSORS`; names on the
other side follow the Hugging Face model of the same family. Everything is declared, so that a table can be read in both
directions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.weights.gguf_meta import Metadata

Names = Mapping[str, tuple[int, ...]]
"""GGUF tensor names with their shapes, rows first."""


@dataclass(frozen=True)
class Layout:
    """How a GGUF file keeps a tensor, where that differs from Hugging Face.

    Attributes:
        permuted: config key of a head count: the halves of each head's rows, (i, i + d/2), lie next to each other.
        grouped: config key of a head count: rows that go head by head, each with its q, k and v, go q, k, v first.
        stacked: config key of how many tensors, numbered `{e}` in the Hugging Face name, are one with a further axis 0.
        plus_one: one was added to every value.
        transposed: the last two axes are swapped.
        part, parts: it holds columns `part`, `part + parts`, … of the Hugging Face tensor's last axis.
        row_vector: a matrix of one row is kept as a vector.

    """

    permuted: str | None = None
    grouped: str | None = None
    stacked: str | None = None
    plus_one: bool = False
    transposed: bool = False
    part: int = 0
    parts: int = 1
    row_vector: bool = False

    def stored_rows(self, rows: NDArray[np.int64], count: int, heads: int) -> NDArray[np.int64]:
        """Where the file keeps the rows that Hugging Face numbers `rows`, of `count` in all."""
        if self.permuted:
            head, inside = np.divmod(rows, count // heads)
            half, pair = np.divmod(inside, count // heads // 2)
            return np.asarray(head * (count // heads) + 2 * pair + half, np.int64)
        if self.grouped:
            head, inside = np.divmod(rows, count // heads)
            which, row = np.divmod(inside, count // heads // 3)
            return np.asarray(which * (count // 3) + head * (count // heads // 3) + row, np.int64)
        return rows

    def original_rows(self, rows: NDArray[np.int64], count: int, heads: int) -> NDArray[np.int64]:
        """What Hugging Face numbers the rows that the file keeps at `rows`; undoes `stored_rows`."""
        if self.permuted:
            head, inside = np.divmod(rows, count // heads)
            pair, half = np.divmod(inside, 2)
            return np.asarray(head * (count // heads) + half * (count // heads // 2) + pair, np.int64)
        if self.grouped:
            which, inside = np.divmod(rows, count // 3)
            head, row = np.divmod(inside, count // heads // 3)
            return np.asarray(head * (count // heads) + which * (count // heads // 3) + row, np.int64)
        return rows

    @property
    def heads_key(self) -> str | None:
        """The config key of the head count that the row order depends on."""
        return self.permuted or self.grouped

    @property
    def rows_per_head(self) -> int:
        """What each head's rows must be a multiple of."""
        return 2 if self.permuted else 3 if self.grouped else 1


AS_IS = Layout()
PLUS_ONE = Layout(plus_one=True)


@dataclass(frozen=True)
class Key:
    """A number or flag that both sides have under different names.

    `default` is for files that leave it out: None where they may not, a string to take another config key's value.
    """

    config: str
    metadata: str
    kind: type = int
    default: Any = None


@dataclass(frozen=True)
class GgufContents:
    """What a config is built from: metadata, shapes, and the values of small vectors by tensor name."""

    meta: Metadata
    names: Names
    vector: Callable[[str], list[float]]

    def has_module(self, *endings: str) -> bool:
        """Whether any layer has one of these tensors, such as `attn_q.bias`."""
        return any(name.endswith(tuple(f".{ending}" for ending in endings)) for name in self.names)

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output matrix too."""
        return "output.weight" not in self.names


@dataclass(frozen=True)
class GgufFamily:
    """One architecture: tensor names, config keys, and what llama.cpp's converter changed in the tensors.

    Attributes:
        arch: `general.architecture` of its files.
        model_type: of its Hugging Face configs.
        tensors: GGUF module name (no ".weight") to Hugging Face module name, `{i}` being the layer and `{e}` the place
            in a stack; or both names in full, for a tensor whose suffix differs.
        keys: what both sides' configs give under other names.
        config: the rest of the config; may replace `model_type`.
        layouts: how modules (or full names) are kept; those not listed are as Hugging Face has them.
        biased: GGUF modules that may have a bias.
        consumed: tensors that the config absorbs, or that only repeat it.
        is_it: tells it from other families of the same `arch`.

    """

    arch: str
    model_type: str
    tensors: Mapping[str, str]
    keys: tuple[Key, ...]
    config: Callable[[GgufContents, Mapping[str, Any]], dict[str, Any]]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    biased: frozenset[str] = frozenset()
    consumed: frozenset[str] = frozenset()
    is_it: Callable[[Metadata], bool] = lambda meta: True

    def layout(self, name: str) -> Layout:
        """How the tensor of this GGUF name pattern, with or without its suffix, is kept."""
        module = name.rpartition(".")[0]
        return self.layouts.get(name) or self.layouts.get(module) or AS_IS


_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_SUFFIX = re.compile(r"(.+)\.(weight|bias)")


def split_name(name: str) -> tuple[str, int | None, str]:
    """Split a GGUF tensor name into (module pattern, layer, "weight" or "bias")."""
    suffix = _SUFFIX.fullmatch(name)
    module, kind = (suffix[1], suffix[2]) if suffix else (name, "")
    block = _BLOCK.fullmatch(module)
    if block:
        return f"blk.{{i}}.{block[2]}", int(block[1]), kind
    return module, None, kind


LLAMA_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
"""The names of Llama, which most families share."""

QK_NORMS: Mapping[str, str] = {
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
}
QKV = frozenset({"blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"})
PERMUTED_QK: Mapping[str, Layout] = {
    "blk.{i}.attn_q": Layout(permuted="num_attention_heads"),
    "blk.{i}.attn_k": Layout(permuted="num_key_value_heads"),
}

HIDDEN = Key("hidden_size", "embedding_length")
LAYERS = Key("num_hidden_layers", "block_count")
CONTEXT = Key("max_position_embeddings", "context_length")
HEADS = Key("num_attention_heads", "attention.head_count")
KV_HEADS = Key("num_key_value_heads", "attention.head_count_kv", default="num_attention_heads")
FEED_FORWARD = Key("intermediate_size", "feed_forward_length")
SIZES = (HIDDEN, FEED_FORWARD, LAYERS, CONTEXT, HEADS, KV_HEADS)
RMS_EPS = Key("rms_norm_eps", "attention.layer_norm_rms_epsilon", float)
NORM_EPS = Key("layer_norm_eps", "attention.layer_norm_epsilon", float)


def without(tensors: Mapping[str, str], *modules: str) -> dict[str, str]:
    """The same names less some modules."""
    return {module: name for module, name in tensors.items() if module not in modules}


def attention_scalar(contents: GgufContents, default: float) -> float:
    """The square of the divisor of attention scores, from `attention.scale` where a file has it."""
    scale = contents.meta.number("attention.scale", 0.0)
    if scale <= 0.0:
        return default
    square = 1.0 / (scale * scale)
    return float(round(square)) if math.isclose(square, round(square), rel_tol=1e-6) else square
