"""SmolLM3: Llama where every fourth layer, unless the config says otherwise, does not turn q and k.

Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; layers without RoPE after Yang et al. 2025,
"Rope to Nope and Back Again". Follows `SmolLM3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkdecode.decode import KvGeometry, StepGraph, StepOptions
from vkdecode.errors import ConfigError
from vkdecode.models.architecture import Architecture
from vkdecode.models.blocks import RmsConfig, embed, head_logits, pre_norm_layer, rms_config
from vkdecode.models.config import flag, known, layer_windows, positive_int, size_or_none
from vkdecode.models.rope import Rope, rope_from_config, with_rope_default
from vkdecode.models.step_builder import StepBuilder
from vkdecode.models.tensors import TensorTable


@dataclass(frozen=True)
class SmolLM3Config(RmsConfig):
    """What shapes a SmolLM3 graph; `turned` says of each layer whether it has RoPE, `windows` holds its window or 0."""

    attention_bias: bool
    mlp_bias: bool
    turned: tuple[bool, ...]
    windows: tuple[int, ...]


def parse_config(config: Mapping[str, Any]) -> SmolLM3Config:
    """Read and check a config; raises `ConfigError` or `UnsupportedModelError`."""
    known(config, "hidden_act", "silu", ("silu",))
    fields = rms_config(config, tied=True)
    layers = fields["num_hidden_layers"]
    turned = _turned(config, layers)
    window = size_or_none(config, "sliding_window", None) if flag(config, "use_sliding_window") else None
    return SmolLM3Config(
        **fields,
        attention_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
        turned=turned,
        windows=layer_windows(config, layers, window, lambda layer: not turned[layer]),
    )


def _turned(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has RoPE: `no_rope_layers` holds a 1 for those that do."""
    given = config.get("no_rope_layers")
    if given is None:
        interval = positive_int(config, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) != layers or any(one not in (0, 1) for one in given):
        raise ConfigError(f"no_rope_layers must be a list of a 0 or 1 for each of {layers} layers, not {given!r}")
    return tuple(bool(one) for one in given)


def rope(config: Mapping[str, Any], c: SmolLM3Config) -> Rope:
    """The rotation of the layers that have one."""
    return rope_from_config(with_rope_default(config, "rope_theta", 2e6), c.head_dim)


def build_step(
    c: SmolLM3Config, tensors: TensorTable, rotary_dim: int, options: StepOptions, kv: KvGeometry
) -> StepGraph:
    """The graph of one step: token ids to logits, with the new rows put into the KV caches."""
    b = StepBuilder(tensors, options, kv, rotary_dim)
    x = embed(b, c)
    for layer, (turned, window) in enumerate(zip(c.turned, c.windows, strict=True)):
        biases = {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias, "mlp_bias": c.mlp_bias}
        x = pre_norm_layer(b, x, layer, c, **biases, rope=turned, window=window)
    return b.finish(head_logits(b, x, c) if b.wants_logits() else x)


ARCHITECTURE = Architecture(parse_config, build_step, rope)
