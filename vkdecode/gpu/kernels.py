"""The registry of compiled kernels: what the manifest says each one binds, and its SPIR-V."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ShaderError

_BLOBS = Path(__file__).with_name("spirv")
_SOURCES = Path(__file__).parents[2] / "shaders"
_REBUILD = "run `python build_shaders.py` (or `make shaders`)"

Expression = int | str | tuple["Expression", ...]
"""A number, a specialization constant by name, or an operation of `_OPERATIONS` and what it is applied to."""

_OPERATIONS: dict[str, Callable[..., int]] = {
    "+": lambda *terms: sum(terms),
    "-": lambda a, b: (a - b) % (1 << 32),  # as in the shader: below 0 a length is vast, and refused
    "*": lambda *factors: math.prod(factors),
    "/": operator.floordiv,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "?:": lambda condition, a, b: a if condition else b,
}


@dataclass(frozen=True)
class Binding:
    """One storage buffer of a kernel; access is `read`, `write` or `readwrite`, taken from the SPIR-V itself."""

    name: str
    access: str


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and its interface."""

    key: str
    code: bytes
    bindings: tuple[Binding, ...]
    push: tuple[str, ...]
    spec: tuple[str, ...]
    shared: Expression
    """Bytes of shared memory."""

    def spec_values(self, values: Mapping[str, int]) -> NDArray[np.uint32]:
        """The specialization constants in the order of their ids.

        Raises:
            ShaderError: a constant is missing, unknown, or not an unsigned 32-bit value.

        """
        return _ordered(self.key, "specialization constant", self.spec, values)

    def push_values(self, values: Mapping[str, int]) -> NDArray[np.uint32]:
        """The push constants in the order of their offsets; raises like `spec_values`."""
        return _ordered(self.key, "push constant", self.push, values)

    def shared_bytes(self, values: Mapping[str, int]) -> int:
        """Bytes of shared memory that it declares, with these specialization constants; raises like `spec_values`."""
        self.spec_values(values)
        try:
            return _value(self.shared, values)
        except ZeroDivisionError as error:
            raise ShaderError(f"kernel '{self.key}' divides by a constant that is 0 of {dict(values)}") from error


def _value(expression: Expression, values: Mapping[str, int]) -> int:
    if isinstance(expression, tuple):
        operation, *terms = expression
        return _OPERATIONS[str(operation)](*(_value(term, values) for term in terms))
    return values[expression] if isinstance(expression, str) else expression


def _expression(held: Any, spec: tuple[str, ...]) -> Expression:
    """An expression of the manifest; a ValueError or a TypeError where it is none."""
    if isinstance(held, list):
        operation, *terms = held
        if operation in _OPERATIONS:
            return (operation, *(_expression(term, spec) for term in terms))
    elif isinstance(held, int) or (isinstance(held, str) and held in spec):
        return held
    raise ValueError(f"{held!r} is no number, specialization constant or operation")


def _ordered(key: str, what: str, names: tuple[str, ...], values: Mapping[str, int]) -> NDArray[np.uint32]:
    if set(names) != set(values):
        odd = sorted(set(names) ^ set(values))
        raise ShaderError(f"kernel '{key}' takes the {what}s {list(names)}; missing or unknown: {odd}")
    for name in names:
        if not 0 <= values[name] < 1 << 32:
            raise ShaderError(f"kernel '{key}': {what} {name} = {values[name]} is not an unsigned 32-bit value")
    return np.array([values[name] for name in names], np.uint32)


class KernelRegistry:
    """Kernels by key, e.g. `embed DTYPE=f16`.

    Args:
        blobs: folder of the SPIR-V files and `manifest.json`.
        sources: folder of the shader sources; where it exists, blobs made from other sources are refused.

    """

    def __init__(self, blobs: Path = _BLOBS, sources: Path = _SOURCES) -> None:
        self._blobs = blobs
        self._manifest = _read_manifest(blobs)
        self._kernels: dict[str, Kernel] = {}
        if sources.is_dir():
            _check_sources(sources, self._manifest["build"])

    def keys(self) -> list[str]:
        """The keys of all kernels."""
        return sorted(self._manifest["kernels"])

    def get(self, name: str, **variant: object) -> Kernel:
        """The kernel of one variant; variant names are the macros of the shader's `//! variants` lines.

        Raises:
            ShaderError: there is no such kernel, or its file is missing or damaged.

        """
        key = " ".join([name, *(f"{axis}={value}" for axis, value in variant.items())])
        if key not in self._kernels:
            self._kernels[key] = self._load(key)
        return self._kernels[key]

    def _load(self, key: str) -> Kernel:
        entry = self._manifest["kernels"].get(key)
        if entry is None:
            raise ShaderError(f"there is no kernel '{key}'; if its shader was just written, {_REBUILD}")
        try:
            path = self._blobs / entry["file"]
            digest, push, spec = entry["sha256"], tuple(entry["push"]), tuple(entry["spec"])
            bindings = tuple(Binding(one["name"], one["access"]) for one in entry["bindings"])
            shared = _expression(entry["shared"], spec)
        except (KeyError, TypeError, ValueError) as error:
            raise ShaderError(
                f"the manifest's entry for kernel '{key}' is not one of this version; {_REBUILD}"
            ) from error
        try:
            code = path.read_bytes()
        except OSError as error:
            raise ShaderError(f"compiled shader {path.name} is missing; {_REBUILD}") from error
        if hashlib.sha256(code).hexdigest() != digest:
            raise ShaderError(f"compiled shader {path.name} is damaged; {_REBUILD}")
        return Kernel(key, code, bindings, push, spec, shared)


def _read_manifest(blobs: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((blobs / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise ShaderError(
            f"the shaders are not compiled (no readable manifest.json in {blobs.name}/); {_REBUILD}"
        ) from error
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(part), dict) for part in ("build", "kernels")):
        raise ShaderError(f"the manifest of compiled shaders is not one of this version; {_REBUILD}")
    return manifest


def _check_sources(sources: Path, build: Mapping[str, str]) -> None:
    for path in sorted([*sources.glob("*.comp"), *sources.glob("*.glsl")]):
        if build.get(path.name) != hashlib.sha256(path.read_bytes()).hexdigest():
            raise ShaderError(f"shaders/{path.name} was changed after the shaders were compiled; {_REBUILD}")


@functools.cache
def registry() -> KernelRegistry:
    """The registry of the installed package, read once per process."""
    return KernelRegistry()
