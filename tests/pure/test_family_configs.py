"""Configs of the model families: their defaults, and what would change the result refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkdecode.errors import ConfigError, UnsupportedModelError
from vkdecode.models import ARCHITECTURES
from vkdecode.models.architecture import Architecture

TINY = Path(__file__).parents[1] / "data" / "tiny"


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {**json.loads((TINY / name / "config.json").read_text()), **changes}
    return config


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def architecture(config: dict[str, Any]) -> Architecture:
    return ARCHITECTURES[config["model_type"]]


def parsed(name: str, *left_out: str, **changes: Any) -> Any:
    config = without(config_of(name, **changes), *left_out)
    return architecture(config).parse_config(config)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("mistral-sliding", {"hidden_act": "relu"}, "hidden_act 'relu' .* supported: silu"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' .* full_attention"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("phi3", {"attention_bias": True}, "attention_bias True is not supported for phi3"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma3-text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("smollm3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("granite", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("stablelm", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act 'relu' .*gelu_pytorch_tanh"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("cohere", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("gpt_oss", {"swiglu_limit": 8.0}, "swiglu_limit 8.0 is not supported for gpt_oss; only 7.0"),
        ("gpt_oss", {"swiglu_alpha": 1.7}, "swiglu_alpha 1.7"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        parsed(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("mistral-sliding", {"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ("mistral-sliding", {"layer_types": ["full_attention"]}, "layer_types must list a type for each of 2 layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "gives no sliding_window"),
        ("qwen3", {"attention_bias": 1}, "attention_bias must be true or false"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive number"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be a list of a 0 or 1 for each of 4 layers"),
        ("smollm3", {"no_rope_layers": [1, 1, 2, 0]}, "no_rope_layers"),
        ("granite", {"residual_multiplier": "1"}, "residual_multiplier must be a positive number"),
        ("cohere", {"logit_scale": 0}, "logit_scale must be a positive number"),
        ("gpt2", {"n_embd": None}, "hidden_size"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but num_local_experts is 4"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer"),
        ("qwen2_moe", {"mlp_only_layers": [0, "1"]}, "mlp_only_layers must be a list of layers"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["full_attention"]}, "layer_types must list a type"),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parsed(name, **changes)


def test_a_wrapped_config_needs_the_part_about_text() -> None:
    with pytest.raises(ConfigError, match="text_config"):
        ARCHITECTURES["gemma3"].parse_config({"model_type": "gemma3"})


# Windows: which layers have one


def test_mistral_has_its_window_in_every_layer() -> None:
    assert parsed("mistral-sliding").windows == (8, 8)
    assert parsed("mistral-sliding", sliding_window=None).windows == (0, 0)
    assert parsed("mistral-sliding", "sliding_window").windows == (4096, 4096)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwen_has_windows_from_a_layer_on_where_it_uses_them(name: str) -> None:
    listed = "layer_types"
    assert parsed(name, sliding_window=8).windows == (0, 0)
    used = {"use_sliding_window": True, "sliding_window": 8}
    assert parsed(name, listed, **used).windows == (0, 0)
    assert parsed(name, listed, **used, max_window_layers=1).windows == (0, 8)
    assert parsed(name, listed, **used, max_window_layers=0).windows == (8, 8)
    assert parsed(name, **used, layer_types=["sliding_attention", "full_attention"]).windows == (8, 0)


def test_gemma_alternates_its_windows() -> None:
    assert parsed("gemma2", "layer_types", num_hidden_layers=4).windows == (8, 0, 8, 0)
    six = parsed("gemma3-text", "layer_types", num_hidden_layers=7)
    assert six.windows == (8, 8, 8, 8, 8, 0, 8)


def test_smollm3_has_windows_in_its_layers_without_rope() -> None:
    config = parsed("smollm3", "layer_types", "no_rope_layers", use_sliding_window=True, sliding_window=8)
    assert config.turned == (True, True, True, False)
    assert config.windows == (0, 0, 0, 8)
    assert parsed("smollm3", "no_rope_layers", no_rope_layer_interval=2).turned == (True, False, True, False)


def test_mixtures_have_windows_where_their_families_have_them() -> None:
    assert parsed("mixtral").window == 0
    assert parsed("mixtral", sliding_window=8).window == 8
    used = {"use_sliding_window": True, "sliding_window": 8}
    assert parsed("qwen2_moe", "layer_types", **used, max_window_layers=1).windows == (0, 8)
    assert parsed("qwen3_moe", **used, max_window_layers=1).windows == (8, 8)
    assert parsed("gpt_oss", "layer_types", num_hidden_layers=3).windows == (8, 0, 8)


# Which layers have experts


def test_layers_without_experts_are_listed_or_counted() -> None:
    four = {"num_hidden_layers": 4, "layer_types": None}
    assert parsed("qwen2_moe", **four).routed == (True,) * 4
    assert parsed("qwen2_moe", **four, decoder_sparse_step=2).routed == (False, True, False, True)
    assert parsed("qwen3_moe", **four, mlp_only_layers=[0, 3]).routed == (False, True, True, False)
    assert parsed("qwen3_moe", **four, mlp_only_layers=None).routed == (True,) * 4


def test_newer_configs_count_experts_under_another_name() -> None:
    assert parsed("qwen3_moe").experts.count == 4
    assert parsed("qwen3_moe", "num_local_experts", num_experts=6).experts.count == 6


# What a key that is left out means


@pytest.mark.parametrize(
    ("name", "key", "wanted"),
    [
        ("gemma2", "attn_logit_softcapping", 50.0),
        ("gemma2", "final_logit_softcapping", 30.0),
        ("gemma3-text", "attn_logit_softcapping", 0.0),
        ("gemma3-text", "head_dim", 256),
        ("gemma3-text", "query_pre_attn_scalar", 256.0),
        ("qwen3", "head_dim", 128),
        ("gpt_oss", "head_dim", 64),
        ("gpt_oss", "attention_bias", True),
        ("qwen2_moe", "qkv_bias", True),
        ("qwen3", "tie_word_embeddings", False),
        ("gemma2", "tie_word_embeddings", True),
        ("smollm3", "tie_word_embeddings", True),
        ("starcoder2", "tie_word_embeddings", True),
        ("cohere", "tie_word_embeddings", True),
        ("cohere", "logit_scale", 0.0625),
        ("granite", "embedding_multiplier", 1.0),
        ("olmo2", "rms_norm_eps", 1e-5),
        ("gpt_neox", "use_parallel_residual", True),
        ("starcoder2", "use_bias", True),
    ],
)
def test_what_a_config_leaves_out_has_the_defaults_of_its_family(name: str, key: str, wanted: Any) -> None:
    assert getattr(parsed(name, key), key) == wanted


def test_gemma_2_may_have_no_caps() -> None:
    config = parsed("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (0.0, 0.0)


def test_gpt_2_scales_scores_as_its_config_says() -> None:
    assert parsed("gpt2").scales == (0.25, 0.25)
    assert parsed("gpt2", scale_attn_weights=False).scales == (1.0, 1.0)
    assert parsed("gpt2", scale_attn_by_inverse_layer_idx=True).scales == (0.25, 0.125)
    assert parsed("gpt2").intermediate_size == 256
    assert parsed("gpt2", n_inner=77).intermediate_size == 77


# Rotation


def rope_of(name: str, *left_out: str, **changes: Any) -> Any:
    config = without(config_of(name, **changes), *left_out)
    one = architecture(config)
    return one.rope(config, one.parse_config(config))


@pytest.mark.parametrize(("name", "part"), [("stablelm", 4), ("gpt_neox", 4), ("phi3-partial", 12), ("phi3", 16)])
def test_families_turn_parts_of_a_head(name: str, part: int) -> None:
    assert rope_of(name).rotary_dim == part


@pytest.mark.parametrize("name", ["stablelm", "gpt_neox"])
def test_a_quarter_of_each_head_is_turned_unless_the_config_says_otherwise(name: str) -> None:
    assert rope_of(name, "rope_parameters").rotary_dim == 4
    assert rope_of(name, "rope_parameters", partial_rotary_factor=0.5).rotary_dim == 8


def test_gemma_3_turns_windowed_layers_at_a_base_of_their_own() -> None:
    both = rope_of("gemma3-text")
    assert both.inv_freq[1] == pytest.approx(1e6 ** (-1 / 16))
    assert both.local.inv_freq[1] == pytest.approx(1e4 ** (-1 / 16))
    scaled = rope_of("gemma3-text", "rope_parameters", rope_scaling={"rope_type": "linear", "factor": 8.0})
    np.testing.assert_allclose(scaled.inv_freq, both.inv_freq / 8)
    np.testing.assert_array_equal(scaled.local.inv_freq, both.local.inv_freq)


def test_smollm3_has_a_base_of_its_own() -> None:
    wanted = rope_of("smollm3").inv_freq
    np.testing.assert_array_equal(rope_of("smollm3", "rope_parameters").inv_freq, wanted)
    np.testing.assert_array_equal(rope_of("smollm3", "rope_parameters", rope_theta=2e6).inv_freq, wanted)
    assert rope_of("smollm3", "rope_parameters", rope_theta=5e6).inv_freq[1] < wanted[1]


def test_cohere_turns_whole_heads_only() -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        rope_of("cohere", partial_rotary_factor=0.5)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi_3_long_contexts_have_other_divisors(kind: str) -> None:
    short, long = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
    rope = rope_of(
        "phi3",
        "rope_parameters",
        rope_scaling={"type": kind, "short_factor": short, "long_factor": long},
        rope_theta=10000.0,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
    )
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(rope.for_length(4096).inv_freq, plain / short)
    np.testing.assert_allclose(rope.for_length(4097).inv_freq, plain / long)
    # sqrt(1 + ln(32) / ln(4096)), as in the reports on Phi 3.
    assert rope.attention_factor == pytest.approx(1.1902380714238083)
    cos, _ = rope.for_length(8192).cos_sin(np.array([5]))
    np.testing.assert_allclose(cos[0], np.cos(5 * plain / long) * rope.attention_factor, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"short_factor": [1.0] * 7}, ConfigError, "short_factor of 8 numbers"),
        ({"long_factor": [0.0] * 8}, ConfigError, "a number in long_factor"),
        ({"long_factor": None}, ConfigError, "long_factor of 8 numbers"),
        ({"long_mscale": 1.2}, UnsupportedModelError, "long_mscale"),
    ],
)
def test_longrope_settings_are_checked(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    settings = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **changes}
    with pytest.raises(error, match=text):
        rope_of("phi3", "rope_parameters", rope_scaling=settings)
