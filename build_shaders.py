#!/usr/bin/env python3
"""Compile `shaders/*.comp` to SPIR-V inside the package, with a manifest of what each blob binds.

Usage: build_shaders.py [--force]

A shader lists its variants in `//! variants NAME=value,value ...` lines; each combination is compiled once. A word
value becomes the macro NAME_VALUE, a number becomes NAME=number. `//! only A=x or B=y` keeps the combinations for
which one of the terms holds. Needs only the standard library, `glslangValidator`, and `spirv-opt` where it is
installed (smaller code, faster pipelines).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "shaders"
OUTPUT = ROOT / "vkdecode" / "gpu" / "spirv"
TARGET = ["-V", "--target-env", "vulkan1.1"]

Variant = tuple[tuple[str, str], ...]

Expression = int | str | list["Expression"]
"""A number, a specialization constant, or an operation and what it is applied to."""

Definitions = dict[int, tuple[int, tuple[int, ...]]]
"""Types and constants of a SPIR-V module: the opcode, and the words behind the result's id and type."""

# The operations on specialization constants that `vkdecode/gpu/kernels.py` can compute, by their SPIR-V opcodes.
OPERATIONS = {
    128: "+",
    130: "-",
    132: "*",
    134: "/",
    137: "%",
    169: "?:",
    170: "==",
    171: "!=",
    172: ">",
    174: ">=",
    176: "<",
    178: "<=",
}


class BuildError(Exception):
    """A shader does not compile or does not follow the conventions; one line to print."""


@dataclass(frozen=True)
class Shader:
    """One source file and the variants it asks for."""

    name: str
    path: Path
    variants: tuple[Variant, ...]


def parse_shader(path: Path) -> Shader:
    """Read the `//!` lines of a shader."""
    axes: list[tuple[str, list[str]]] = []
    rules: list[list[tuple[str, str]]] = []
    for line in path.read_text().splitlines():
        if not line.startswith("//!"):
            continue
        keyword, *terms = line[3:].split()
        pairs = [(name, value) for name, _, value in (term.partition("=") for term in terms if term != "or")]
        if keyword == "variants":
            axes += [(name, values.split(",")) for name, values in pairs]
        elif keyword == "only":
            rules.append(pairs)
        else:
            raise BuildError(f"{path.name}: unknown directive '//! {keyword}'")
    names = [name for name, _ in axes]
    combinations = (
        tuple(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in axes))
    )
    kept = tuple(one for one in combinations if all(any(pair in one for pair in rule) for rule in rules))
    return Shader(path.stem, path, kept)


def kernel_key(name: str, variant: Variant) -> str:
    """The name under which the package looks a kernel up, e.g. `embed DTYPE=f16`."""
    return " ".join([name, *(f"{axis}={value}" for axis, value in variant)])


def macros(variant: Variant) -> list[str]:
    """Compiler options that define a variant's macros."""
    return [f"-D{axis}={value}" if value.isdigit() else f"-D{axis}_{value.upper()}=1" for axis, value in variant]


def reflect(code: bytes) -> dict[str, Any]:
    """Bindings (with access), push-constant members, specialization constants and shared memory of a SPIR-V module.

    Access comes from the NonWritable and NonReadable decorations that GLSL's `readonly` and `writeonly` produce, so a
    kernel that writes a storage it did not declare does not compile.
    """
    names: dict[int, str] = {}
    members: dict[tuple[int, int], str] = {}
    decorations: dict[int, dict[int, int]] = {}
    member_decorations: dict[int, set[int]] = {}
    variables: list[tuple[int, int, int]] = []
    defined: Definitions = {}
    for opcode, body in instructions(code):
        if opcode == 5:
            names[body[0]] = text(body[1:])
        elif opcode == 6:
            members[body[0], body[1]] = text(body[2:])
        elif opcode == 71:
            decorations.setdefault(body[0], {})[body[1]] = body[2] if len(body) > 2 else 1
        elif opcode == 72:
            member_decorations.setdefault(body[0], set()).add(body[2])
        elif opcode == 59:
            variables.append((body[1], body[0], body[2]))
        elif opcode in range(19, 39):  # types: the result comes first
            defined[body[0]] = opcode, body[1:]
        elif opcode in range(41, 53):  # constants: behind their type
            defined[body[1]] = opcode, body[2:]
    bindings: list[tuple[int, dict[str, str]]] = []
    push: list[str] = []
    shared: list[int] = []
    for variable, pointer, storage_class in variables:
        _, pointed_at = defined[pointer][1]
        marks = {**decorations.get(variable, {}), **dict.fromkeys(member_decorations.get(pointed_at, set()), 1)}
        if storage_class == 9:
            push = [name for (owner, _), name in sorted(members.items()) if owner == pointed_at]
        elif storage_class == 4:
            shared.append(pointed_at)
        elif 33 in marks:
            access = "read" if 24 in marks else "write" if 25 in marks else "readwrite"
            # A second declaration of a binding is another view of the same buffer; the first one names it.
            if any(number == marks[33] for number, _ in bindings):
                if access != "read":
                    raise BuildError(f"binding {marks[33]} is declared twice and not readonly")
                continue
            bindings.append((marks[33], {"name": members[pointed_at, 0], "access": access}))
    # local_size_x_id makes a nameless second constant with the id of WORKGROUP.
    constants = {target: names[target] for target, marks in decorations.items() if 1 in marks and target in names}
    spec = sorted((decorations[target][1], name) for target, name in constants.items())
    for what, order in (
        ("binding", [i for i, _ in sorted(bindings, key=lambda b: b[0])]),
        ("constant_id", [i for i, _ in spec]),
    ):
        if order != list(range(len(order))):
            raise BuildError(f"{what} numbers must count from 0 without a gap, not {order}")
    return {
        "bindings": [entry for _, entry in sorted(bindings, key=lambda b: b[0])],
        "push": push,
        "spec": [name for _, name in spec],
        "shared": shared_memory(shared, defined, constants),
    }


def instructions(code: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The instructions of a SPIR-V module: each one's opcode, and the words behind it."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    at = 5
    while at < len(words):
        count, opcode = words[at] >> 16, words[at] & 0xFFFF
        yield opcode, words[at + 1 : at + count]
        at += count


def shared_memory(types: list[int], defined: Definitions, constants: dict[int, str]) -> Expression:
    """The bytes of workgroup variables of these types.

    Vulkan holds them against its limit as the members of a block, in the order that takes most. Each is counted with
    the bytes that would let a member of the largest alignment follow.

    Args:
        types: of each variable.
        defined: the types and constants of the module.
        constants: its specialization constants by name.

    Raises:
        BuildError: a type or an expression that is not known here.

    """

    def count(one: int) -> Expression:
        opcode, body = defined[one]
        if one in constants:
            return constants[one]
        if opcode == 43:  # a constant
            return body[0]
        if opcode == 52 and body[0] in OPERATIONS:  # an operation on specialization constants
            return [OPERATIONS[body[0]], *map(count, body[1:])]
        what = f"operation {body[0]}" if opcode == 52 else f"constant of opcode {opcode}"
        raise BuildError(f"the length of a shared array: no rule for the SPIR-V {what}, see OPERATIONS")

    def layout(one: int) -> tuple[int, int, list[Expression]]:
        """The alignment, the bytes of one element, and how many there are as factors."""
        opcode, body = defined[one]
        if opcode in (20, 21, 22):  # bool, integer, float
            size = 4 if opcode == 20 else body[0] // 8
            return size, size, []
        if opcode == 23:  # vector
            size, _, _ = layout(body[0])
            return size * (2 if body[1] == 2 else 4), size * body[1], []
        if opcode == 28:  # array
            alignment, size, factors = layout(body[0])
            return alignment, -(-size // alignment) * alignment, [count(body[1]), *factors]
        raise BuildError(
            f"shared memory: no rule for the SPIR-V type of opcode {opcode}, only for numbers, vectors, arrays"
        )

    layouts = [layout(one) for one in types]
    largest = max((alignment for alignment, _, _ in layouts), default=1)
    sizes: list[Expression] = []
    for _, size, factors in layouts:
        if not factors:
            sizes.append(-(-size // largest) * largest)
            continue
        nbytes: Expression = ["*", size, *factors]
        sizes.append(["*", ["/", ["+", nbytes, largest - 1], largest], largest] if size % largest else nbytes)
    return ["+", *sizes] if sizes else 0


def text(words: tuple[int, ...]) -> str:
    """A SPIR-V literal string."""
    return struct.pack(f"<{len(words)}I", *words).split(b"\0", 1)[0].decode()


def sources_of(path: Path) -> list[Path]:
    """A shader and the files that it includes, directly or not."""
    found = [path]
    for one in found:
        names = re.findall(r'^ *#include "([^"]+)"', one.read_text(), re.MULTILINE)
        found += [file for file in (SOURCES / name for name in names) if file not in found]
    return found


def hash_of(*parts: bytes) -> str:
    """One hash of all of these."""
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def compile_one(shader: Shader, variant: Variant, scratch: Path, held: dict[str, Any]) -> dict[str, Any]:
    """Put one variant's blob into `scratch` and return its manifest entry; what is up to date is only copied.

    Args:
        shader: the source.
        variant: which variant of it.
        scratch: where to put the blob.
        held: the manifest entries of the last build.

    """
    key = kernel_key(shader.name, variant)
    file = "-".join([shader.name, *(value for _, value in variant)]) + ".spv"
    target = scratch / file
    sources = [one.read_bytes() for one in sources_of(shader.path)]
    made_from = hash_of(Path(__file__).read_bytes(), *sources, str(bool(shutil.which("spirv-opt"))).encode())
    old_entry: dict[str, Any] = held.get(key, {})
    if old_entry.get("made_from") == made_from and old_entry.get("file") == file and (OUTPUT / file).is_file():
        code = (OUTPUT / file).read_bytes()
        if hashlib.sha256(code).hexdigest() == old_entry.get("sha256"):
            target.write_bytes(code)
            return old_entry
    command = ["glslangValidator", *TARGET, f"-I{SOURCES}", *macros(variant), "-o", str(target), str(shader.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = next((line for line in done.stdout.splitlines() if line.startswith("ERROR")), done.stdout.strip())
        raise BuildError(f"{key}: {message}")
    try:
        interface = reflect(target.read_bytes())
    except BuildError as error:
        raise BuildError(f"{key}: {error}") from error
    entry = {"file": file, "made_from": made_from, **interface}
    if shutil.which("spirv-opt"):
        subprocess.run(["spirv-opt", "-O", str(target), "-o", str(target)], check=True, capture_output=True)
    return {**entry, "sha256": hashlib.sha256(target.read_bytes()).hexdigest()}


def source_hashes() -> dict[str, str]:
    """Hash of every file that the blobs are made from."""
    files = sorted([*SOURCES.glob("*.comp"), *SOURCES.glob("*.glsl")])
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def last_kernels(manifest: Path) -> dict[str, Any]:
    """The manifest entries of the last build; none where there was none."""
    try:
        return dict(json.loads(manifest.read_text())["kernels"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def up_to_date(manifest: Path, build: dict[str, str]) -> bool:
    """Whether every blob is there and was made from the present sources by this script."""
    try:
        held = json.loads(manifest.read_text())
        blobs = [(OUTPUT / entry["file"], entry["sha256"]) for entry in held["kernels"].values()]
        same = all(hashlib.sha256(path.read_bytes()).hexdigest() == digest for path, digest in blobs)
        return same and bool(blobs) and held["build"] == build
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build(force: bool) -> str:
    """Compile what is needed and return one line that says what was done."""
    manifest = OUTPUT / "manifest.json"
    inputs = {"build_shaders.py": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), **source_hashes()}
    if not force and up_to_date(manifest, inputs):
        return "shaders are up to date"
    if not shutil.which("glslangValidator"):
        raise BuildError(
            "the shaders are not compiled, and glslangValidator is not installed (Debian package glslang-tools; "
            "`make setup` installs it)"
        )
    shaders = [parse_shader(path) for path in sorted(SOURCES.glob("*.comp"))]
    jobs = [(shader, variant) for shader in shaders for variant in shader.variants]
    old = {} if force else last_kernels(manifest)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUTPUT) as folder:
        scratch = Path(folder)
        with ThreadPoolExecutor() as pool:
            entries = list(pool.map(lambda job: compile_one(job[0], job[1], scratch, old), jobs))
        kernels = {
            kernel_key(shader.name, variant): entry for (shader, variant), entry in zip(jobs, entries, strict=True)
        }
        # A process that reads the folder meanwhile finds the old blobs or the new ones, but never none.
        for entry in entries:
            (scratch / entry["file"]).replace(OUTPUT / entry["file"])
        held = {"build": inputs, "kernels": kernels}
        (scratch / "manifest.json").write_text(json.dumps(held, indent=1, sort_keys=True))
        (scratch / "manifest.json").replace(manifest)
        made = {entry["file"] for entry in entries}
        for stale in OUTPUT.glob("*.spv"):
            if stale.name not in made:
                stale.unlink()
    new = sum(entry is not old.get(key) for key, entry in kernels.items())
    return f"compiled {new} of {len(jobs)} kernels from {len(shaders)} shaders"


def main() -> int:
    """Build and report; a build error is one line and exit status 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--force", action="store_true", help="compile even what is up to date")
    try:
        print(build(parser.parse_args().force))
    except BuildError as error:
        print(f"build_shaders.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
