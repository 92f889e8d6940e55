"""No width of a subgroup or a workgroup is written into a shader: all of them come from specialization constants.

Columns and words of a weight format are no widths: PACK, GROUP and WORDS may be numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SHADERS = Path(__file__).parents[2] / "shaders"
SOURCES = sorted([*SHADERS.glob("*.comp"), *SHADERS.glob("*.glsl")])

_WIDTH = r"\b(?:gl_SubgroupSize|gl_WorkGroupSize(?:\.[xyz])?|WORKGROUP|TILE|SPLIT)\b"
_LANE = r"\b(?:LANE|lane|gl_SubgroupInvocationID|gl_LocalInvocationID(?:\.[xyz])?|gl_LocalInvocationIndex)\b"
_COMPARED, _NUMBER = r"[=!<>]=?", r"(?:[2-9]|\d\d+)"
_RULES = {
    "a literal workgroup size": r"\blocal_size_[xyz]\s*=",
    "a workgroup size that is no constant of id 0": r"\blocal_size_x_id\s*=(?!\s*0\s*\))|\blocal_size_[yz]_id",
    "a width held against a literal": rf"{_WIDTH}\s*{_COMPARED}\s*{_NUMBER}|\b{_NUMBER}u?\s*{_COMPARED}\s*{_WIDTH}",
    "a literal width": r"(?<![\w.])(?:32|64|128|256|512|1024)u?(?![\w.])",
    "a lane number cut by a literal": rf"{_LANE}\s*(?:[%/&]|>>)\s*\d",
    "a mask of lanes": r"&\s*(?:7|15|31|63|127|0x(?:7|0?f|1f|3f|7f))u?\b",
    "shared memory of a literal size": r"\bshared\s+\w+\s+\w+\s*\[\s*\d",
}


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)


def violations(source: str) -> list[str]:
    """What in a shader's source fixes a width, one line each; defaults of specialization constants do not."""
    found = []
    for line in without_comments(source).splitlines():
        line = re.sub(r"^#define (PACK|GROUP|WORDS) \d+$", "", line)
        line = re.sub(r"(constant_id\s*=\s*)\d+(\)\s*const\s+\w+\s+\w+\s*=\s*)\w+\s*;", r"\1N\2N;", line)
        found += [f"{what}: {line.strip()}" for what, rule in _RULES.items() if re.search(rule, line)]
    return found


def test_no_width_is_written_into_a_shader() -> None:
    assert len(SOURCES) > 10
    assert {path.name: found for path in SOURCES if (found := violations(path.read_text()))} == {}


def test_every_shader_takes_its_workgroup_from_a_constant() -> None:
    for path in SHADERS.glob("*.comp"):
        source = path.read_text()
        assert '#include "lanes.glsl"' in source or "layout(local_size_x_id = 0) in;" in source, path.name


@pytest.mark.parametrize(
    "line",
    [
        "layout(local_size_x = 64) in;",
        "layout(local_size_x_id = 0, local_size_y = 4) in;",
        "layout(local_size_x_id = 3) in;",
        "if (gl_SubgroupSize == 32) return;",
        "if (gl_SubgroupSize != 8u) return;",
        "if (8 < gl_SubgroupSize) return;",
        "if (WORKGROUP >= 16) return;",
        "for (uint i = LANE; i < n; i += 64) x += y[i];",
        "const uint width = 32u;",
        "uint lane = gl_LocalInvocationID.x % 32;",
        "uint lane = gl_LocalInvocationIndex & 31u;",
        "uint group = lane >> 5;",
        "value = subgroupShuffle(value, other & 15);",
        "shared float scratch[48];",
        "#define TILE 32",
        "layout(constant_id = 1) const uint A = 64; uint b = 64;",
    ],
)
def test_a_width_in_a_shader_is_found(line: str) -> None:
    for path in SOURCES:
        assert violations(f"{path.read_text()}\n{line}\n"), line


@pytest.mark.parametrize(
    "line",
    [
        "layout(local_size_x_id = 0) in;",
        "layout(constant_id = 0) const uint WORKGROUP = 32;",
        "layout(constant_id = 3) const uint TILE = 64;  // or 128",
        "// a subgroup of 32 or 64 lanes",
        "/* gl_SubgroupSize == 32 */",
        "bool good = gl_NumSubgroups == 1 && gl_SubgroupSize == WORKGROUP;",
        "if (PARTS > 1 && LANE == 0) x = uintBitsToFloat(word << 16);",
        "for (uint half_width = WORKGROUP / 2; half_width > 0; half_width /= 2) {}",
        "value = clamp(value, -65504.0, 65504.0) * 0.32;",
        "if (SPLIT > 1) barrier();",
        "#define PACK 32",
    ],
)
def test_what_is_no_width_passes(line: str) -> None:
    assert violations(line) == []
