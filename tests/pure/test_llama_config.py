"""Llama configs: what they mean, and each impossible or contradicting value refused by the name of its key."""

from __future__ import annotations

from typing import Any

import pytest

from vkdecode.errors import ConfigError, ModelFileError, UnsupportedModelError
from vkdecode.models.llama import LlamaConfig, parse_config, rope
from vkdecode.models.registry import architecture_of

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_what_a_config_leaves_out_has_the_defaults_of_the_field() -> None:
    assert parse_config(CONFIG) == LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )


def test_what_a_config_gives_is_taken() -> None:
    given: dict[str, Any] = {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1,
        "max_position_embeddings": 77,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    }
    parsed = parse_config({**CONFIG, **given})
    assert {name: getattr(parsed, name) for name in given} == given


def test_null_is_the_same_as_absent() -> None:
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias")
    assert parse_config({**CONFIG, **dict.fromkeys(optional)}) == parse_config(CONFIG)


def test_an_explicit_head_dim_is_free_of_the_hidden_size() -> None:
    parsed = parse_config({**CONFIG, "hidden_size": 63, "head_dim": 8})
    assert (parsed.hidden_size, parsed.head_dim) == (63, 8)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_size_without_a_default_is_required(key: str) -> None:
    for config in ({name: value for name, value in CONFIG.items() if name != key}, {**CONFIG, key: None}):
        with pytest.raises(ConfigError, match=f"no {key}"):
            parse_config(config)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -4, 2**31, 4.0, "4", True, [4], float("nan")])
def test_a_size_is_a_positive_integer(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} must be a positive integer, not "):
        parse_config({**CONFIG, key: value})


@pytest.mark.parametrize("value", [0, 0.0, -1e-5, float("nan"), float("inf"), True, "1e-5", [1e-5]])
def test_an_epsilon_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^rms_norm_eps must be a positive number, not "):
        parse_config({**CONFIG, "rms_norm_eps": value})


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_a_flag_is_true_or_false(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key} must be true or false, not "):
        parse_config({**CONFIG, key: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, ("num_attention_heads 4", "num_key_value_heads 3")),
        ({"num_key_value_heads": 8}, ("num_attention_heads 4", "num_key_value_heads 8")),
        ({"hidden_size": 62}, ("hidden_size 62", "num_attention_heads 4", "head_dim")),
    ],
)
def test_values_that_contradict_each_other_are_both_named(changes: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**CONFIG, **changes})
    assert all(text in str(caught.value) for text in named)


@pytest.mark.parametrize("changes", [{"head_dim": 6}, {"hidden_size": 24}])
def test_a_head_dim_without_a_kernel_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"head_dim 6 .* multiple of 4"):
        parse_config({**CONFIG, **changes})


@pytest.mark.parametrize("activation", ["gelu", "relu", "SiLU", None, 3])
def test_another_activation_is_refused(activation: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"hidden_act .* supported: silu"):
        parse_config({**CONFIG, "hidden_act": activation})


def test_the_rotation_is_that_of_the_config() -> None:
    assert rope({**CONFIG, "partial_rotary_factor": 0.5}, parse_config(CONFIG)).rotary_dim == 8
    with pytest.raises(UnsupportedModelError, match="'mrope'"):
        rope({**CONFIG, "rope_scaling": {"rope_type": "mrope"}}, parse_config(CONFIG))


def test_an_architecture_is_found_by_its_model_type() -> None:
    name, module = architecture_of(CONFIG)
    assert name == "llama"
    assert module.parse_config is parse_config


@pytest.mark.parametrize(
    ("model_type", "error", "text"),
    [
        ("mamba", UnsupportedModelError, "model_type 'mamba' is not supported; supported: .*llama"),
        ("Llama", UnsupportedModelError, "'Llama'"),
        (None, ModelFileError, "no model_type"),
        (3, ModelFileError, "no model_type"),
    ],
)
def test_an_unknown_architecture_is_refused_by_name(model_type: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        architecture_of({**CONFIG, "model_type": model_type})
