"""The figures of a run as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from vkdecode.bench.result import BenchResult, Speed

_MIB = 1 << 20


def tables(result: BenchResult) -> list[Table]:
    """One table for each kind of figure."""
    makers = (_decode, _copy, _prefill, _rungs, _ratios, _load, _memory)
    return [make(result) for make in makers]


def headline(result: BenchResult) -> str:
    """One line: which model, held how, on which device."""
    model, device = result.facts["model"], result.facts["device"]
    held = ", ".join(f"{name} {mib(nbytes)}" for name, nbytes in model["held_bytes"].items())
    made_up = " (random weights)" if model["synthetic"] else ""
    return f"{model['name']}{made_up}, {held}, on {device['name']}, {device['driver']}"


def mib(nbytes: int | None) -> str:
    """Bytes in MiB, or a dash for what is not known."""
    return "-" if nbytes is None else f"{nbytes / _MIB:.1f} MiB"


def _decode(result: BenchResult) -> Table:
    table = _table(
        "decode", "context", "tok/s", "ms a token", "spread", "host ms", "MB read", "GB/s", "of copy bandwidth"
    )
    for one in result.decode:
        speed = one.speed
        table.add_row(
            str(speed.context),
            f"{speed.tokens_per_second:.1f}",
            f"{speed.milliseconds:.2f}",
            _spread(speed),
            f"{speed.host_milliseconds:.3f}",
            f"{one.bytes_per_token / 1e6:.1f}",
            f"{one.gigabytes_per_second:.1f}",
            f"{one.of_copy_bandwidth:.0%}",
        )
    return table


def _copy(result: BenchResult) -> Table:
    table = _table(f"copying {mib(result.copy.buffer_bytes)} on the device", "", "GB/s, read and written")
    for way, speed in result.copy.gigabytes_per_second.items():
        table.add_row(way, f"{speed:.1f}")
    return table


def _prefill(result: BenchResult) -> Table:
    table = _table("prefill, plans held", "tokens", "tok/s", "ms in all", "spread")
    for one in result.prefill:
        table.add_row(str(one.tokens), f"{one.tokens_per_second:.1f}", f"{one.milliseconds:.1f}", _spread(one))
    return table


def _rungs(result: BenchResult) -> Table:
    context = result.rungs[0].speed.context
    table = _table(f"one step at context {context}", "", "ms", "spread", "tok/s", "host ms")
    for one in result.rungs:
        _add_step(table, f"{one.rung}, offset by {one.kv_offset}", one.speed)
    table.add_section()
    for change in result.cache_changes:
        _add_step(table, change.name, change)
    return table


def _ratios(result: BenchResult) -> Table:
    table = _table("ratios", "", "")
    for name, ratio in result.ratios.items():
        table.add_row(name.replace("_", " "), f"{ratio:.2f}")
    return table


def _add_step(table: Table, name: str, speed: Speed) -> None:
    table.add_row(
        name,
        f"{speed.milliseconds:.2f}",
        _spread(speed),
        f"{speed.tokens_per_second:.1f}",
        f"{speed.host_milliseconds:.3f}",
    )


def _load(result: BenchResult) -> Table:
    load = result.load
    table = _table("load, files in the page cache", "", "seconds")
    prompt = f"prompt of {load.prompt_tokens} tokens"
    for name, seconds in (
        ("load: open the device, read, upload", load.load_seconds),
        ("KV cache, and plan for the prompt", load.plans_seconds),
        (f"{prompt}, first token", load.prompt_seconds),
        ("load to first token", load.to_first_token_seconds),
        (f"{prompt} again, first token", load.held_first_token_seconds),
    ):
        table.add_row(name, f"{seconds:.3f}")
    return table


def _memory(result: BenchResult) -> Table:
    memory = result.memory
    table = _table("memory", "", "")
    for name, value in (
        ("model file", mib(memory.file)),
        ("device: weights", mib(memory.weights)),
        (f"device: KV cache, {memory.kv_rows} rows", mib(memory.kv_cache)),
        ("device: activations", mib(memory.activations)),
        ("device: staging buffers", mib(memory.staging)),
        ("device, measured", mib(memory.device)),
        ("device over file + KV cache", f"{memory.device_of_file_and_kv:.3f}"),
        ("process after loading", mib(memory.rss_after_load)),
        ("process that only imports", mib(memory.bare_import)),
        ("host memory of the loaded model", mib(memory.host_after_load)),
        ("process with plans and cache", mib(memory.rss_with_plans)),
        ("host memory with plans", mib(memory.host_with_plans)),
        ("process at its peak", mib(memory.peak_rss)),
    ):
        table.add_row(name, value)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    names: Sequence[str] = columns
    for column, name in zip(table.columns, names, strict=True):
        column.justify = "left" if name == "" and column is table.columns[0] else "right"
    return table


def _spread(speed: Speed) -> str:
    return f"{speed.best_milliseconds:.1f} to {speed.worst_milliseconds:.1f}" if speed.calls > 1 else ""
