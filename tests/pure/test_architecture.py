"""The rules that hold the package together: floors, the one user of Kompute, module length, no machine's own paths."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vkdecode"
FLOORS = {
    "cli": 8,
    "chat": 8,
    "info": 8,
    "options": 8,
    "bench": 8,
    "doctor": 8,
    "generate": 7,
    "conversation": 7,
    "conversion": 7,
    "loading": 7,
    "token_loop": 7,
    "token_model": 7,
    "text": 6,
    "sampling": 6,
    "models": 5,
    "decode": 4,
    "runtime": 3,
    "graph": 2,
    "gpu": 1,
    "weights": 0,
    "errors": 0,
}
ENTRANCES = ("__init__.py", "__main__.py")
GPU_BINDINGS = {"kp", "vulkan"}
LINE_LIMIT = 450


def imports(path: str, source: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Line, absolute dotted module and names taken from it of every import in a file.

    By statement, wherever it stands, or by a call with a literal name.
    """
    package = list(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module, tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value), ()


def circles(files: Mapping[str, str]) -> list[str]:
    """Modules among the given sources that import one another, one line for each circle of them.

    An import inside a function or for type checking counts like any other. A name taken from a package means the module
    of that name where there is one, else the package's own file. The root is left out: it is for those outside.
    """
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    modules.pop(PACKAGE, None)
    needs: dict[str, set[str]] = {}
    for name, path in modules.items():
        named = {
            f"{module}.{one}" if f"{module}.{one}" in modules else module
            for _, module, taken in imports(path, files[path])
            for one in taken or ("",)
        }
        needs[name] = named & modules.keys() - {name}
    reached = {name: _closure(needs, name) for name in needs}
    found = {frozenset(two for two in reached[one] if one in reached[two]) for one in needs if one in reached[one]}
    return sorted(" <-> ".join(sorted(one)) for one in found)


def _closure(needs: Mapping[str, set[str]], start: str) -> set[str]:
    """What a module needs, directly or through others; itself only where that leads back."""
    found: set[str] = set()
    open_ends = set(needs[start])
    while open_ends:
        found |= open_ends
        open_ends = {two for one in open_ends for two in needs[one]} - found
    return found


def floor_violations(files: Mapping[str, str]) -> list[str]:
    """What breaks the floors in the given sources (path in the repository to text), one line each."""
    found = []
    for path, source in files.items():
        inside = Path(path).parts[1:]
        own_part = inside[0].removesuffix(".py")
        entrance = len(inside) == 1 and inside[0] in ENTRANCES
        if not entrance and own_part not in FLOORS:
            found.append(f"{path}: {own_part} has no floor; give it one in docs/architecture.md and here")
            continue
        for line, name, _ in imports(path, source):
            top, _, rest = name.partition(".")
            part = rest.partition(".")[0]
            where = f"{path}:{line}"
            if top in GPU_BINDINGS and own_part != "gpu":
                found.append(f"{where}: only {PACKAGE}/gpu may import {top}")
            elif top != PACKAGE or entrance:
                continue
            elif not part:
                found.append(f"{where}: import from the module that defines the name, not from the package root")
            elif part not in FLOORS:
                found.append(f"{where}: {name} has no floor")
            elif FLOORS[part] > FLOORS[own_part]:
                found.append(f"{where}: {own_part} (floor {FLOORS[own_part]}) imports {part} (floor {FLOORS[part]})")
    return found


def overlong(files: Mapping[str, str]) -> list[str]:
    """The files with more lines than a reader should have to hold in mind."""
    return [f"{path}: {count} lines" for path, text in files.items() if (count := text.count("\n")) > LINE_LIMIT]


def machine_paths(text: str) -> list[str]:
    """Absolute paths that exist on a developer's machine only."""
    return re.findall(r"(?<![\w.~*-])/(?:work|root|tmp/bash)(?:/|_)[^\s'\"]*", text)


def sources(*patterns: str) -> dict[str, str]:
    """Text of the files in the repository that match, by path."""
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def tracked_files() -> list[Path]:
    """All files under version control that are there now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_imports_point_down_and_only_gpu_uses_kompute() -> None:
    files = sources(f"{PACKAGE}/**/*.py")
    assert files
    assert floor_violations(files) == []


def test_every_part_has_its_floor_in_the_document_too() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Floors")[2].partition("\n## ")[0]
    told = {
        part: int(floor)
        for parts, floor in re.findall(r"((?:`\w+`,?\s)+)\((\d)\)", section)
        for part in re.findall(r"\w+", parts)
    }
    assert told == FLOORS
    names = {path.name.removesuffix(".py") for path in (ROOT / PACKAGE).iterdir() if path.suffix == ".py"}
    names |= {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert names - {one.removesuffix(".py") for one in ENTRANCES} == FLOORS.keys()


def test_no_modules_import_one_another() -> None:
    files = sources(f"{PACKAGE}/**/*.py")
    assert sum(path.count("/") > 1 for path in files) > 100
    assert circles(files) == []


@pytest.mark.parametrize("back", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}", "class A:\n    {}"])
@pytest.mark.parametrize(
    "statement",
    [
        "from vkdecode.gpu.a import x",
        "from vkdecode.gpu import a",
        "from . import a",
        "from .a import x",
        "import vkdecode.gpu.a",
        "importlib.import_module('vkdecode.gpu.a')",
    ],
)
def test_modules_that_import_one_another_are_found(back: str, statement: str) -> None:
    files = {
        "vkdecode/__init__.py": "from vkdecode.gpu import x\nfrom vkdecode import __main__",
        "vkdecode/__main__.py": "from vkdecode import x",
        "vkdecode/gpu/__init__.py": "from vkdecode.gpu.a import x\nfrom vkdecode.gpu.c import z",
        "vkdecode/gpu/a.py": "from vkdecode.gpu.b import y\nimport numpy",
        "vkdecode/gpu/b.py": back.format(statement),
        "vkdecode/gpu/c.py": "from vkdecode.gpu.a import x\nfrom vkdecode.gpu.b import y",
    }
    assert circles(files) == ["vkdecode.gpu.a <-> vkdecode.gpu.b"]
    assert circles({**files, "vkdecode/gpu/b.py": back.format("pass")}) == []


def test_a_module_that_imports_its_own_package_is_found() -> None:
    """Its package imports it, and a third one closes a longer circle."""
    files = {
        "vkdecode/gpu/__init__.py": "from vkdecode.gpu.a import x",
        "vkdecode/gpu/a.py": "import vkdecode.gpu.deep.b",
        "vkdecode/gpu/deep/__init__.py": "",
        "vkdecode/gpu/deep/b.py": "from ...gpu import x",
        "vkdecode/graph/__init__.py": "from vkdecode.graph import a, b",
        "vkdecode/graph/a.py": "from vkdecode.graph.b import x\nfrom vkdecode.gpu import x",
        "vkdecode/graph/b.py": "",
    }
    assert circles(files) == ["vkdecode.gpu <-> vkdecode.gpu.a <-> vkdecode.gpu.deep.b"]


def test_examples_and_tools_leave_kompute_to_the_package() -> None:
    files = sources("examples/*.py", "bench/*.py", "build_shaders.py")
    imported = {name.partition(".")[0] for path, text in files.items() for _, name, _ in imports(path, text)}
    assert not imported & GPU_BINDINGS


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("vkdecode/graph/nodes.py", "from vkdecode.gpu import storage\nfrom ..models.llama import Llama", ":2: graph"),
        ("vkdecode/gpu/device.py", "from ..graph import nodes", "gpu (floor 1) imports graph (floor 2)"),
        ("vkdecode/gpu/deep/device.py", "from ...graph import nodes", "imports graph"),
        ("vkdecode/gpu/__init__.py", "from ..graph import nodes", "imports graph"),
        ("vkdecode/weights/a.py", "import vkdecode.gpu.device", "imports gpu"),
        ("vkdecode/errors.py", "from .gpu import device", "imports gpu"),
        ("vkdecode/decode/a.py", "def f():\n    from vkdecode.models import llama", ":2: decode"),
        ("vkdecode/decode/a.py", "if TYPE_CHECKING:\n    from vkdecode.models import llama", ":2: decode"),
        ("vkdecode/decode/a.py", "importlib.import_module('vkdecode.models')", "imports models"),
        ("vkdecode/models/a.py", "from vkdecode import Device", "package root"),
        ("vkdecode/models/a.py", "from .. import Device", "package root"),
        ("vkdecode/models/a.py", "import vkdecode as vk", "package root"),
        ("vkdecode/runtime/a.py", "import kp", "only vkdecode/gpu may import kp"),
        ("vkdecode/runtime/a.py", "try:\n    from vulkan import vkCreateInstance\nexcept ImportError: pass", "vulkan"),
        ("vkdecode/runtime/a.py", "__import__('kp')", "only vkdecode/gpu may import kp"),
        ("vkdecode/__init__.py", "import kp", "only vkdecode/gpu may import kp"),
        ("vkdecode/models/a.py", "from vkdecode.helpers import x", "vkdecode.helpers has no floor"),
        ("vkdecode/helpers.py", "", "helpers has no floor"),
    ],
)
def test_an_import_against_the_rules_is_found(path: str, source: str, complaint: str) -> None:
    (found,) = floor_violations({path: source})
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("vkdecode/gpu/device.py", "import kp\nimport vulkan\nfrom . import storage\nfrom .storage import Storage"),
        ("vkdecode/generate.py", "from vkdecode.sampling import a\nfrom .text.chat import b\nfrom .models import c"),
        ("vkdecode/text/a.py", "from ..sampling import a\nimport numpy"),
        (
            "vkdecode/cli.py",
            "from .chat import talk\nfrom vkdecode.errors import ClosedError\nimport vkdecode.decode",
        ),
        ("vkdecode/__init__.py", "from .cli import main\nfrom . import errors\nfrom vkdecode.models import load"),
        ("vkdecode/__main__.py", "from vkdecode import cli"),
        ("vkdecode/runtime/a.py", "import kpopular\nfrom vulkan_like import x"),
    ],
)
def test_an_import_within_the_rules_passes(path: str, source: str) -> None:
    assert floor_violations({path: source}) == []


def test_no_module_is_too_long() -> None:
    kinds = (
        f"{PACKAGE}/**/*.py",
        "tests/**/*.py",
        "examples/*.py",
        "bench/*.py",
        "*.py",
        "shaders/**/*.comp",
        "shaders/**/*.glsl",
    )
    assert overlong(sources(*kinds)) == []
    assert overlong({"a.py": "x\n" * LINE_LIMIT, "b.py": "x\n" * (LINE_LIMIT + 1)}) == ["b.py: 451 lines"]


def test_no_tracked_file_names_a_machine() -> None:
    found = {
        str(path.relative_to(ROOT)): paths
        for path in tracked_files()
        if (paths := machine_paths(path.read_bytes().decode("utf-8", "replace")))
    }
    assert found == {}


def test_a_machine_path_is_told_from_other_text() -> None:
    for path in ("work/main/x.py", "root/.cache", "tmp/bash_jobs/1"):
        assert machine_paths(f"open('/{path}') or '/elsewhere'") == [f"/{path}"]
    assert machine_paths("the framework/work/x, a/root/b, ../work/x, worked /workers/") == []
