"""Shape keys tell whose plan a plan is; ids never repeat; kept apart from what is bound anew for each token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vkdecode.decode import ModelInstanceId, make_shape_key, new_kv_alloc_id, new_model_instance_id
from vkdecode.models.llama import parse_config

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ONE = ModelInstanceId(1)
values = st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.text(max_size=8)
structures = st.dictionaries(st.text(max_size=8), values, max_size=6)


def key_of(config: dict[str, Any]) -> int:
    return make_shape_key("llama", asdict(parse_config(config)), ONE)


@given(st.text(max_size=10), structures, st.integers(1, 2**40))
def test_a_key_is_64_bits_and_follows_from_its_parts_alone(
    architecture: str, structure: dict[str, Any], number: int
) -> None:
    key = make_shape_key(architecture, structure, ModelInstanceId(number))
    assert 0 <= key < 2**64
    reordered = dict(reversed(structure.items()))
    assert key == make_shape_key(architecture, reordered, ModelInstanceId(number))


@given(structures, structures, st.integers(1, 99), st.integers(1, 99))
def test_a_key_differs_where_any_part_does(first: dict[str, Any], second: dict[str, Any], one: int, other: int) -> None:
    same = repr(sorted(first.items(), key=str)) == repr(sorted(second.items(), key=str))
    keys = [
        make_shape_key("llama", first, ModelInstanceId(one)),
        make_shape_key("llama", second, ModelInstanceId(other)),
    ]
    assert (keys[0] == keys[1]) is (same and one == other)
    assert make_shape_key("phi3", first, ModelInstanceId(one)) != keys[0]


def test_keys_use_all_64_bits() -> None:
    keys = [make_shape_key("llama", {}, ModelInstanceId(number)) for number in range(200)]
    assert len(set(keys)) == 200
    ones = [sum(key >> bit & 1 for key in keys) for bit in range(64)]
    assert all(40 < count < 160 for count in ones)


def test_two_instances_of_one_geometry_have_two_keys() -> None:
    structure = asdict(parse_config(CONFIG))
    keys = {make_shape_key("llama", structure, new_model_instance_id()) for _ in range(50)}
    assert len(keys) == 50


def test_the_structure_is_in_the_key() -> None:
    changes: dict[str, Any] = {
        "vocab_size": 161,
        "hidden_size": 128,
        "intermediate_size": 97,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    }
    keys = [key_of(CONFIG), *(key_of({**CONFIG, name: value}) for name, value in changes.items())]
    assert len(set(keys)) == len(keys)


def test_rope_frequencies_are_not_in_the_key() -> None:
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert (
        key_of(CONFIG)
        == key_of({**CONFIG, "rope_theta": 500000.0})
        == key_of({**CONFIG, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
        == key_of({**CONFIG, "rope_scaling": scaled})
    )


def test_ids_only_rise() -> None:
    for mint in (new_model_instance_id, new_kv_alloc_id):
        ids = [int(mint()) for _ in range(100)]
        assert ids == sorted(set(ids))
        assert ids[0] >= 1
