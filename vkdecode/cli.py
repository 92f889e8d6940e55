"""The `vkdecode` command: devices, info, generate, chat, bench, doctor, convert.

Heavy imports wait until a command needs them, so that `vkdecode --help` is quick and works without a Vulkan loader.
Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 70 a fault of this program, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkdecode.errors import DeviceError, InvalidInputError, VkDecodeError
from vkdecode.info import info as info_command
from vkdecode.options import (
    DeviceOption,
    MaxSeqLenOption,
    MinPOption,
    ModelArgument,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
)

if TYPE_CHECKING:
    from vkdecode.models import Model
    from vkdecode.sampling import SamplingParams

DEBUG_VARIABLE = "VKDECODE_DEBUG"

app = typer.Typer(
    help="Language models on any Vulkan GPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PLAIN_TOKENS = 128


def _version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"vkdecode {version('vkdecode')}")
    except PackageNotFoundError:
        typer.echo("vkdecode (not installed)")
    raise typer.Exit


@app.callback()
def _root(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Language models on any Vulkan GPU."""


@app.command()
def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything known of each device as JSON.")] = False,
) -> None:
    """List the Vulkan devices."""
    from dataclasses import asdict

    from vkdecode.gpu import list_devices

    found = list_devices()
    if as_json:
        import json

        typer.echo(json.dumps([asdict(info) for info in found], indent=2))
        return
    if not found:
        raise DeviceError("no Vulkan device found; install a driver (on Debian without a GPU: mesa-vulkan-drivers)")
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("#", "name", "vendor", "kind", "memory", "driver")
    for info in found:
        memory = f"{info.heap_bytes / 2**30:.1f} GiB"
        table.add_row(
            *(Text(cell) for cell in (str(info.ordinal), info.name, info.vendor, info.kind, memory, info.driver))
        )
    # A table cut to 80 columns is of no use to a pipe.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


app.command("info")(info_command)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to continue; - reads it from standard input.")
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", help="The prompt as token ids (1,2,3) instead of text.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="At most so many new tokens.")] = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = None,
    max_seq_len: MaxSeqLenOption = None,
) -> None:
    """Continue a text.

    The text goes to standard output, the speed to standard error; a model without a tokenizer prints token ids. The
    prompt is taken as it is, without a chat template; one newline at the end of standard input is dropped.
    """
    from vkdecode.chat import printable
    from vkdecode.conversation import cache_size
    from vkdecode.generate import stream

    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give the prompt with either --prompt or --token-ids")
    given = _token_ids(token_ids) if token_ids is not None else _prompt_text(str(prompt))
    sampling = _sampling(temperature, top_k, top_p, min_p, seed)
    show: Callable[[str], str] = printable if sys.stdout.isatty() else str
    with ExitStack() as stack:
        loaded = stack.enter_context(closing(_load(model, device, weights)))
        kv = None
        if max_seq_len is not None:
            kv = stack.enter_context(closing(loaded.new_kv_cache(cache_size(loaded, max_seq_len))))
        pieces = stack.enter_context(stream(loaded, given, max_tokens=max_tokens, sampling=sampling, stop=stop, kv=kv))
        for piece in pieces:
            print(show(piece), end="", flush=True)
        result = pieces.result
        print("" if loaded.tokenizer is not None else " ".join(map(str, result.token_ids)))
        print(result.usage, file=sys.stderr)


@app.command()
def chat(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this once and exit.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="The system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Cut answers off here. [default: no limit]")
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = None,
    max_seq_len: MaxSeqLenOption = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="For models without a chat template: go on with the text that is typed.")
    ] = False,
) -> None:
    """Talk to a model.

    Without --prompt a terminal gets a conversation (/help lists its commands), and standard input from elsewhere is
    answered line by line. The KV cache has 4096 positions unless --max-seq-len says otherwise. With --plain an answer
    ends after 128 tokens unless --max-tokens says otherwise, for such models seldom end of themselves.
    """
    from rich.console import Console

    from vkdecode.chat import Terminal, terminal_line
    from vkdecode.conversation import Continuation, Conversation

    kind = Continuation if plain else Conversation
    max_tokens = _PLAIN_TOKENS if plain and max_tokens is None else max_tokens
    sampling = _sampling(temperature, top_k, top_p, min_p, seed)
    interactive = prompt is None and sys.stdin.isatty()
    with (
        closing(_load(model, device, weights)) as loaded,
        kind(
            loaded, system=system, sampling=sampling, max_tokens=max_tokens, stop=stop, max_seq_len=max_seq_len
        ) as conversation,
    ):
        terminal = Terminal(conversation, Console(highlight=False), interactive=interactive)
        if prompt is not None:
            terminal.answer(prompt)
        elif interactive:
            terminal.note(f"{Path(model).name} on {loaded.device.info.name}; /help lists the commands")
            terminal.run(terminal_line)
        else:
            terminal.run(input)


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A Hugging Face model folder or a .gguf file.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            "--synthetic",
            metavar="CONFIG",
            help="Instead of MODEL: random weights for a config.json, a folder with one, or a built-in shape such as "
            "llama-3.2-1b; --weights names any type that files hold. [default type: f16]",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="N,N", help="Decode after so many cached tokens. [default: 50,250,1000, as fits]"
        ),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option("--prefill", metavar="N,N", help="Prompt lengths. [default: 16,64,256,1000, as fits]"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", "-n", min=1, help="Decode steps for each median. [default: 32]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One length of each kind and few repeats: seconds.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON to a file; - to standard output, alone.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw tokens per second against context: .png or .svg."),
    ] = None,
    device: DeviceOption = None,
    weights: WeightsOption = None,
) -> None:
    """Measure speed, bytes and memory.

    Prefill and decode by length, load time and time to first token, the three ways to realize a step with both ways
    for the KV offset, what a change of cache costs, host time outside the submissions, device and host memory, and
    the bytes read per second against the device's own copy bandwidth.
    """
    import json

    from rich.console import Console

    if (model is None) == (synthetic is None):
        raise typer.BadParameter("give either MODEL or --synthetic CONFIG")
    from vkdecode.bench import (
        BenchOptions,
        check_plot,
        check_writable,
        counts,
        run_bench,
        save_plot,
        synthetic_source,
        tables,
    )
    from vkdecode.bench.report import headline

    options = BenchOptions(
        contexts=None if context is None else counts(context, "--context"),
        prefills=None if prefill is None else counts(prefill, "--prefill"),
        tokens=tokens,
        quick=quick,
    )
    picture = None if plot is None else check_plot(plot)
    if json_file not in (None, "-"):
        check_writable(Path(str(json_file)), "--json")
    target = str(model) if synthetic is None else synthetic_source(synthetic, weights or "f16")
    with ExitStack() as stack:
        status = Console(stderr=True).status("loading")
        if sys.stderr.isatty():
            stack.enter_context(status)
        result = run_bench(target, device, weights if synthetic is None else None, options, status=status.update)
    text = json.dumps(result.as_json(), indent=2)
    if json_file == "-":
        print(text)
    else:
        console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        console.print(headline(result), markup=False)
        for table in tables(result):
            console.print(table)
    if json_file not in (None, "-"):
        Path(str(json_file)).write_text(text + "\n", encoding="utf-8")
    if picture is not None:
        save_plot(result, picture)


@app.command()
def doctor(
    device: DeviceOption = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Try this model too: a folder or a .gguf file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for a bug report.")] = False,
) -> None:
    """Check that a device computes what it should.

    Holds kernels and a tiny model against numpy, moves bytes, takes and gives back memory. Ends with 1 where
    anything is at fault.
    """
    from rich.console import Console

    from vkdecode.doctor import examine
    from vkdecode.gpu import open_device

    with ExitStack() as stack:
        opened = stack.enter_context(open_device(device))
        status = Console(stderr=True).status("checking")
        if sys.stderr.isatty():
            stack.enter_context(status)
        report = examine(opened, model, status.update)
    if as_json:
        import json

        print(json.dumps(report.as_json(), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(report.table())
    if report.faults:
        _say(report.verdict())
        raise typer.Exit(1)
    if not as_json:
        print(report.verdict())


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A Hugging Face model folder or a .gguf file.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A name that ends in .gguf, or that of a folder.")],
    weights: Annotated[
        str | None,
        typer.Option("--weights", help="Write matrices as f32, f16, bf16, q8_0 or q4_0. [default: as they are stored]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target where it is there.")] = False,
) -> None:
    """Write a model as a GGUF file or as a Hugging Face folder.

    A folder holds f32, f16 or bf16. Quantizing loses precision, and from one quantized type to another loses some
    twice. The target appears when it is complete.
    """
    from vkdecode.conversion import convert as write

    with _progress("converting") as progress:
        done = write(source, target, weights, overwrite, progress)
    kinds = ", ".join(f"{count} {kind}" for kind, count in done.tensors.items())
    print(f"wrote {done.path}: {done.nbytes / 1e6:.1f} MB of weights, tensors: {kinds}")


def _sampling(temperature: float, top_k: int, top_p: float, min_p: float, seed: int | None) -> SamplingParams:
    from vkdecode.sampling import SamplingParams

    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def _prompt_text(prompt: str) -> str:
    return sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidInputError(f"--token-ids {text!r:.60} is not a list of whole numbers such as 1,2,3") from None


def _load(path: str, device: str | None, weights: str | None) -> Model:
    from vkdecode.loading import load

    with _progress("loading") as progress:
        return load(path, device=device, weights=weights, progress=progress)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of done and total bytes that moves a bar, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    """Run the command line; always ends with `SystemExit`."""
    # A stream that was closed before the program started is None; reading from it ends, writing to it goes nowhere.
    for name, how in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), how, encoding="utf-8"))
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Bytes that are no text are refused later, by name; characters that a terminal lacks print as "?".
        getattr(stream, "reconfigure", lambda **_: None)(errors="surrogateescape" if stream is sys.stdin else "replace")
    warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
    try:
        code = _run()
        sys.stdout.flush()
    except OSError as error:
        # The reader left, as `head` does, or the disk is full. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _say(f"error: cannot write the output: {error.strerror or error}")
        code = 1
    sys.exit(code)


def _run() -> int:
    try:
        app(prog_name="vkdecode")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except VkDecodeError as error:
        _say(f"error: {error}")
        _debug_trace()
        return 1
    except OSError:
        raise
    except Exception as error:
        hint = "" if _debug_trace() else f"; please report it with the output of {DEBUG_VARIABLE}=1"
        _say(f"internal error: {type(error).__name__}: {error}{hint}")
        return 70
    return 0


def _say(text: str) -> None:
    from vkdecode.chat import one_line

    print(one_line(f"vkdecode: {text}"), file=sys.stderr)


def _debug_trace() -> bool:
    wanted = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if wanted:
        traceback.print_exc()
    return wanted
