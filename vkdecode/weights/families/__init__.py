"""How each GGUF architecture maps to its Hugging Face counterpart: a table for each family, and look-ups in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from vkdecode.errors import ModelFileError, UnsupportedModelError
from vkdecode.weights.families.gemma import GEMMAS
from vkdecode.weights.families.layer_norm import LAYER_NORMED
from vkdecode.weights.families.llama_like import LLAMA_LIKE
from vkdecode.weights.families.moe import MIXTURES
from vkdecode.weights.families.phi import PHIS
from vkdecode.weights.families.table import (
    AS_IS,
    GgufContents,
    GgufFamily,
    Key,
    Layout,
    Names,
    split_name,
)
from vkdecode.weights.gguf_meta import Metadata

__all__ = [
    "AS_IS",
    "FAMILIES",
    "GgufContents",
    "GgufFamily",
    "Key",
    "Layout",
    "Names",
    "family_of",
    "family_of_model_type",
    "gguf_name",
    "hf_config",
    "hf_name",
    "split_name",
]

FAMILIES: tuple[GgufFamily, ...] = (*LLAMA_LIKE, *GEMMAS, *PHIS, *MIXTURES, *LAYER_NORMED)

_HARMLESS = frozenset(
    {
        "vocab_size",
        "tensor_data_layout",
        "pooling_type",
        "rope.scaling.finetuned",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.causal",
        "expert_feed_forward_length",
        "rope.scaling.original_context_length",
    }
)
"""Metadata that may stay unread: it repeats what the tensors say, or what the family does anyway."""


def family_of(arch: str, meta: Metadata) -> GgufFamily:
    """Return the table of a file; `UnsupportedModelError` names an unknown architecture and lists the known."""
    for family in FAMILIES:
        if family.arch == arch and family.is_it(meta):
            return family
    known = ", ".join(sorted({family.arch for family in FAMILIES}))
    raise UnsupportedModelError(
        f"{meta.where} has the GGUF architecture {arch!r}, which is not supported; supported: {known}"
    )


def family_of_model_type(model_type: str) -> GgufFamily | None:
    """The table of a Hugging Face family, or None where there is none."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)


def hf_name(family: GgufFamily, name: str, layers: int, where: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None for one that the config absorbs.

    The name has `{e}` in it where the tensor is a stack of several. A tensor that the family does not know is refused:
    leaving it out would silently compute something else.
    """
    module, layer, kind = split_name(name)
    if module in family.consumed:
        return None
    whole = family.tensors.get(f"{module}.{kind}")
    target = family.tensors.get(module)
    known = whole is not None or (
        target is not None and (kind == "weight" or (kind == "bias" and module in family.biased))
    )
    if not known:
        raise UnsupportedModelError(
            f"{where} has the tensor {name!r}, which a {family.model_type} model is not known to have"
        )
    if layer is not None and layer >= layers:
        raise ModelFileError(f"{where} has the tensor {name!r}, but only {layers} layers")
    return (whole or f"{target}.{kind}").replace("{i}", str(layer))


def gguf_name(family: GgufFamily, name: str) -> tuple[tuple[str, ...], int | None]:
    """Return the GGUF names of a Hugging Face tensor, several where it is kept in parts, and its place in a stack.

    Raises:
        UnsupportedModelError: the family has no such tensor.

    """
    for pattern, sources in _by_hf_name(family.model_type):
        found = pattern.fullmatch(name)
        if found:
            groups = found.groupdict()
            names = tuple(source.replace("{i}", groups.get("i") or "") for source in sources)
            return names, int(groups["e"]) if groups.get("e") is not None else None
    raise UnsupportedModelError(f"the tensor {name!r} has no place in a GGUF file of a {family.model_type} model")


@functools.cache
def _by_hf_name(model_type: str) -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    """Patterns of a family's Hugging Face names with the GGUF names, `{i}` being the layer, that belong to them."""
    family = family_of_model_type(model_type)
    assert family is not None
    found: dict[str, list[str]] = {}
    for source, target in family.tensors.items():
        if source.endswith((".weight", ".bias")):
            found.setdefault(target, []).append(source)
            continue
        found.setdefault(f"{target}.weight", []).append(f"{source}.weight")
        if source in family.biased:
            found.setdefault(f"{target}.bias", []).append(f"{source}.bias")
    return tuple((_pattern(name), tuple(sources)) for name, sources in found.items())


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for letter in "ie":
        escaped = escaped.replace(re.escape(f"{{{letter}}}"), f"(?P<{letter}>0|[1-9][0-9]*)")
    return re.compile(escaped)


def hf_config(family: GgufFamily, contents: GgufContents) -> dict[str, Any]:
    """Build the Hugging Face style config of a GGUF file (without its tokenizer's token ids).

    Metadata that nothing reads and that is set is refused: it may change the result.
    """
    meta = contents.meta
    config: dict[str, Any] = {"model_type": family.model_type}
    for key in family.keys:
        config[key.config] = _value(key, meta, config)
    config.update(family.config(contents, config))
    if meta.has("attention.causal") and not meta.flag("attention.causal", True):
        raise UnsupportedModelError(f"{meta.where} attends in both directions, which is not supported")
    unread = [name for name in meta.unread() if name not in _HARMLESS and meta.is_set(name)]
    if unread:
        raise UnsupportedModelError(
            f"{meta.where} has the metadata {family.arch}.{unread[0]}, which is not supported in {family.arch} files "
            f"of this kind ({family.model_type}) and may change the result"
        )
    return config


def _value(key: Key, meta: Metadata, config: Mapping[str, Any]) -> Any:
    default = config[key.default] if isinstance(key.default, str) else key.default
    if key.kind is float:
        return meta.number(key.metadata, default)
    return meta.flag(key.metadata, default) if key.kind is bool else meta.integer(key.metadata, default)
