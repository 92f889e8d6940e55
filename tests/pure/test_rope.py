"""Frequencies, cos and sin of every RoPE type, against formulas written out in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vkdecode.errors import ConfigError, UnsupportedModelError
from vkdecode.models.rope import Rope, RopeRows, rope_from_config

THETA = 10000.0


def plain(dim: int, theta: float = THETA) -> list[float]:
    return [1.0 / theta ** (2 * pair / dim) for pair in range(dim // 2)]


def test_default_frequencies_and_angles() -> None:
    rope = rope_from_config({"rope_theta": 500000.0}, 16)
    np.testing.assert_allclose(rope.inv_freq, plain(16, 500000.0), rtol=1e-14)
    cos, sin = rope.cos_sin(np.array([0, 3, 100_000]))
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (3, 8)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    for pair, frequency in enumerate(plain(16, 500000.0)):
        assert cos[2, pair] == pytest.approx(math.cos(100_000 * frequency), abs=1e-6)
        assert sin[1, pair] == pytest.approx(math.sin(3 * frequency), abs=1e-6)


def test_no_positions_give_empty_tables() -> None:
    cos, sin = rope_from_config({}, 16).cos_sin(np.zeros(0, np.int64))
    assert cos.shape == sin.shape == (0, 8)


def test_linear_divides_by_the_factor() -> None:
    rope = rope_from_config({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": THETA}, 16)
    np.testing.assert_allclose(rope.inv_freq, [value / 4 for value in plain(16)], rtol=1e-14)
    assert rope.attention_factor == 1.0


def test_llama3_keeps_short_waves_slows_long_ones_and_blends_between() -> None:
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    settings = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
        "rope_theta": 500000.0,
    }
    expected = []
    for value in plain(128, 500000.0):
        wavelength = 2 * math.pi / value
        if wavelength < original / high:
            expected.append(value)
        elif wavelength > original / low:
            expected.append(value / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * value / factor + smooth * value)
    rope = rope_from_config({"rope_parameters": settings}, 128)
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-13)
    assert expected[0] == plain(128, 500000.0)[0]
    assert expected[-1] == plain(128, 500000.0)[-1] / factor


def yarn_expected(dim: int, factor: float, original: float, fast: float, slow: float, truncate: bool) -> list[float]:
    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    out = []
    for pair, value in enumerate(plain(dim)):
        ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
        out.append(value / factor * ramp + value * (1 - ramp))
    return out


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_over_dimensions(truncate: bool) -> None:
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": truncate}
    rope = rope_from_config({"rope_scaling": settings, "max_position_embeddings": 16384}, 64)
    np.testing.assert_allclose(rope.inv_freq, yarn_expected(64, 4.0, 4096, 32, 1, truncate), rtol=1e-13)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_honours_its_betas() -> None:
    settings = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2}
    rope = rope_from_config({"rope_scaling": settings, "max_position_embeddings": 4096}, 64)
    np.testing.assert_allclose(rope.inv_freq, yarn_expected(64, 2.0, 4096, 16, 2, True), rtol=1e-13)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, (0.07 * math.log(40) + 1) / (0.13 * math.log(40) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 0.0}, 0.1 * math.log(40) + 1),
        ({"attention_factor": None, "mscale": None, "mscale_all_dim": None}, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_scales_cos_and_sin(extra: dict[str, Any], expected: float) -> None:
    settings = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, **extra}
    rope = rope_from_config({"rope_scaling": settings}, 64)
    assert rope.attention_factor == pytest.approx(expected)
    cos, _ = rope.cos_sin(np.array([0]))
    assert cos[0] == pytest.approx(expected)


def test_yarn_of_a_degenerate_range_stays_finite() -> None:
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
    rope = rope_from_config({"rope_scaling": settings}, 16)
    assert np.isfinite(rope.inv_freq).all()


def test_dynamic_is_exact_below_the_trained_length_and_refused_above() -> None:
    config = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128}
    rope = rope_from_config(config, 16, 128)
    np.testing.assert_allclose(rope.inv_freq, plain(16), rtol=1e-14)
    rope.cos_sin(np.array([127]))
    with pytest.raises(UnsupportedModelError, match="128"):
        rope.cos_sin(np.array([5, 128]))
    with pytest.raises(UnsupportedModelError, match="129"):
        rope_from_config(config, 16, 129)


def test_rows_asked_for_one_by_one_are_those_of_all() -> None:
    """Forwards, backwards, over the end of what is worked out at a time, over lengths that change the frequencies."""
    short, longer = np.array([1.0, 0.1]), np.array([0.5, 0.01])
    rope = Rope(short, 1.25, 4, long_inv_freq=longer, short_positions=500)
    rows = RopeRows(rope, 3)
    for length in (500, 501, None):
        wanted = rope.for_length(length).cos_sin(np.arange(200), 3)
        np.testing.assert_array_equal(rows.cos_sin(np.arange(200), length), wanted)
        for position in (*range(70), 199, 63, 64, 0):
            found = rows.cos_sin(np.array([position]), length)
            np.testing.assert_array_equal(found, [one[position : position + 1] for one in wanted])


def test_rows_end_where_the_frequencies_are_exact() -> None:
    rows = RopeRows(Rope(np.array([1.0]), 1.0, 2, max_positions=10), 1)
    for position in (0, 9):
        assert rows.cos_sin(np.array([position]), None)[0].shape == (1, 1)
    for position in (10, 11):
        with pytest.raises(UnsupportedModelError, match=f"position {position} needs dynamic"):
            rows.cos_sin(np.array([position]), None)


def test_gguf_factors_divide_each_frequency() -> None:
    factors = [1.0, 1.0, 2.5, 8.0]
    rope = rope_from_config({"rope_scaling": {"rope_type": "factors", "factors": factors}}, 8)
    np.testing.assert_allclose(rope.inv_freq, [v / f for v, f in zip(plain(8), factors, strict=True)], rtol=1e-14)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 777.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 777},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0, "rope_theta": 777.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}},
        {"rope_parameters": {"type": "linear", "factor": 2.0}, "rope_theta": 777.0, "rope_scaling": None},
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 777.0,
        },
    ],
)
def test_every_spelling_means_the_same(config: dict[str, Any]) -> None:
    np.testing.assert_allclose(rope_from_config(config, 16).inv_freq, [v / 2 for v in plain(16, 777.0)], rtol=1e-14)


@pytest.mark.parametrize(
    "config", [{}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_scaling": {"type": "default"}}]
)
def test_nothing_said_means_the_plain_embedding(config: dict[str, Any]) -> None:
    np.testing.assert_allclose(rope_from_config(config, 16).inv_freq, plain(16), rtol=1e-14)


@pytest.mark.parametrize(
    "config", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_partial_rotation_pads_with_identity(config: dict[str, Any]) -> None:
    rope = rope_from_config(config, 16)
    assert rope.rotary_dim == 8
    np.testing.assert_allclose(rope.inv_freq, plain(8), rtol=1e-14)
    cos, sin = rope.cos_sin(np.array([5]), pad_to_pairs=8)
    assert cos.shape == (1, 8)
    assert (cos[0, 4:] == 1).all()
    assert (sin[0, 4:] == 0).all()
    assert (sin[0, :4] != 0).all()
    with pytest.raises(ConfigError):
        rope.cos_sin(np.array([5]), pad_to_pairs=3)


def test_padding_is_not_scaled_by_the_attention_factor() -> None:
    settings = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    }
    cos, _ = rope_from_config({"rope_scaling": settings}, 16).cos_sin(np.array([0]), 8)
    assert (cos[0, 4:] == 1).all()
    assert (cos[0, :4] > 1).all()


def test_parameters_per_layer_type() -> None:
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    full = rope_from_config(config, 16, layer_type="full_attention")
    np.testing.assert_allclose(full.inv_freq, [v / 8 for v in plain(16, 1e6)], rtol=1e-14)
    np.testing.assert_allclose(
        rope_from_config(config, 16, layer_type="sliding_attention").inv_freq, plain(16), rtol=1e-14
    )
    with pytest.raises(ConfigError, match="full_attention"):
        rope_from_config(config, 16)


def test_top_level_original_length_wins() -> None:
    settings = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    rope = rope_from_config({"rope_scaling": settings, "original_max_position_embeddings": 4096}, 64)
    np.testing.assert_allclose(rope.inv_freq, yarn_expected(64, 2.0, 4096, 32, 1, True), rtol=1e-13)


def test_unknown_type_is_refused_by_name_with_the_supported_ones() -> None:
    supported = "default, linear, dynamic, llama3, yarn, longrope, factors"
    with pytest.raises(UnsupportedModelError, match=rf"'mrope'.*{supported}"):
        rope_from_config({"rope_scaling": {"type": "mrope", "factor": 2.0}}, 16)


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "linear", "factor": -2.0}},
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": float("nan")}},
        {"rope_scaling": {"type": "linear", "factor": float("inf")}},
        {"rope_scaling": {"type": "linear", "factor": 10**400}},
        {"rope_scaling": {"type": "linear", "factor": True}},
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_scaling": {"type": 7, "factor": 2.0}},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 0},
        {"rope_theta": -1.0},
        {"rope_theta": "big"},
        {"partial_rotary_factor": 0},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 0.05},
        {"partial_rotary_factor": 0.2},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 0},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192, "high_freq_factor": 1}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192, "low_freq_factor": None}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 0.5}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": 1}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, "rope_theta": 1.0},
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "attention_factor": -1,
            }
        },
        {"rope_scaling": {"type": "factors", "factors": [1.0] * 7}},
        {"rope_scaling": {"type": "factors", "factors": [1.0] * 7 + [0.0]}},
        {"rope_scaling": {"type": "factors"}},
    ],
)
def test_impossible_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        rope_from_config(config, 16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [{"rope_type": None}, {"type": None}, {"rope_type": None, "type": None}])
def test_a_factor_whose_type_is_null_is_refused(name: dict[str, None]) -> None:
    with pytest.raises(ConfigError, match="has a factor but no rope_type"):
        rope_from_config({"rope_scaling": {"factor": 2.0, **name}}, 16)


@pytest.mark.parametrize("value", [0, [], False])
def test_what_is_no_object_is_refused_even_if_it_is_empty(value: object) -> None:
    with pytest.raises(ConfigError, match="an object or null is needed"):
        rope_from_config({"rope_scaling": value}, 16)
