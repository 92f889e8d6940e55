"""The packages for pip: what they hold, and that a bare environment computes with nothing but them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import vkdecode

ROOT = Path(__file__).resolve().parents[2]
SPIRV = ROOT / "vkdecode/gpu/spirv"
MODEL = ROOT / "tests/data/tiny/llama"
# What comes from the environment that runs the tests; the two packages under test never do.
UNDER_TEST = ("vkdecode", "kp", "__editable__", "__pycache__")
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "tests")
REMEDY = "run `make setup` in a clone, else `python -m vkdecode.gpu.build_kompute --install`\n"

GENERATE = """
import json, sys
import kp, numpy, vkdecode as vk
arrays = numpy.load(sys.argv[1] + "/expected.npz")
with vk.load(sys.argv[1]) as model:
    ids = vk.generate(model, arrays["input_ids"].tolist(), max_tokens=4).token_ids
print(json.dumps({
    "files": [vk.__file__, kp.__file__], "version": vk.__version__, "kompute": kp.__version__,
    "ids": ids, "first": int(arrays["logits"][-1].argmax()),
}))
"""


def bare(**more: str) -> dict[str, str]:
    """An environment with no compiler, no shader compiler and nothing else on the PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    return {**kept, "PATH": "/nonexistent", **more}


def run(
    *command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of this checkout, since building leaves files of its own beside the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*NOT_COPIED))
    done = run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, copy, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return only(folder, "*.tar.gz")


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(sdist.parent)
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


def build_wheel(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build a wheel where neither a compiler nor a shader compiler is to be found."""
    words = ("-m", "build", "--wheel", "--no-isolation", "--outdir", target, source)
    return run(sys.executable, *words, cwd=target, environment=bare())


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = build_wheel(unpacked, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return only(folder, "*.whl")


@pytest.fixture(scope="module")
def kompute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kompute's wheel; set-up has built it, so that this takes it from the cache."""
    folder = tmp_path_factory.mktemp("kompute")
    done = run(sys.executable, "-I", ROOT / "vkdecode/gpu/build_kompute.py", "--output", folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    return only(folder, "*.whl")


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with vkdecode's wheel, and without Kompute.

    The packages that it needs are those of the environment that runs the tests, less the two under test.
    """
    folder = tmp_path_factory.mktemp("venv")
    done = run(sys.executable, "-m", "venv", "venv", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    interpreter = folder / "venv/bin/python"
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("platlib")).iterdir():
        if not entry.name.startswith(UNDER_TEST):
            (borrowed / entry.name).symlink_to(entry)
    only(folder, "venv/lib/python*/site-packages").joinpath("borrowed.pth").write_text(f"{borrowed}\n")
    install(interpreter, wheel)
    return interpreter


def install(python: Path, wheel: Path) -> None:
    words = ("-m", "pip", "install", "--no-deps", "--no-index", wheel)
    done = run(python, *words, cwd=python.parent, environment=bare())
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_packages_hold_the_compiled_shaders(wheel: Path, sdist: Path) -> None:
    blobs = {f"vkdecode/gpu/spirv/{path.name}" for path in SPIRV.iterdir() if path.is_file()}
    assert "vkdecode/gpu/spirv/manifest.json" in blobs and len(blobs) > 100
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    assert blobs <= in_wheel
    top = {name.split("/")[0] for name in in_wheel}
    assert top == {"vkdecode", f"vkdecode-{vkdecode.__version__}.dist-info"}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"shaders/{path.name}" for path in (ROOT / "shaders").iterdir()}
    assert blobs | sources | {"build_shaders.py", "build_package.py", "LICENSE", "README.md"} <= in_sdist


def test_without_shader_compiler_only_an_editable_build_goes_through(unpacked: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for entry in unpacked.iterdir():
        if entry.name != "vkdecode":
            (source / entry.name).symlink_to(entry)
    package = source / "vkdecode"
    (package / "gpu").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0"\n')
    # The backend looks beside itself, so it must be a file here and not a link.
    for name in ("build_package.py", "build_shaders.py"):
        (source / name).unlink()
        (source / name).write_bytes((unpacked / name).read_bytes())
    done = build_wheel(source, tmp_path)
    assert done.returncode != 0 and not list(tmp_path.glob("*.whl"))
    told = [line for line in (done.stdout + done.stderr).splitlines() if "glslang-tools" in line]
    assert len(told) == 1 and told[0].startswith("vkdecode cannot be built: the shaders are not compiled")
    assert "Traceback" not in done.stdout + done.stderr

    # An editable installation goes through: set-up compiles the shaders after it.
    words = ("-c", "import build_package; print(build_package.build_editable('..'))")
    editable = run(sys.executable, *words, cwd=source, environment=bare())
    assert editable.returncode == 0 and len(list(tmp_path.glob("*.whl"))) == 1, editable.stderr


def test_a_bare_environment_says_what_to_run_and_then_generates(python: Path, kompute: Path, tmp_path: Path) -> None:
    program = python.with_name("vkdecode")
    done = run(program, "--version", cwd=tmp_path, environment=bare())
    assert (done.returncode, done.stdout) == (0, f"vkdecode {vkdecode.__version__}\n"), done.stderr

    # Any source code found on the way here would have been this checkout's, so each command runs outside of it.
    done = run(program, "generate", MODEL, "--prompt", "x", cwd=tmp_path, environment=bare())
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.endswith(REMEDY) and "Traceback" not in done.stderr, done.stderr

    install(python, kompute)
    done = run(python, "-c", GENERATE, MODEL, cwd=tmp_path, environment=bare())
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(Path(file).is_relative_to(python.parents[1]) for file in told["files"]), told
    assert told["version"] == vkdecode.__version__ and "+vkdecode" in told["kompute"]
    assert told["ids"][0] == told["first"] and len(told["ids"]) == 4

    missing = run(python, "-m", "vkdecode.gpu.build_kompute", "--again", cwd=tmp_path, environment=bare())
    assert missing.returncode == 1
    assert missing.stderr.splitlines()[-1].startswith("build_kompute: error: Kompute cannot be built without cmake;")
