"""From Hugging Face to GGUF: the tables read backwards.

Names, layouts and keys are inverted as they are declared. The rest of a family's config is code and is not inverted:
`gguf_metadata` writes what llama.cpp's converters write of it and drops what the family does not read. Whoever uses it
has to read the result forwards and compare, which shows whatever got lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from vkdecode.errors import ConfigError, ModelFileError
from vkdecode.weights.families import (
    AS_IS,
    GgufContents,
    GgufFamily,
    Layout,
    Names,
    family_of,
    gguf_name,
    hf_config,
    split_name,
)
from vkdecode.weights.families.table import CONTEXT, FEED_FORWARD, HEADS, HIDDEN, KV_HEADS, LAYERS
from vkdecode.weights.gguf_meta import Metadata
from vkdecode.weights.gguf_writer import MetaEntry, entry, plain_values

Config = Mapping[str, Any]

# The sizes of every decoder, under the names that `models/config.py` gives them whatever a config calls them.
_SIZES = {key.metadata: key.config for key in (HIDDEN, FEED_FORWARD, LAYERS, CONTEXT, HEADS, KV_HEADS)}

# Further metadata with what it is made of; what a family does not read is dropped.
_FURTHER: Mapping[str, Callable[[Config], Any]] = {
    "vocab_size": lambda config: config["vocab_size"],
    "attention.key_length": lambda config: config["head_dim"],
    "attention.value_length": lambda config: config["head_dim"],
    "attention.sliding_window": lambda config: _window(config),
    "attention.sliding_window_pattern": lambda config: _window_pattern(config),
    "attention.scale": lambda config: _attention_scale(config),
    "attn_logit_softcapping": lambda config: _number(config.get("attn_logit_softcapping")),
    "final_logit_softcapping": lambda config: _number(config.get("final_logit_softcapping")),
    "embedding_scale": lambda config: _number(config.get("embedding_multiplier")),
    "residual_scale": lambda config: _number(config.get("residual_multiplier")),
    "expert_feed_forward_length": lambda config: _expert_size(config),
    "rope.scaling.original_context_length": lambda config: config.get("original_max_position_embeddings"),
    "expert_weights_norm": lambda config: config.get("norm_topk_prob"),
    "use_parallel_residual": lambda config: config.get("use_parallel_residual"),
}
# What no table reads, since the tensors say it too, and llama.cpp needs.
_ALWAYS = ("vocab_size", "expert_feed_forward_length")
# Newer configs call some things by another name.
_ALIASES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}


@dataclass(frozen=True)
class Stored:
    """A tensor of a GGUF file: its layout and the Hugging Face tensors that it holds, in the order of the stack."""

    name: str
    layout: Layout
    sources: tuple[str, ...]

    def shape(self, original: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, where those of its sources are all `original`."""
        shape = (*original[:-1], original[-1] // self.layout.parts)
        if self.layout.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if self.layout.row_vector and shape[0] == 1:
            shape = shape[1:]
        return (len(self.sources), *shape) if self.layout.stacked else shape


def stored_tensors(family: GgufFamily, names: Sequence[str], where: str) -> list[Stored]:
    """The tensors of a GGUF file that hold these Hugging Face tensors.

    Raises:
        UnsupportedModelError: the family has no place for one of them.
        ModelFileError: a stack has a gap.

    """
    found: dict[str, dict[int, str]] = {}
    for name in names:
        targets, place = gguf_name(family, name)
        for target in targets:
            found.setdefault(target, {})[place or 0] = name
    stored = []
    for target, places in found.items():
        if sorted(places) != list(range(len(places))):
            raise ModelFileError(f"{where} has {places[max(places)]}, but not all that comes before it")
        module, _, kind = split_name(target)
        layout = family.layout(f"{module}.{kind}")
        stored.append(Stored(target, layout or AS_IS, tuple(places[place] for place in sorted(places))))
    return stored


def gguf_metadata(
    family: GgufFamily,
    config: Config,
    rope: Mapping[str, Any],
    names: Names,
    vectors: Mapping[str, list[float]],
    where: str,
) -> tuple[dict[str, MetaEntry], dict[str, Any]]:
    """The metadata of a family's file, and the config that a reader will make of it.

    Args:
        family: its table.
        config: the Hugging Face config with all sizes given under the names of `models/config.py`.
        rope: what to say of the rotation, by metadata key.
        names: shapes of all tensors of the file.
        vectors: the values of those that the config takes in.
        where: names the model in errors.

    """
    values = {key.metadata: _table_value(key.config, key.metadata, key.kind, key.default, config, where)
              for key in family.keys}  # fmt: skip
    for key, value in (*rope.items(), *((key, make(config)) for key, make in _FURTHER.items())):
        if values.get(key) is None:
            values[key] = value
    given = {key: value for key, value in values.items() if value is not None}
    lenient = _Lenient(_plain(family, given), family.arch, where)
    _read(lenient, names, vectors, family.arch)
    dropped = {key for key in lenient.really_unread() if lenient.is_set(key)} - set(_ALWAYS)
    entries = {f"{family.arch}.{key}": _entry(value) for key, value in given.items() if key not in dropped}
    meta = Metadata(plain_values(entries), family.arch, where)
    return entries, _read(meta, names, vectors, family.arch)


def _read(meta: Metadata, names: Names, vectors: Mapping[str, list[float]], arch: str) -> dict[str, Any]:
    """The config that a reader makes, who may take the file for one of another family of the same architecture."""
    return hf_config(family_of(arch, meta), GgufContents(meta, names, lambda name: vectors[name]))


class _Lenient(Metadata):
    """Metadata that refuses nothing for being unread, but still knows what was."""

    def unread(self) -> list[str]:
        return []

    def really_unread(self) -> list[str]:
        return super().unread()


def _plain(family: GgufFamily, values: Mapping[str, Any]) -> dict[str, Any]:
    return plain_values({f"{family.arch}.{key}": _entry(value) for key, value in values.items()})


def _entry(value: Any) -> MetaEntry:
    if isinstance(value, list):
        return MetaEntry(value, (GGUFValueType.ARRAY, GGUFValueType.BOOL))
    return entry(value)


def _table_value(name: str, metadata: str, kind: type, default: Any, config: Config, where: str) -> Any:
    value = config.get(_SIZES.get(metadata, name))
    for other in (name, _ALIASES.get(name, name)):
        value = config.get(other) if value is None else value
    if value is None and not isinstance(default, str):
        value = default
    if value is None and default is None:
        raise ConfigError(f"the config of {where} has no {name}, which a GGUF file needs")
    return None if value is None else kind(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _window(config: Config) -> int | None:
    """The length of sliding windows; 0 says that there are none where llama.cpp would otherwise guess."""
    window = config.get("sliding_window")
    return 0 if window is None and config.get("model_type") == "phi3" else window


def _expert_size(config: Config) -> int | None:
    """The inner size of an expert, where a config gives one of its own or the family knows no other."""
    inner = config.get("moe_intermediate_size")
    return config.get("intermediate_size") if inner is None and config.get("model_type") == "gpt_oss" else inner


def _window_pattern(config: Config) -> list[bool] | None:
    """Which layers slide, where some do and some do not."""
    kinds = config.get("layer_types")
    slides = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else []
    return slides if any(slides) else None


def _attention_scale(config: Config) -> float | None:
    if config.get("attention_multiplier") is not None:
        return float(config["attention_multiplier"])
    scalar = config.get("query_pre_attn_scalar")
    return None if scalar is None else float(np.float64(scalar) ** -0.5)
