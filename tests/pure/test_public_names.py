"""The public interface: every name of it resolves, is listed once, and is what its home module has."""

from __future__ import annotations

import importlib
import inspect

import pytest

import vkdecode as vk

PROMISED = [
    "list_devices",
    "Device",
    "DeviceInfo",
    "DeviceLocation",
    "load",
    "Model",
    "InferenceContext",
    "KvCache",
    "KvLayer",
    "DecodeSession",
    "CapturedDecodeSession",
    "DecodeTokenData",
    "KvRebindSource",
    "RebindRefusal",
    "PlanValidity",
    "SymEnv",
    "SymId",
    "KvAllocId",
    "TopologyChanged",
    "SymbolConflict",
    "SamplingParams",
    "generate",
    "stream",
    "Generation",
    "Conversation",
    "VkDecodeError",
]


@pytest.mark.parametrize("name", PROMISED)
def test_each_promised_name_is_public(name: str) -> None:
    assert name in vk.__all__
    assert getattr(vk, name) is not None


def test_all_is_sorted_complete_and_without_doubles() -> None:
    assert len(vk.__all__) == len(set(vk.__all__))
    for name in vk.__all__:
        assert name in dir(vk)
        assert getattr(vk, name) is not None


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("Device", "gpu.device"),
        ("SymEnv", "graph.symbols"),
        ("InferenceContext", "decode.context"),
        ("MemoryReport", "decode.memory"),
        ("KvCache", "decode.kv_cache"),
        ("DecodeSession", "decode.session"),
        ("CapturedDecodeSession", "decode.captured"),
        ("Model", "models.model"),
    ],
)
def test_each_name_is_what_its_home_has(name: str, home: str) -> None:
    assert getattr(vk, name) is getattr(importlib.import_module(f"vkdecode.{home}"), name)
    assert getattr(vk, name).__module__ == f"vkdecode.{home}"


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    importlib.import_module("vkdecode.generate")
    assert inspect.isfunction(vk.generate)
    assert inspect.isfunction(vk.load)


def test_every_error_is_a_vkdecode_error() -> None:
    errors = importlib.import_module("vkdecode.errors")
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__]
    assert len(classes) > 10
    for one in classes:
        assert issubclass(one, (vk.VkDecodeError, Warning))
        assert one.__name__ in vk.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        vk.nonsense  # noqa: B018  # the access is what is tested
