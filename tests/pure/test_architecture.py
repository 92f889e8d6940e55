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
    "cli": 7,
    "chat": 7,
    "info": 7,
    "options": 7,
    "server": 7,
    "generate": 6,
    "sampling": 6,
    "conversation": 6,
    "conversion": 6,
    "loading": 6,
    "bench": 7,
    "doctor": 7,
    "token_loop": 6,
    "token_model": 6,
    "text": 6,
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


def imported_modules(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import in a file, by statement or by a call with a literal name."""
    package = list(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


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
        for line, name in imported_modules(path, source):
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


def test_examples_and_tools_leave_kompute_to_the_package() -> None:
    files = sources("examples/*.py", "bench/*.py", "build_shaders.py")
    imported = {name.partition(".")[0] for path, text in files.items() for _, name in imported_modules(path, text)}
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
