#!/usr/bin/env python3
"""Build the wheel of Kompute that vkdecode runs on: release 0.9.0 with a barrier that Python can record.

Usage: python -m vkdecode.gpu.build_kompute [--install] [--output FOLDER] [--again]

The release on PyPI is source only. Its Python module cannot order two dispatches, holds the interpreter's lock while
the device works, and records a barrier before each dispatch that makes it wait for all earlier ones. The edits below
change just that. A finished wheel is kept in the user's cache folder, where every clone and environment finds it.
Needs the standard library, pip, and to build: CMake, a C++ compiler and the headers of Python, Vulkan and fmt.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

RELEASE = "0.9.0"
PATCH = 1
# With a version of its own, no copy of the plain release in a cache of pip's is ever taken for it.
VERSION = f"{RELEASE}+vkdecode{PATCH}"

GIL_FREE = "py::call_guard<py::gil_scoped_release>()"
BARRIER_CLASS = """\
    // The masks are plain numbers, Vulkan's own, so that several can be combined.
    py::class_<kp::OpMemoryBarrier,
               kp::OpBase,
               std::shared_ptr<kp::OpMemoryBarrier>>(m, "OpMemoryBarrier")
      .def(py::init([](const std::vector<std::shared_ptr<kp::Tensor>>& tensors,
                       uint32_t src_access,
                       uint32_t dst_access,
                       uint32_t src_stage,
                       uint32_t dst_stage,
                       bool on_primary) {
               return std::make_shared<kp::OpMemoryBarrier>(
                 tensors,
                 static_cast<vk::AccessFlagBits>(src_access),
                 static_cast<vk::AccessFlagBits>(dst_access),
                 static_cast<vk::PipelineStageFlagBits>(src_stage),
                 static_cast<vk::PipelineStageFlagBits>(dst_stage),
                 on_primary);
           }),
           py::arg("tensors"),
           py::arg("src_access"),
           py::arg("dst_access"),
           py::arg("src_stage"),
           py::arg("dst_stage"),
           py::arg("on_primary") = true);

"""
# The loop of OpAlgoDispatch::record. Barriers are recorded where a plan needs them. This one's source stage is the
# transfer stage, and there are drivers (RADV) on which that waits for every dispatch before it.
BARRIER_LOOP = """\
    // Barrier to ensure the data is finished writing to buffer memory
    for (const std::shared_ptr<Tensor>& tensor :
         this->mAlgorithm->getTensors()) {
        tensor->recordPrimaryBufferMemoryBarrier(
          commandBuffer,
          vk::AccessFlagBits::eTransferWrite,
          vk::AccessFlagBits::eShaderRead,
          vk::PipelineStageFlagBits::eTransfer,
          vk::PipelineStageFlagBits::eComputeShader);
    }

"""


def evaluates(lambda_: str, doc: str) -> tuple[str, str]:
    """The edit by which a method of Sequence no longer holds the interpreter's lock while it waits."""
    text = f"{lambda_},\n        DOC(kp, Sequence, {doc}))"
    return text, f"{text[:-1]},\n        {GIL_FREE})"


# File, text that stands in it exactly once, text to put there.
EDITS: list[tuple[str, str, str]] = [
    ("setup.py", f"version='{RELEASE}'", f"version='{VERSION}'"),
    # There are no wheels of numpy 1 for Python 3.13, and Kompute works with numpy 2.
    ("setup.py", '"numpy<2.0.0"', '"numpy"'),
    # A comma is missing, so that CMake was not told which Python to build for. pybind11 is not told about either.
    (
        "setup.py",
        "'-DKOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON'\n",
        "'-DKOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON',\n"
        "                      '-DPython_EXECUTABLE=' + sys.executable,\n"
        "                      '-Dpybind11_DIR=' + __import__('pybind11').get_cmake_dir(),\n",
    ),
    (
        "python/src/main.cpp",
        "    py::class_<kp::OpMult, kp::OpBase,",
        f"{BARRIER_CLASS}    py::class_<kp::OpMult, kp::OpBase,",
    ),
    ("python/src/main.cpp", *evaluates("[](kp::Sequence& self) { return self.eval(); }", "eval")),
    ("python/src/main.cpp", "DOC(kp, Sequence, eval_2))", f"DOC(kp, Sequence, eval_2),\n        {GIL_FREE})"),
    ("python/src/main.cpp", *evaluates("[](kp::Sequence& self) { return self.evalAwait(); }", "evalAwait")),
    (
        "python/src/main.cpp",
        *evaluates("[](kp::Sequence& self, uint32_t wait) { return self.evalAwait(wait); }", "evalAwait"),
    ),
    (
        "python/src/main.cpp",
        '    auto atexit = py::module_::import("atexit");\n',
        f'    m.attr("vkdecode_patch") = {PATCH};\n\n    auto atexit = py::module_::import("atexit");\n',
    ),
    ("src/OpAlgoDispatch.cpp", BARRIER_LOOP, ""),
]

# Another release of pybind11 may not take this module's sources.
BUILD_SYSTEM = """\
[build-system]
requires = ["setuptools", "wheel", "pybind11==2.13.6"]
build-backend = "setuptools.build_meta"
"""

# Kompute's build clones from the network what is not switched off here. With the debug layers compiled in, every device
# would load the Khronos validation layer wherever it is installed.
OPTIONS = {
    "KOMPUTE_OPT_INSTALL": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_FMT": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_PYBIND11": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_VULKAN_HEADER": "OFF",
    "KOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK": "ON",
    "KOMPUTE_OPT_DISABLE_VK_DEBUG_LAYERS": "ON",
    # With fmt compiled in and its library left out, the wheel needs nothing but Vulkan's loader where it is installed.
    "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -DFMT_HEADER_ONLY",
    "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} -Wl,--as-needed",
}


class BuildError(Exception):
    """The wheel cannot be built or installed; one line to print, and the exit status."""

    def __init__(self, line: str, status: int = 1) -> None:
        super().__init__(line)
        self.status = status


def apply_edits(source: Path) -> None:
    """Change the unpacked release.

    Raises:
        BuildError: a text to replace is not there exactly once, so this is not the release that the edits are for.

    """
    for name, anchor, replacement in EDITS:
        file = source / name
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if text.count(anchor) != 1:
            raise BuildError(
                f"{name} of Kompute should hold {anchor.strip().splitlines()[0]!r} once but holds it "
                f"{text.count(anchor)} times; vkdecode's edits are made for release {RELEASE} as it is on PyPI"
            )
        file.write_text(text.replace(anchor, replacement), encoding="utf-8")
    (source / "pyproject.toml").write_text(BUILD_SYSTEM, encoding="utf-8")


def pip(*arguments: str, remedy: str = "put the cause right and run this again") -> None:
    """Run this Python's pip, with what it prints on standard error; a failure is an error that ends with `remedy`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    environment = {**os.environ, **OPTIONS}
    # CMake looks for Python in the activated environment before anywhere else.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if sys.prefix != sys.base_prefix:
        environment["VIRTUAL_ENV"] = sys.prefix
    status = subprocess.run(command, env=environment, stdout=sys.stderr, stdin=subprocess.DEVNULL).returncode
    if status:
        # As a shell says it: a signal that ended pip gives 128 and its number.
        raise BuildError(f"pip {arguments[0]} failed, as shown above; {remedy}", 128 - status if status < 0 else status)


def cache_folder() -> Path:
    """Where the sources and the wheels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vkdecode" / "kompute"


def fetch(cache: Path) -> Path:
    """The release's source archive, from pip's index unless the cache holds it."""
    archive = cache / f"kp-{RELEASE}.tar.gz"
    if not archive.is_file():
        # A download that is interrupted leaves nothing under this name.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            pip("download", "--no-deps", "--no-binary", "kp", "--dest", scratch, f"kp=={RELEASE}")
            (Path(scratch) / archive.name).replace(archive)
    return archive


def kept_in(cache: Path) -> Path:
    """The folder for the wheel that this script makes for this Python."""
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return cache / f"{sysconfig.get_config_var('SOABI')}-{script}"


def kept_wheel(cache: Path) -> Path | None:
    """The wheel that was built earlier."""
    return next(kept_in(cache).glob("*.whl"), None)


def build(cache: Path) -> Path:
    """Build the wheel and keep it in `cache`."""
    for tool, package in (("cmake", "cmake"), ("c++", "g++")):
        if not shutil.which(tool):
            raise BuildError(f"Kompute cannot be built without {tool}; install it (Debian package {package})")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        with tarfile.open(fetch(cache)) as archive:
            # Older Pythons have no filters.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            archive.extractall(scratch)
        source, built = Path(scratch) / f"kp-{RELEASE}", Path(scratch) / "built"
        apply_edits(source)
        needs = "it needs a C++ compiler and headers (Debian packages g++ python3-dev libvulkan-dev libfmt-dev)"
        # --use-pep517: the pip of Debian 12 would build with what happens to be installed. --no-cache-dir: the wheel is
        # kept here, and pip's cache would know it only by the name of this folder, which is never used again.
        options = ("--no-deps", "--use-pep517", "--no-cache-dir")
        pip("wheel", *options, "--wheel-dir", str(built), str(source), remedy=needs)
        shutil.rmtree(kept_in(cache), ignore_errors=True)
        built.replace(kept_in(cache))
    wheel = kept_wheel(cache)
    if wheel is None:
        raise BuildError(f"pip made no wheel of Kompute in {kept_in(cache)}")
    return wheel


def install(wheel: Path) -> str | None:
    """Install a wheel into the Python that runs this; return why it cannot be imported, or None if it can."""
    # --no-deps: numpy is vkdecode's to ask for.
    pip("install", "--no-deps", "--force-reinstall", str(wheel))
    check = [sys.executable, "-c", f"import kp; assert kp.vkdecode_patch == {PATCH}"]
    done = subprocess.run(check, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else None


def provide(cache: Path, *, into_python: bool, again: bool) -> Path:
    """Have the wheel, and have it installed if asked; return where it is.

    Args:
        cache: where wheels are kept.
        into_python: install it.
        again: build it even if it was built before.

    """
    kept = None if again else kept_wheel(cache)
    wheel = kept or build(cache)
    if into_python:
        problem = install(wheel)
        if problem and kept:
            print("the copy that was kept does not fit this system; building it again", file=sys.stderr)
            wheel = build(cache)
            problem = install(wheel)
        if problem:
            raise BuildError(f"Kompute was built and installed but does not load: {problem}")
    return wheel


def main() -> int:
    """Build, install and copy as asked, and print where the wheel is; an error is one line and its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vkdecode.gpu.build_kompute", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--install", action="store_true", help="install the wheel into the Python that runs this")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="put a copy of the wheel there")
    parser.add_argument("--again", action="store_true", help="build it even if it was built before")
    options = parser.parse_args()
    try:
        wheel = provide(cache_folder(), into_python=options.install, again=options.again)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            wheel = Path(shutil.copy(wheel, options.output))
    except BuildError as error:
        print(f"build_kompute: error: {error}", file=sys.stderr)
        return error.status
    except (OSError, RuntimeError, tarfile.TarError) as error:
        print(f"build_kompute: error: {error}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
