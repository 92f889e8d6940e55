"""The shader build: variants, and what a blob declares that it reads and writes, taken from the SPIR-V itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import build_shaders
from build_shaders import BuildError, Shader, compile_one, kernel_key, parse_shader
from vkdecode.errors import ShaderError
from vkdecode.gpu import Kernel, kernels

HEAD = """#version 450
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COUNT = 1;
"""


def built(folder: Path, body: str) -> dict[str, Any]:
    """The manifest entry of one shader without variants."""
    path = folder / "probe.comp"
    path.write_text(HEAD + body, encoding="utf-8")
    return compile_one(Shader("probe", path, ((),)), (), folder, {})


def test_access_is_what_the_code_may_do(tmp_path: Path) -> None:
    body = """
layout(std430, binding = 0) readonly buffer A { uint a[]; };
layout(std430, binding = 1) writeonly buffer B { uint b[]; };
layout(std430, binding = 2) buffer C { uint c[]; };
layout(push_constant) uniform Push { uint first; uint second; };
void main() { c[first] += a[COUNT]; b[second] = c[0]; }
"""
    entry = built(tmp_path, body)
    assert entry["bindings"] == [
        {"name": "a", "access": "read"},
        {"name": "b", "access": "write"},
        {"name": "c", "access": "readwrite"},
    ]
    assert entry["push"] == ["first", "second"]
    assert entry["spec"] == ["WORKGROUP", "COUNT"]


@pytest.mark.parametrize(
    ("declared", "code"),
    [
        ("readonly buffer A { uint a[]; }", "a[COUNT] = 1;"),
        ("readonly buffer A { uint a[]; }", "atomicAdd(a[0], 1u);"),
        ("writeonly buffer A { uint a[]; }", "a[0] = a[1];"),
    ],
)
def test_a_kernel_that_does_what_it_did_not_declare_does_not_compile(tmp_path: Path, declared: str, code: str) -> None:
    with pytest.raises(BuildError, match=r"probe: ERROR.*(readonly|read-only|writeonly|l-value)"):
        built(tmp_path, f"layout(std430, binding = 0) {declared};\nvoid main() {{ {code} }}\n")


def test_binding_numbers_have_no_gap(tmp_path: Path) -> None:
    body = """
layout(std430, binding = 0) readonly buffer A { uint a[]; };
layout(std430, binding = 2) writeonly buffer B { uint b[]; };
void main() { b[0] = a[COUNT]; }
"""
    with pytest.raises(BuildError, match="binding numbers must count from 0"):
        built(tmp_path, body)


def test_variants_are_combined_and_kept_where_a_rule_allows(tmp_path: Path) -> None:
    path = tmp_path / "some.comp"
    path.write_text("//! variants A=x,y N=1,2\n//! only A=x or N=2\n", encoding="utf-8")
    shader = parse_shader(path)
    keys = [kernel_key(shader.name, variant) for variant in shader.variants]
    assert keys == ["some A=x N=1", "some A=x N=2", "some A=y N=2"]
    assert build_shaders.macros(shader.variants[2]) == ["-DA_Y=1", "-DN=2"]


def test_an_unknown_directive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.comp"
    path.write_text("//! variant A=x\n", encoding="utf-8")
    with pytest.raises(BuildError, match=r"some\.comp: unknown directive '//! variant'"):
        parse_shader(path)


def test_a_second_view_of_a_binding_is_the_same_buffer(tmp_path: Path) -> None:
    body = """
layout(std430, binding = 0) readonly buffer A { uint a[]; };
layout(std430, binding = 0) readonly buffer A4 { uvec4 a4[]; };
layout(std430, binding = 1) writeonly buffer B { uint b[]; };
void main() { b[0] = a[COUNT] + a4[COUNT].x; }
"""
    assert [one["name"] for one in built(tmp_path, body)["bindings"]] == ["a", "b"]
    with pytest.raises(BuildError, match="binding 0 is declared twice"):
        built(tmp_path, body.replace("readonly buffer A4", "buffer A4"))


def shared(entry: dict[str, Any], **spec: int) -> int:
    """The shared memory of a manifest entry, computed as the package computes it."""
    constants = tuple(entry["spec"])
    kernel = Kernel("probe", b"", (), (), constants, kernels._expression(entry["shared"], constants))
    return kernel.shared_bytes({"WORKGROUP": 32, "COUNT": 1, **spec})


def test_a_kernel_without_shared_memory_says_so(tmp_path: Path) -> None:
    assert built(tmp_path, "void main() {}\n")["shared"] == 0


@pytest.mark.parametrize(
    ("declared", "spec", "nbytes"),
    [
        ("float a[COUNT];", {"COUNT": 7}, 28),
        ("uint a;", {}, 4),
        ("bool a[COUNT];", {"COUNT": 3}, 12),
        ("float a[5]; vec2 b[COUNT];", {"COUNT": 3}, 24 + 24),
        ("vec3 a[COUNT];", {"COUNT": 3}, 48),
        ("vec4 a; float b[COUNT]; float c;", {"COUNT": 5}, 16 + 32 + 16),
        ("float a[COUNT][WORKGROUP];", {"COUNT": 3, "WORKGROUP": 8}, 96),
        ("float a[3 * COUNT + WORKGROUP / 4 - 1];", {"COUNT": 5, "WORKGROUP": 9}, 4 * (15 + 2 - 1)),
        ("float a[COUNT % 4 + 1];", {"COUNT": 7}, 16),
        ("uvec2 a[COUNT > WORKGROUP ? COUNT : WORKGROUP];", {"COUNT": 40}, 320),
        ("uvec2 a[COUNT >= WORKGROUP ? COUNT : WORKGROUP];", {"COUNT": 4}, 256),
        ("float a[COUNT == 1 ? 2 : 3]; float b[COUNT != 1 ? 2 : 5];", {}, 4 * (2 + 5)),
        ("float a[COUNT < 2 ? 2 : 3]; float b[COUNT <= 0 ? 2 : 5];", {}, 4 * (2 + 5)),
    ],
)
def test_shared_memory_is_computed_from_the_constants(
    tmp_path: Path, declared: str, spec: dict[str, int], nbytes: int
) -> None:
    lines = "".join(f"shared {one.strip()};\n" for one in declared.split(";") if one.strip())
    assert shared(built(tmp_path, f"{lines}void main() {{}}\n"), **spec) == nbytes


def test_a_length_below_0_is_one_that_no_device_has(tmp_path: Path) -> None:
    entry = built(tmp_path, "shared float a[COUNT - 2];\nvoid main() {}\n")
    assert shared(entry, COUNT=1) == 4 * 0xFFFFFFFF


def test_a_length_that_divides_by_0_is_refused(tmp_path: Path) -> None:
    entry = built(tmp_path, "shared float a[WORKGROUP / COUNT];\nvoid main() {}\n")
    with pytest.raises(ShaderError, match="kernel 'probe' divides by a constant that is 0"):
        shared(entry, COUNT=0)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("shared float a[COUNT ^ 3u];", r"probe: the length of a shared array: no rule for the SPIR-V operation 198"),
        ("shared float a[COUNT << 1];", r"probe: the length of a shared array: no rule for the SPIR-V operation 196"),
        ("struct Two { float a; vec4 b; };\nshared Two two;", r"probe: shared memory: no rule .* type of opcode 30,"),
        ("shared mat2 a;", r"probe: shared memory: no rule for the SPIR-V type of opcode 24,"),
    ],
)
def test_shared_memory_that_cannot_be_computed_fails_the_build(tmp_path: Path, declared: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        built(tmp_path, f"{declared}\nvoid main() {{}}\n")


def test_the_package_computes_every_operation_that_the_build_writes() -> None:
    assert set(build_shaders.OPERATIONS.values()) == set(kernels._OPERATIONS)


@pytest.mark.parametrize("held", [None, 1.5, "OTHER", [], ["^", 1, 2], ["+", 1, "OTHER"], [["+"], 1], {"+": 1}])
def test_an_expression_that_is_none_is_refused(held: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        kernels._expression(held, ("COUNT",))


def test_only_what_changed_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, output = tmp_path / "shaders", tmp_path / "spirv"
    sources.mkdir()
    monkeypatch.setattr(build_shaders, "SOURCES", sources)
    monkeypatch.setattr(build_shaders, "OUTPUT", output)
    body = "layout(std430, binding = 0) writeonly buffer B { uint b[]; };\nvoid main() { b[0] = COUNT + ADDED; }\n"
    include = '#extension GL_GOOGLE_include_directive : require\n#include "part.glsl"\n'
    (sources / "part.glsl").write_text('#include "deep.glsl"\n')
    (sources / "deep.glsl").write_text("#define ADDED 1\n")
    (sources / "one.comp").write_text(HEAD + include + body)
    (sources / "two.comp").write_text("//! variants N=1,2\n" + HEAD + "#define ADDED N\n" + body)
    assert build_shaders.build(force=False) == "compiled 3 of 3 kernels from 2 shaders"
    assert build_shaders.build(force=False) == "shaders are up to date"
    (sources / "deep.glsl").write_text("#define ADDED 2\n")
    assert build_shaders.build(force=False) == "compiled 1 of 3 kernels from 2 shaders"
    blob = output / "two-1.spv"
    blob.write_bytes(blob.read_bytes()[:-4])
    assert build_shaders.build(force=False) == "compiled 1 of 3 kernels from 2 shaders"
    assert build_shaders.build(force=True) == "compiled 3 of 3 kernels from 2 shaders"
