#!/usr/bin/env python3
"""Measure vkdecode against llama.cpp's Vulkan server on the same file, driver and machine, in alternating rounds.

Each round gives both the same prompts as token ids: one of exactly `--prefill` tokens whose pass is timed, and a short
one that is followed by `--tokens` passes of one token, greedy, whatever end token comes. llama.cpp's times are those
that its server reports; vkdecode's are of its generate loop without turning ids into text. Needs `vkdecode[compare]`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vkdecode.bench import check_writable
from vkdecode.decode import InferenceContext
from vkdecode.errors import InvalidInputError, VkDecodeError
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.sampling import Sampler
from vkdecode.token_model import KvFeed

SERVER = "llama-server-vulkan"
SCHEMA = 1
_DECODE_PROMPT_TOKENS = 16
_START_SECONDS = 600.0
_TEXT = "The river ran past the old mill, and every spring the miller counted the boats that came down it. "

Round = Callable[[Sequence[int], Sequence[int], int], "Rates"]


class CompareError(VkDecodeError):
    """The other program is missing, does not start, or did something else than it was asked to."""


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one round."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Comparison:
    """Both programs' rates round by round; ratios are vkdecode's over llama.cpp's."""

    ours: Sequence[Rates]
    theirs: Sequence[Rates]

    def figures(self, what: str) -> dict[str, Any]:
        """Medians and spread of `prefill` or `decode`; ratios of the medians, and of the lowest and highest round."""
        ours = [float(getattr(one, what)) for one in self.ours]
        theirs = [float(getattr(one, what)) for one in self.theirs]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        return {
            "vkdecode": _spread(ours),
            "llama_cpp": _spread(theirs),
            "ratio": statistics.median(ours) / statistics.median(theirs),
            "lowest_ratio": min(ratios),
            "highest_ratio": max(ratios),
        }


def _spread(rates: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}


class LlamaServer:
    """llama.cpp's server as a process of its own; a context manager that ends it.

    Args:
        command: the program and its arguments.
        ordinal: the Vulkan device to use; llama.cpp takes a CPU driver only when it is named so.
        port: where it listens.

    """

    def __init__(self, command: Sequence[str], ordinal: int, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._variables = {**os.environ, "GGML_VK_VISIBLE_DEVICES": str(ordinal)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed on exit
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LlamaServer:
        self._process = subprocess.Popen(
            self._command, env=self._variables, stdout=self._log, stderr=self._log, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            # Its own group: the console script may have started the server as a child.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._log.close()

    def rates(self, prefill: Sequence[int], prompt: Sequence[int], tokens: int) -> Rates:
        """One round.

        Raises:
            CompareError: the server did not evaluate the whole prompt, or not so many tokens.

        """
        first = self._complete(prefill, 1)
        # Of n + 1 tokens the first comes out of the prompt's pass, and the server's clock starts there.
        then = self._complete(prompt, tokens + 1)
        return Rates(1000.0 * len(prefill) / first["prompt_ms"], 1000.0 * tokens / then["predicted_ms"])

    def _complete(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        asked = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        timings: dict[str, Any] = self._request("/completion", asked)["timings"]
        done = (timings["prompt_n"], timings["predicted_n"])
        if done != (len(prompt), tokens):
            raise CompareError(f"llama.cpp was asked for {len(prompt)} and {tokens} tokens, it computed {done}")
        return timings

    def _request(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_START_SECONDS) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError, KeyError) as error:
            raise CompareError(f"llama.cpp's server does not answer {path}: {error}{self._last_words()}") from error

    def _wait(self) -> None:
        ends = time.monotonic() + _START_SECONDS
        while time.monotonic() < ends:
            if self._process is None or self._process.poll() is not None:
                raise CompareError(f"llama.cpp's server ended while it started{self._last_words()}")
            try:
                with urllib.request.urlopen(self._url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise CompareError(f"llama.cpp's server was not ready after {_START_SECONDS:.0f} s{self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"; its last line: {said[-1]:.200}" if said else ""


def our_rates(
    model: Model, context: InferenceContext, prefill: Sequence[int], prompt: Sequence[int], tokens: int
) -> Rates:
    """One round of this package, plans held."""
    with closing(model.new_kv_cache(max(len(prefill), len(prompt) + tokens) + 1)) as kv:
        feed, sampler = KvFeed(model, kv.max_seq_len, kv, context), Sampler()
        for length in (len(prefill), len(prompt), 1):
            feed.prepare(length, sampler)
        started = time.perf_counter()
        feed.next_token(prefill, sampler)
        prefill_seconds = time.perf_counter() - started
        kv.truncate_to(0)
        feed = KvFeed(model, kv.max_seq_len, kv, context)
        token = feed.next_token(prompt, sampler)
        started = time.perf_counter()
        for _ in range(tokens):
            token = feed.next_token([token], sampler)
        return Rates(len(prefill) / prefill_seconds, tokens / (time.perf_counter() - started))


def alternate(
    ours: Round, theirs: Round, prefill: Sequence[int], prompt: Sequence[int], tokens: int, rounds: int
) -> Comparison:
    """A short round of each that does not count, then `rounds` of each, one after the other."""
    for one in (theirs, ours):
        one(prompt, prompt, 2)
    # Ours compiles the longer chunk's kernels now; llama.cpp compiles when it loads.
    ours(prefill, prompt, 2)
    pairs = [(theirs(prefill, prompt, tokens), ours(prefill, prompt, tokens)) for _ in range(rounds)]
    return Comparison([mine for _, mine in pairs], [other for other, _ in pairs])


def prompts(model: Model, prefill: int) -> tuple[list[int], list[int]]:
    """Token ids of exactly `prefill` tokens and of a short prompt, of ordinary text where there is a tokenizer."""
    longest = max(prefill, _DECODE_PROMPT_TOKENS)
    if model.tokenizer is None:
        ids = [(3 + 7 * position) % model.vocab_size for position in range(longest)]
    else:
        ids = []
        while len(ids) < longest:
            ids += model.tokenizer.encode(_TEXT, add_special_tokens=not ids)
    return ids[:prefill], ids[:_DECODE_PROMPT_TOKENS]


def find_server(given: str | None) -> str:
    """The server's console script: the one given, else beside this interpreter, else on PATH."""
    beside = Path(sys.executable).with_name(SERVER)
    found = shutil.which(given or (str(beside) if beside.exists() else SERVER))
    if found is None:
        raise CompareError(f"{given or SERVER} is not there; pip install 'vkdecode[compare]', or name it with --server")
    return found


def check_same_device(server: str, ordinal: int, name: str) -> None:
    """Raise `CompareError` where llama.cpp calls another device by this ordinal, or finds none."""
    variables = {**os.environ, "GGML_VK_VISIBLE_DEVICES": str(ordinal)}
    done = subprocess.run([server, "--list-devices"], capture_output=True, text=True, env=variables, check=False)
    if name not in done.stdout + done.stderr:
        said = " ".join((done.stdout + done.stderr).split())[-200:]
        raise CompareError(f"llama.cpp does not find {name} as Vulkan device {ordinal}; it says: {said}")


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def opened(path: str, device: str | None, weights: str | None) -> Iterator[tuple[Model, InferenceContext]]:
    """A loaded model and a context for its plans."""
    with closing(load(path, device=device, weights=weights)) as model, InferenceContext(model.device) as context:
        yield model, context


def table(comparison: Comparison, prefill: int, tokens: int) -> Table:
    """Medians of both, lowest to highest round in brackets, and the ratio."""
    made = Table("tokens per second", "vkdecode", "llama.cpp", "ratio")
    for what, name in (("prefill", f"prefill of {prefill} tokens"), ("decode", f"decode of {tokens} tokens")):
        found = comparison.figures(what)
        cells = [
            "{median:.1f} ({lowest:.1f} to {highest:.1f})".format(**found[side]) for side in ("vkdecode", "llama_cpp")
        ]
        ratio = "{ratio:.1f} ({lowest_ratio:.1f} to {highest_ratio:.1f})".format(**found)
        made.add_row(name, *cells, ratio)
    return made


def main(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .gguf file, which both run.")],
    llama_model: Annotated[
        str | None, typer.Option(help="Another .gguf file for llama.cpp, such as the same weights at 16 bits.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Our side holds weights so; as stored if not given.")] = None,
    device: Annotated[str | None, typer.Option("--device", "-d", help="As for vkdecode; both use it.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds.")] = 3,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Decode passes of a round.")] = 32,
    prefill: Annotated[int, typer.Option(min=2, help="Tokens of the prompt whose pass is timed.")] = 256,
    server: Annotated[
        str | None, typer.Option(help=f"The server; if not given, {SERVER} beside this Python or on PATH.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON to a file; - to standard output, alone.")
    ] = None,
) -> None:
    """Decode and prefill with vkdecode and with llama.cpp, in turns, and print the ratios."""
    if json_file not in (None, "-"):
        check_writable(Path(str(json_file)), "--json")
    their_file = Path(llama_model or model)
    if not their_file.is_file():
        raise InvalidInputError(
            f"llama.cpp needs a .gguf file, and {str(their_file)!r:.120} is none; see --llama-model"
        )
    program = find_server(server)
    with opened(model, device, weights) as (loaded, context):
        info = loaded.device.info
        check_same_device(program, info.ordinal, info.name)
        ids, prompt = prompts(loaded, prefill)
        room = max(prefill, len(prompt) + tokens) + 8
        command = [program, "-m", str(their_file), "-ngl", "99", "-c", str(room), "--parallel", "1"]
        with LlamaServer(command, info.ordinal, free_port()) as llama:
            comparison = alternate(
                lambda *asked: our_rates(loaded, context, *asked), llama.rates, ids, prompt, tokens, rounds
            )
    if json_file != "-":
        console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        console.print(f"{Path(model).name} and {their_file.name} on {info.name}, {info.driver}", markup=False)
        console.print(table(comparison, prefill, tokens))
    text = json.dumps(
        {
            "schema": SCHEMA,
            "model": Path(model).name,
            "llama_model": their_file.name,
            "weights": weights,
            "device": info.name,
            "driver": info.driver,
            "rounds": rounds,
            "tokens": tokens,
            "prefill_tokens": prefill,
            "prompt_tokens": len(prompt),
            "prefill": comparison.figures("prefill"),
            "decode": comparison.figures("decode"),
            "by_round": {
                "vkdecode": [asdict(one) for one in comparison.ours],
                "llama_cpp": [asdict(one) for one in comparison.theirs],
            },
        },
        indent=2,
    )
    if json_file == "-":
        print(text)
    elif json_file is not None:
        Path(json_file).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.showwarning = lambda message, *_: print(f"compare_llama_cpp: warning: {message}", file=sys.stderr)
    try:
        typer.run(main)
    except VkDecodeError as error:
        print(f"compare_llama_cpp: error: {error}", file=sys.stderr)
        sys.exit(1)
