"""Kernels by key, and compiled shaders that are missing, stale or damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vkdecode.errors import ShaderError
from vkdecode.gpu import KernelRegistry, kernels, registry

COMMAND = r"build_shaders\.py"


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    """A copy of the compiled shaders that a test may spoil."""
    return Path(shutil.copytree(kernels._BLOBS, tmp_path / "spirv"))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return Path(shutil.copytree(kernels._SOURCES, tmp_path / "shaders"))


def change_manifest(blobs: Path, **entries: Any) -> None:
    manifest = json.loads((blobs / "manifest.json").read_text())
    (blobs / "manifest.json").write_text(json.dumps({**manifest, **entries}))


def test_a_kernel_tells_its_interface() -> None:
    kernel = registry().get("copy_words")
    assert kernel is registry().get("copy_words")
    assert [(one.name, one.access) for one in kernel.bindings] == [("source", "read"), ("target", "write")]
    assert kernel.push == ("source_start", "target_start", "count")
    assert kernel.spec == ("WORKGROUP",)
    assert kernel.push_values({"count": 3, "source_start": 1, "target_start": 2}).tolist() == [1, 2, 3]


def test_access_is_read_from_the_compiled_code() -> None:
    keys = registry().keys()
    for key in keys:
        name, *terms = key.split()
        kernel = registry().get(name, **dict(term.split("=", 1) for term in terms))
        written = [one.name for one in kernel.bindings if one.access != "read"]
        caches = ["cache_k", "cache_v"]
        outputs = {"copy_words": ["target"], "kv_write": caches, "kv_move": caches}
        outputs |= {"subgroup_check": ["result"], "self_check": ["result"], "group_max": ["best"], "route": ["route"]}
        assert written == outputs.get(name, ["y", *(caches if "EPILOGUE=rope" in terms else [])])


def test_every_kernel_is_told_where_its_parts_begin() -> None:
    """But for those that bind whole buffers only."""
    for key in registry().keys():  # noqa: SIM118  # a registry is no mapping
        name, *terms = key.split()
        kernel = registry().get(name, **dict(term.split("=", 1) for term in terms))
        first = tuple(f"{one.name}_first" for one in kernel.bindings)
        whole = name in ("copy_words", "self_check", "subgroup_check")
        assert kernel.push[: len(first)] == first or (whole and not set(first) & set(kernel.push)), key


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("nothing", {}),
        ("embed", {}),
        ("embed", {"DTYPE": "q9"}),
        ("embed", {"dtype": "f32"}),
        ("kv_write", {"OFFSET": "push", "KV": "f32"}),
    ],
)
def test_an_unknown_kernel_is_named(name: str, variant: dict[str, str]) -> None:
    with pytest.raises(ShaderError, match=f"no kernel '{name}.*{COMMAND}"):
        registry().get(name, **variant)


def test_a_missing_blob_is_named(blobs: Path) -> None:
    (blobs / "copy_words.spv").unlink()
    with pytest.raises(ShaderError, match=rf"copy_words\.spv is missing.*{COMMAND}"):
        KernelRegistry(blobs).get("copy_words")
    assert KernelRegistry(blobs).get("contiguize").code


@pytest.mark.parametrize("damage", ["cut", "bit", "empty"])
def test_a_damaged_blob_is_named(blobs: Path, damage: str) -> None:
    path = blobs / "copy_words.spv"
    code = bytearray(path.read_bytes())
    if damage == "bit":
        code[len(code) // 2] ^= 1
    path.write_bytes(bytes({"cut": code[:-4], "bit": code, "empty": b""}[damage]))
    with pytest.raises(ShaderError, match=rf"copy_words\.spv is damaged.*{COMMAND}"):
        KernelRegistry(blobs).get("copy_words")


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"kernels": {}}', "\udcff"])
def test_a_manifest_that_is_none_is_refused(blobs: Path, content: str | None) -> None:
    manifest = blobs / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ShaderError, match=COMMAND):
        KernelRegistry(blobs)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShaderError, match=f"not compiled.*{COMMAND}"):
        KernelRegistry(tmp_path / "nothing")


def test_unchanged_sources_are_accepted(blobs: Path, sources: Path) -> None:
    assert KernelRegistry(blobs, sources).keys() == registry().keys()


@pytest.mark.parametrize("name", ["norm.comp", "lanes.glsl"])
def test_a_changed_source_makes_blobs_stale(blobs: Path, sources: Path, name: str) -> None:
    with (sources / name).open("a") as file:
        file.write("\n")
    with pytest.raises(ShaderError, match=rf"shaders/{name} was changed after.*{COMMAND}"):
        KernelRegistry(blobs, sources)


def test_a_new_source_makes_blobs_stale(blobs: Path, sources: Path) -> None:
    (sources / "new.comp").write_text("#version 450\n")
    with pytest.raises(ShaderError, match=rf"shaders/new\.comp.*{COMMAND}"):
        KernelRegistry(blobs, sources)


def test_an_installed_package_needs_no_sources(blobs: Path, tmp_path: Path) -> None:
    change_manifest(blobs, build={})
    assert KernelRegistry(blobs, tmp_path / "nothing").get("copy_words").code


@pytest.mark.parametrize("shared", ["COLUMNS", None, ["^", 1, 2], ["*", 4, "LANES"]])
def test_shared_memory_that_cannot_be_computed_is_refused(blobs: Path, shared: Any) -> None:
    entry = json.loads((blobs / "manifest.json").read_text())["kernels"]["copy_words"]
    change_manifest(blobs, kernels={"copy_words": {**entry, "shared": shared}})
    with pytest.raises(ShaderError, match=f"'copy_words' is not one of this version.*{COMMAND}"):
        KernelRegistry(blobs).get("copy_words")


@pytest.mark.parametrize(
    "entries", [{"kernels": []}, {"kernels": {"copy_words": {}}}, {"kernels": {"copy_words": None}}, {"build": 3}]
)
def test_a_manifest_of_another_form_is_refused(blobs: Path, sources: Path, entries: dict[str, Any]) -> None:
    change_manifest(blobs, **entries)
    with pytest.raises(ShaderError):
        KernelRegistry(blobs, sources).get("copy_words")
