"""The model families against their references, on every rung, KV-offset path, attention arm and kernel form."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rungs import REGRESSION, check_reference, check_rungs, prompt_and_decode
from safetensors.numpy import load_file
from stepping import furthest, one_by_one, run
from tiny_llama import NAMES as LLAMAS
from tiny_llama import PATHS, TINY, changed_copy, golden

from vkdecode.decode import DecodeMode, InferenceContext, ModelInstanceId, make_shape_key
from vkdecode.errors import ConfigError, ContextLengthError
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import ARCHITECTURES, Model


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TINY / name / "config.json").read_text())
    return config


def has_windows(name: str) -> bool:
    config = config_of(name)
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


# A checkpoint is tested here by being there; those of Llama are in test_tiny_llama.py.
FAMILIES = tuple(sorted(path.name for path in TINY.iterdir() if path.name not in LLAMAS))
WINDOWED = tuple(filter(has_windows, FAMILIES))
ALL_PATHS = [(name, *path) for name in FAMILIES for path in (PATHS if name in WINDOWED else (PATHS[0], PATHS[2]))]

TinyModels = Callable[..., Model]


@pytest.mark.parametrize(("name", "kv_offset", "arm"), ALL_PATHS)
def test_all_rungs_give_the_reference_and_agree_to_the_bit(
    tiny_models: TinyModels, device: Device, name: str, kv_offset: str, arm: str
) -> None:
    check_rungs(tiny_models(name, device), name, kv_offset, arm, rebuilt=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_so_do_the_kernels_that_assume_nothing_about_subgroups(
    tiny_models: TinyModels, shared_device: Device, name: str
) -> None:
    """On one rung; `test_tiny_llama` has all of them with these kernels."""
    with InferenceContext(shared_device) as context:
        found = prompt_and_decode(tiny_models(name, shared_device), name, DecodeMode(), context)
    check_reference(name, *found)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_fusions_the_result_is_the_same_within_rounding(
    tiny_models: TinyModels, device: Device, name: str
) -> None:
    with InferenceContext(device, fusions=()) as context:
        plain = prompt_and_decode(tiny_models(name, device), name, DecodeMode(), context, tokens=4)
    check_reference(name, *plain)


def test_every_model_type_has_a_reference() -> None:
    tested = {config_of(path.name)["model_type"] for path in TINY.iterdir()}
    assert set(ARCHITECTURES) - tested == {"gemma3", "ministral"}  # the wrapped one and the renamed one, tested below


# Windows


@pytest.mark.parametrize("name", WINDOWED)
def test_a_prompt_in_any_chunks_crosses_the_window_alike(tiny_models: TinyModels, device: Device, name: str) -> None:
    model, reference = tiny_models(name, device), golden(name)
    ids = np.concatenate([reference.input_ids, reference.decode_ids])
    expected = np.concatenate([reference.logits, reference.decode_logits])
    with InferenceContext(device) as context:
        for start in (1, 5, 8, 17):
            with closing(model.new_kv_cache(48)) as kv:
                first = run(model, ids[:start], kv, context, logits="all")
                rest = run(model, ids[start:], kv, context, logits="all")
            assert furthest(np.concatenate([first, rest]), expected) <= REGRESSION


@pytest.mark.parametrize("path", PATHS)
def test_truncating_behind_a_window_leaves_what_was_before(
    tiny_models: TinyModels, device: Device, path: tuple[str, str]
) -> None:
    """The cache holds the whole context, so any earlier row can be gone back to."""
    model, reference = tiny_models("mistral-sliding", device), golden("mistral-sliding")
    with InferenceContext(device) as context, closing(model.new_kv_cache(48)) as kv:
        mode = DecodeMode("captured", *path)
        run(model, reference.input_ids, kv, context, mode)
        decoded = one_by_one(model, reference.decode_ids, kv, context, mode)
        kv.truncate_to(24)
        assert np.array_equal(one_by_one(model, reference.decode_ids, kv, context, mode), decoded)


# Plans


def test_families_of_equal_geometry_have_different_keys() -> None:
    """Even were two models given one identity."""
    config = json.loads((TINY / "llama" / "config.json").read_text())
    same = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2", "stablelm", "cohere")
    keys = set()
    for model_type in same:
        structure = asdict(ARCHITECTURES[model_type].parse_config({**config, "model_type": model_type}))
        keys.add(make_shape_key(model_type, structure, ModelInstanceId(1)))
    assert len(keys) == len(same)


def test_a_window_is_in_the_key() -> None:
    config = json.loads((TINY / "mistral-sliding" / "config.json").read_text())
    parse = ARCHITECTURES["mistral"].parse_config
    keys = {
        make_shape_key("mistral", asdict(parse({**config, "sliding_window": window})), ModelInstanceId(1))
        for window in (None, 8, 9)
    }
    assert len(keys) == 3


def test_families_of_equal_geometry_are_never_taken_for_each_other(tiny_models: TinyModels, device: Device) -> None:
    names = ("llama", "mistral-sliding", "olmo2", "granite", "cohere")
    models = {name: tiny_models(name, device) for name in names}
    assert len({model.kv_geometry(48, "f32") for model in models.values()}) == 1
    with InferenceContext(device) as context, closing(models["llama"].new_kv_cache(48)) as kv:
        for turn, name in enumerate((*names, names[0]), start=1):
            reference = golden(name)
            kv.truncate_to(0)
            run(models[name], reference.input_ids, kv, context)
            decoded = one_by_one(models[name], reference.decode_ids[:3], kv, context)
            assert furthest(decoded, reference.decode_logits[:3]) <= REGRESSION
            assert context.stats.plans_built == turn


# Other spellings of the same models


def logits_of(folder: Path, device: Device, name: str) -> None:
    reference = golden(name)
    with load(folder, device=device) as model, closing(model.new_kv_cache(48)) as kv:
        assert furthest(model.forward(reference.input_ids, kv, "all"), reference.logits) <= REGRESSION


def renamed(folder: Path, name: str, rename: Callable[[str], str], config: dict[str, Any]) -> Path:
    """A copy of a checkpoint with other tensor names and a config of its own."""
    tensors = load_file(TINY / name / "model.safetensors")
    changes: dict[str, Any] = {**dict.fromkeys(tensors), **{rename(key): value for key, value in tensors.items()}}
    changed_copy(folder, name, tensors=changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma_3_is_found_inside_of_what_reads_images_too(tmp_path: Path, device: Device, prefix: str) -> None:
    text = config_of("gemma3-text")
    folder = renamed(
        tmp_path / "m",
        "gemma3-text",
        lambda key: prefix + key.removeprefix("model."),
        {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 32}},
    )
    logits_of(folder, device, "gemma3-text")


def test_gemma_3_configs_of_before_have_their_two_bases_apart(tmp_path: Path, device: Device) -> None:
    config = config_of("gemma3-text")
    del config["rope_parameters"], config["layer_types"], config["_sliding_window_pattern"]
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": None, "sliding_window_pattern": 3}
    logits_of(renamed(tmp_path / "m", "gemma3-text", str, config), device, "gemma3-text")


def test_ministral_lists_its_windows(tmp_path: Path, device: Device) -> None:
    config = config_of("mistral-sliding") | {"model_type": "ministral", "layer_types": ["sliding_attention"] * 2}
    logits_of(renamed(tmp_path / "m", "mistral-sliding", str, config), device, "mistral-sliding")


def test_a_gpt_2_without_a_head_has_shorter_names_and_masks(tmp_path: Path, device: Device) -> None:
    folder = renamed(tmp_path / "m", "gpt2", lambda key: key.removeprefix("transformer."), config_of("gpt2"))
    weights = load_file(folder / "model.safetensors")
    masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 8, 8), np.uint8) for layer in range(2)}
    folder = changed_copy(
        tmp_path / "n",
        "gpt2",
        tensors={**dict.fromkeys(load_file(TINY / "gpt2" / "model.safetensors")), **weights, **masks},
    )
    logits_of(folder, device, "gpt2")


def test_gpt_2_weights_may_be_held_the_other_way_round(tmp_path: Path, device: Device) -> None:
    tensors = load_file(TINY / "gpt2" / "model.safetensors")
    turned = {
        key: np.ascontiguousarray(value.T) if ".c_" in key and value.ndim == 2 else value
        for key, value in tensors.items()
    }
    folder = changed_copy(tmp_path / "m", "gpt2", {"conv1d_transposed": False}, turned)
    logits_of(folder, device, "gpt2")


def test_pythia_configs_of_before_say_rotary(tmp_path: Path, device: Device) -> None:
    config = config_of("gpt_neox")
    del config["rope_parameters"]
    config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000}
    logits_of(renamed(tmp_path / "m", "gpt_neox", str, config), device, "gpt_neox")


# Limits and refusals


def test_gpt_2_takes_no_more_positions_than_it_knows(tiny_models: TinyModels, device: Device) -> None:
    model = tiny_models("gpt2", device)
    with InferenceContext(device) as context, closing(model.new_kv_cache(160)) as kv:
        run(model, [3] * 126, kv, context)
        run(model, [3, 4], kv, context)
        assert kv.cached_len == 128
        for ids in ([5], [5, 6]):
            with pytest.raises(ContextLengthError, match="128 positions"):
                run(model, ids, kv, context)
        assert kv.cached_len == 128


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_that_nothing_accounts_for_is_refused(tmp_path: Path, device: Device, name: str) -> None:
    bias = {"model.layers.1.self_attn.extra.bias": np.zeros(4, np.float32)}
    with pytest.raises(ConfigError, match=r"has the tensor model\.layers\.1\.self_attn\.extra\.bias"):
        load(changed_copy(tmp_path / "m", name, tensors=bias), device=device)
