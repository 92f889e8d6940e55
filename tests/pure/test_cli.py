from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import END, START, FakeModel, FakeTokenizer, fake_modules
from model_files import TINY
from typer.testing import CliRunner

from vkdecode import cli
from vkdecode.errors import VkDecodeError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class FakeInfo:
    ordinal: int = 0
    name: str = "Fake [GPU] with a name that is longer than a narrow terminal would show on one line"
    vendor: str = "ACME"
    kind: str = "discrete"
    driver: str = "acme 1.0"
    heap_bytes: int = 8 * 2**30


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> type[Use]:
    Use.monkeypatch = monkeypatch
    return Use


class Use:
    """Runs the command line against a fake model; `code`, `out` and `err` are what it left."""

    monkeypatch: pytest.MonkeyPatch

    def __init__(
        self,
        model: FakeModel | BaseException,
        *args: str,
        stdin: str | bytes = "",
        devices: tuple[FakeInfo, ...] = (),
        arguments: bool = True,
    ) -> None:
        self.modules = fake_modules(model, devices)
        for name, module in self.modules.items():
            self.monkeypatch.setitem(sys.modules, name, module)
        result = CliRunner().invoke(cli.app, list(args), input=stdin)
        self.error = None if isinstance(result.exception, SystemExit) else result.exception
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr


def process(
    script: str, *args: str, stdin: bytes = b"", stdout: int = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` and then the command line in a process of its own, with more environment variables."""
    imports = "import sys, signal; from fakes import *; from vkdecode.errors import *"
    code = f"{imports}\n{script}\nfrom vkdecode.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, *args],
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment(**variables),
        timeout=60,
    )
    return subprocess.CompletedProcess(args, ended.returncode, (ended.stdout or b"").decode(), ended.stderr.decode())


def environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUTF8": "1", **variables}


def test_generate_prints_the_text_and_on_stderr_the_speed(use: type[Use]) -> None:
    model = FakeModel("Paris.")
    run = use(model, "generate", "some.gguf", "--prompt", "Capital?", "--device", "1", "--weights", "f16")
    assert (run.code, run.out) == (0, "Paris.\n")
    assert re.fullmatch(r"prompt 9 tokens, .* tok/s \| generated 6 tokens, .* tok/s\n", run.err)
    loaded = vars(run.modules["vkdecode.loading"])["loaded"]
    assert vars(loaded) == {"path": "some.gguf", "device": "1", "weights": "f16"}
    assert model.closed and all(kv.closed for kv in model.caches)


def test_generate_reads_standard_input_and_drops_one_newline(use: type[Use]) -> None:
    model = FakeModel("x")
    assert use(model, "generate", "m", "-p", "-", stdin="two\nlines\n\n").code == 0
    assert model.fed[0][1:] == list(b"two\nlines\n")


def test_generate_passes_its_limits_on(use: type[Use]) -> None:
    model = FakeModel("abcdef")
    run = use(model, "generate", "m", "-p", "p", "-n", "5", "--stop", "ef", "--stop", "cd", "--max-seq-len", "50")
    assert run.out == "ab\n"
    assert [kv.max_seq_len for kv in model.caches] == [50]
    assert use(FakeModel("abcdef"), "generate", "m", "-p", "p", "-n", "5").out == "abcde\n"
    hot = ["generate", "m", "-p", "p", "-n", "9", "-t", "100", "--seed"]
    drawn = [use(FakeModel("a" * 9), *hot, seed).out for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    narrow = ["--top-k", "1"], ["--top-p", "0.001"], ["--min-p", "1"]
    assert {use(FakeModel("a" * 9), *hot, "1", *option).out for option in narrow} == {"aaaaaaaaa\n"}


def test_a_model_without_a_tokenizer_prints_token_ids(use: type[Use]) -> None:
    model = FakeModel([7, 8, 9])
    model.tokenizer = None
    run = use(model, "generate", "m", "--token-ids", "1, 2 3", "-n", "3")
    assert (run.out, model.fed[0]) == ("7 8 9\n", [1, 2, 3])


def test_generate_leaves_its_output_to_a_pipe_as_it_is(use: type[Use]) -> None:
    assert use(FakeModel("a\x1b[1mb"), "generate", "m", "-p", "p").out == "a\x1b[1mb\n"


def test_chat_answers_once(use: type[Use]) -> None:
    model = FakeModel("Paris.")
    run = use(model, "chat", "m", "--prompt", "-", "--system", "Short.", "--max-seq-len", "90")
    answer, speed = run.out.splitlines()
    assert (run.code, answer) == (0, "Paris.")
    assert re.fullmatch(r"prompt \d+ tokens, .* tok/s \| generated 6 tokens, .* tok/s", speed)
    assert model.fed[0] == [START, *b"system:Short.", END, START, *b"user:-", END, START, *b"assistant:"]
    assert [kv.max_seq_len for kv in model.caches] == [90]
    assert model.closed and all(kv.closed for kv in model.caches)


def test_chat_answers_standard_input_line_by_line(use: type[Use]) -> None:
    model = FakeModel("one")
    run = use(model, "chat", "m", stdin="first\n\nsecond\n/exit\nthird\n")
    assert run.code == 0
    assert run.out.count("tok/s | generated") == 2
    assert run.out.startswith("one\nprompt ") and ">>>" not in run.out
    assert model.fed[4] == [END, START, *b"user:second", END, START, *b"assistant:"]


def test_devices_as_a_table_and_as_json(use: type[Use]) -> None:
    two = (FakeInfo(), FakeInfo(1, "Other"))
    table = use(FakeModel(), "devices", devices=two)
    for text in (FakeInfo.name, "ACME", "discrete", "8.0 GiB", "acme 1.0", "Other"):
        assert text in table.out
    parsed = json.loads(use(FakeModel(), "devices", "--json", devices=two).out)
    assert [(device["ordinal"], device["heap_bytes"]) for device in parsed] == [(0, 8 * 2**30), (1, 8 * 2**30)]


def test_no_device_is_an_error_in_a_table_and_an_empty_list_in_json(use: type[Use]) -> None:
    with_table = use(FakeModel(), "devices")
    assert isinstance(with_table.error, VkDecodeError)
    assert "no Vulkan device" in str(with_table.error)
    assert json.loads(use(FakeModel(), "devices", "--json").out) == []


def test_convert_says_what_it_wrote(use: type[Use], tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    run = use(AssertionError("loaded"), "convert", str(TINY / "llama"), str(target), "--weights", "q4_0")
    assert (run.code, run.err) == (0, "")
    assert run.out == f"wrote {target}: 0.1 MB of weights, tensors: 2 q8_0, 5 f32, 14 q4_0\n"
    assert target.is_file()
    again = use(AssertionError("loaded"), "convert", str(TINY / "llama"), str(target))
    assert isinstance(again.error, VkDecodeError)
    assert "exists already; give another target, or ask for overwriting (--overwrite)" in str(again.error)
    size = target.stat().st_size
    assert use(AssertionError("loaded"), "convert", str(TINY / "llama"), str(target), "--overwrite").code == 0
    assert target.stat().st_size > 2 * size


def test_a_conversion_at_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    code = "from vkdecode.cli import main; main()"
    terminal = PseudoTerminal(code, "convert", str(TINY / "llama"), str(tmp_path / "m.gguf"))
    terminal.wait_for(r"converting .*wrote .*MB of weights")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    "args",
    [
        ["convert", "m"],
        ["generate", "m", "-p", "x", "--max-tokens", "0"],
        ["generate", "m", "-p", "x", "--token-ids", "1"],
        ["generate", "m"],
        ["generate"],
        ["chat", "m", "--max-seq-len", "0"],
        ["chat", "m", "--temperature", "warm"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_exit_code_2_before_anything_is_loaded(use: type[Use], args: list[str]) -> None:
    run = use(AssertionError("loaded"), *args)
    assert run.code == 2
    assert "Error: " in run.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chat", "m", "-p", "x", "--temperature", "nan"], "temperature is nan"),
        (["chat", "m", "-p", "x", "--top-p", "0"], "top_p is 0"),
        (["generate", "m", "-p", "x", "--seed", "-1"], "seed is -1"),
        (["generate", "m", "-p", "x", "--top-k", "-1"], "top_k is -1"),
        (["generate", "m", "--token-ids", "1,x"], "--token-ids '1,x'"),
        (["convert", "m", "m.gguf", "--weights", "q3"], "weights must be one of"),
        (["convert", "no-such-model", "m.gguf"], "no-such-model does not exist"),
    ],
)
def test_values_out_of_range_are_named_before_anything_is_loaded(use: type[Use], args: list[str], words: str) -> None:
    run = use(AssertionError("loaded"), *args)
    assert isinstance(run.error, VkDecodeError)
    assert words in str(run.error)


def test_a_model_without_a_chat_template_points_to_generate(use: type[Use]) -> None:
    model = FakeModel(tokenizer=FakeTokenizer(chat_template=None))
    run = use(model, "chat", "m", "-p", "x")
    assert "use generate" in str(run.error) and "--plain" in str(run.error)
    assert model.closed


def test_plain_chat_goes_on_with_the_text(use: type[Use]) -> None:
    model = FakeModel("b" * 200, tokenizer=FakeTokenizer(chat_template=None))
    run = use(model, "chat", "m", "--plain", "-p", "a")
    assert run.code == 0
    assert run.out.startswith("b" * 128 + "\n(cut off")
    assert model.fed[0] == [256, *b"a"]
    assert use(FakeModel("b" * 200), "chat", "m", "--plain", "-p", "a", "-n", "3").out.startswith("bbb\n")


def test_an_error_is_one_line_and_exit_code_1() -> None:
    for args in (["generate", "m", "-p", "x"], ["chat", "m", "-p", "x"], ["chat", "m"]):
        ended = process(r"install(ModelFileError('m: no\nmodel \x1b[0m'))", *args)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == "vkdecode: error: m: no model ␛[0m\n"


def test_a_fault_asks_for_a_report_and_shows_the_traceback_on_request() -> None:
    ended = process("install(KeyError('k'))", "generate", "m", "-p", "x")
    assert ended.returncode == 70
    assert len(ended.stderr.splitlines()) == 1
    assert "internal error: KeyError: 'k'" in ended.stderr and "VKDECODE_DEBUG=1" in ended.stderr
    for kind in ("KeyError", "ModelFileError"):
        ended = process(f"install({kind}('k'))", "generate", "m", "-p", "x", VKDECODE_DEBUG="1")
        assert "Traceback" in ended.stderr


@pytest.mark.parametrize("args", [["generate", "m", "-p", "x"], ["chat", "m", "-p", "x"]])
def test_ctrl_c_is_exit_code_130_without_a_message(args: list[str]) -> None:
    ended = process("install(FakeModel('abc', failures={1: lambda: signal.raise_signal(signal.SIGINT)}))", *args)
    assert ended.returncode == 130
    assert ended.stdout.startswith("a")
    assert "Traceback" not in ended.stderr and "rror" not in ended.stderr
    while_loading = process("install(KeyboardInterrupt())", *args)
    assert (while_loading.returncode, while_loading.stdout, while_loading.stderr) == (130, "", "")


def test_a_reader_that_leaves_is_no_error() -> None:
    for args in (["generate", "m", "-p", "x"], ["chat", "m", "-p", "x"]):
        read, write = os.pipe()
        os.close(read)
        ended = process("install(FakeModel('abc'))", *args, stdout=write)
        os.close(write)
        assert ended.returncode != 0
        assert ended.stderr == ""


def test_bytes_that_are_no_text_are_an_error_not_a_crash() -> None:
    ended = process("install(FakeModel('abc'))", "generate", "m", "-p", "-", stdin=b"ab\xff")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "vkdecode: error: the prompt is not valid Unicode at character 2; give UTF-8 text\n"
    ended = process("install(FakeModel('abc'))", "chat", "m", stdin=b"\xff\n")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("vkdecode: error: the user message is not valid Unicode")


def test_output_that_cannot_show_a_character_goes_on() -> None:
    model = "install(FakeModel('né'))"
    ended = process(model, "generate", "m", "-p", "x", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (0, "n?\n")


def test_warnings_are_one_line() -> None:
    script = """
import warnings
install(FakeModel(""))
loading = sys.modules["vkdecode.loading"]
load = loading.load
loading.load = lambda *args, **options: warnings.warn("slow\\ndriver") or load(*args, **options)
"""
    ended = process(script, "generate", "m", "-p", "x")
    assert ended.stderr.splitlines()[0] == "vkdecode: warning: slow driver"


def test_help_and_version_need_neither_models_nor_devices() -> None:
    blocked = "kp", "vulkan", "vkdecode.models", "vkdecode.gpu"
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from vkdecode.cli import main; main()"
    for argument, words in (("--help", "devices"), ("--version", "vkdecode")):
        ended = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, text=True, env=environment()
        )
        assert ended.returncode == 0, ended.stderr
        assert words in ended.stdout


def test_the_module_runs_as_a_program() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "vkdecode", "chat"], capture_output=True, text=True, env=environment()
    )
    assert ended.returncode == 2
    assert "Missing argument 'MODEL'" in ended.stderr


class PseudoTerminal:
    """A process at a terminal of its own; `type` waits for the prompt, types, and waits for what must then appear."""

    def __init__(self, code: str, *args: str) -> None:
        self._child, self._terminal = pty.fork()
        if self._child == 0:
            try:
                os.execve(sys.executable, [sys.executable, "-c", code, *args], environment(TERM="xterm"))
            finally:
                os._exit(99)
        self._seen = b""

    def wait_for(self, pattern: str) -> None:
        while not re.search(pattern.encode(), self._seen, re.DOTALL):
            ready, _, _ = select.select([self._terminal], [], [], 60)
            assert ready, f"{pattern!r} never came; there is {self._seen!r}"
            self._seen += os.read(self._terminal, 4096)

    def type(self, keys: bytes, expect: str) -> None:
        # Only then is the terminal ready for keys such as Ctrl-D.
        self.wait_for(">>> $")
        os.write(self._terminal, keys)
        self._seen = b""
        self.wait_for(expect)

    def end(self) -> int:
        """Wait for the process to leave the terminal; return its exit code."""
        with suppress(OSError):  # how Linux reports that nobody is at the other side any more
            self.wait_for("$.")
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        os.close(self._terminal)
        return code


def test_a_terminal_gets_a_conversation() -> None:
    code = "from fakes import *; install(FakeModel('Hello \\x1b[2J'))\nfrom vkdecode.cli import main; main()"
    terminal = PseudoTerminal(code, "chat", "folder/m.gguf")
    terminal.wait_for(r"m\.gguf on Fake GPU; /help")
    terminal.type(b"Hi\r", r"Hello ␛\[2J\r\n[^\n]*prompt \d+ tokens[^\n]*tok/s.*>>> ")
    terminal.type(b"/nope\r", "unknown command /nope")
    terminal.type(b"\x04", "")
    assert terminal.end() == 0
