"""Shared memory that a SPIR-V module declares, computed from the module itself for given specialization constants.

This reads the code that runs, behind `spirv-opt`; the manifest has it from the code before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

_WORKGROUP_CLASS, _SPEC_ID = 4, 1
_OPERATIONS: dict[int, Callable[..., int]] = {
    128: lambda a, b: a + b,
    130: lambda a, b: a - b,
    132: lambda a, b: a * b,
    134: lambda a, b: a // b,
    169: lambda condition, a, b: a if condition else b,
    172: lambda a, b: int(a > b),
    176: lambda a, b: int(a < b),
}


def declared_shared_bytes(code: bytes, spec: Mapping[int, int]) -> int:
    """Bytes of all workgroup variables, each in whole units of the largest alignment; `spec` holds values by id."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    ids: dict[int, int] = {}
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    variables: list[int] = []
    at = 5
    while at < len(words):
        count, opcode = words[at] >> 16, words[at] & 0xFFFF
        body = words[at + 1 : at + count]
        if opcode == 71 and body[1] == _SPEC_ID:
            ids[body[0]] = body[2]
        elif opcode in (21, 22, 23, 28, 32):  # integer, float, vector, array and pointer types: the result comes first
            found[body[0]] = opcode, body[1:]
        elif opcode in (43, 50, 52):  # constants: the type comes first
            found[body[1]] = opcode, body[2:]
        elif opcode == 59 and body[2] == _WORKGROUP_CLASS:
            variables.append(body[0])
        at += count

    def value(one: int) -> int:
        opcode, body = found[one]
        if opcode == 50 and one in ids:
            return spec.get(ids[one], body[0])
        return _OPERATIONS[body[0]](*map(value, body[1:])) if opcode == 52 else body[0]

    def size(one: int) -> int:
        opcode, body = found[one]
        if opcode in (21, 22):
            return body[0] // 8
        return size(body[0]) * (body[1] if opcode == 23 else value(body[1]))

    def alignment(one: int) -> int:  # of vectors of 2 and 4 components, as the kernels have them
        opcode, body = found[one]
        return alignment(body[0]) if opcode == 28 else size(one)

    types = [found[pointer][1][1] for pointer in variables]
    largest = max(map(alignment, types), default=1)
    return sum(-(-size(one) // largest) * largest for one in types)
