"""One run of the bench: from the files to all figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vkdecode.bench import memory as process
from vkdecode.bench.copy_speed import copy_seconds
from vkdecode.bench.options import BenchOptions, BenchPlan
from vkdecode.bench.result import BenchResult, CopyBandwidth, DecodeSpeed, LoadTimes, Memory, Speed
from vkdecode.bench.speed import decode_speeds, first_token, prefill_speeds, rung_and_cache_speeds
from vkdecode.bench.synthetic import SyntheticSource
from vkdecode.bench.timing import measure, timed
from vkdecode.bench.traffic import decode_traffic
from vkdecode.decode import InferenceContext
from vkdecode.gpu import Device, lanes_of
from vkdecode.graph import WeightSpec
from vkdecode.loading import load
from vkdecode.models import Model, load_model
from vkdecode.models.registry import architecture_of
from vkdecode.weights import WeightSource, open_weights

_QUICK_COPY_BYTES = 32 << 20
_COPY_BYTES = 256 << 20

Progress = Callable[[int, int], None]
Status = Callable[[str], None]


@dataclass(frozen=True)
class _Subject:
    """A model that can be loaded, and what is known of it before."""

    model_type: str
    positions: int
    file_bytes: int
    load: Callable[[], Model]


def run_bench(
    target: str | Path | SyntheticSource,
    device: Device | int | str | None = None,
    weights: str | None = None,
    options: BenchOptions | None = None,
    progress: Progress | None = None,
    status: Status = lambda _: None,
) -> BenchResult:
    """Load a model and measure it.

    Args:
        target: a model folder, a `.gguf` file, or made-up weights.
        device: as for `load`.
        weights: as for `load`; None for a synthetic model, whose source knows.
        options: what to measure.
        progress: called with bytes uploaded and bytes in all.
        status: called with what is being measured.

    Raises:
        InvalidInputError: a length does not fit the model's context; nothing was loaded.
        VkDecodeError: like `load` and `forward_with_kv_context_persistent`.

    """
    options = options or BenchOptions()
    subject = _subject(target, device, weights, progress)
    plan = options.within(subject.positions)
    bare = process.bare_import_bytes()
    loaded: list[Model] = []
    status("loading")
    load_seconds = timed(lambda: loaded.append(subject.load()))
    (model,) = loaded
    with closing(model):
        after_load = _host(model, bare)
        load_times, prefill, decode, taken = _measure_loop(model, plan, load_seconds, bare, status)
        status("measuring the rungs")
        rungs, cache_changes = rung_and_cache_speeds(model, plan)
        status("measuring the copy bandwidth")
        copy = copy_bandwidth(model.device, _QUICK_COPY_BYTES if options.quick else _COPY_BYTES)
        return BenchResult(
            facts=_facts(target, subject, model, weights, plan, options.quick),
            load=load_times,
            prefill=prefill,
            decode=[DecodeSpeed(speed, nbytes, copy.best) for speed, nbytes in decode],
            rungs=rungs,
            cache_changes=cache_changes,
            memory=Memory(
                file=subject.file_bytes,
                bare_import=bare,
                rss_after_load=after_load[0],
                host_after_load=after_load[1],
                **taken,
            ),
            copy=copy,
        )


def copy_bandwidth(device: Device, buffer_bytes: int) -> CopyBandwidth:
    """What copying between two buffers of a device reaches."""
    nbytes, seconds = copy_seconds(device, buffer_bytes)
    return CopyBandwidth(nbytes, {way: 2 * nbytes / spent / 1e9 for way, spent in seconds.items()})


def _measure_loop(
    model: Model, plan: BenchPlan, load_seconds: float, bare: int | None, status: Status
) -> tuple[LoadTimes, list[Speed], list[tuple[Speed, int]], dict[str, Any]]:
    """What runs over one cache that has room for all of it: first token, prefill, decode, and the memory of these."""
    held: list[Any] = []

    def plans() -> None:
        held.extend((model.new_kv_cache(plan.rows), InferenceContext(model.device)))
        model.prepare(held[0], held[1], plan.prefills[0], candidates=1)

    status("building plans")
    plans_seconds = timed(plans)
    kv, context = held
    with closing(kv), closing(context):
        tokens = plan.prefills[0]
        prompt_seconds = timed(lambda: first_token(model, kv, context, tokens))
        again = measure(lambda: first_token(model, kv, context, tokens), plan.slow_repeats, lambda: 0.0)
        load_times = LoadTimes(load_seconds, plans_seconds, tokens, prompt_seconds, again.median)
        status("measuring prefill")
        prefill = prefill_speeds(model, kv, context, plan)
        status("measuring decode")
        speeds = decode_speeds(model, kv, context, plan)
        traffic = decode_traffic(model, kv.geometry)
        report = model.memory_report(kv.max_seq_len, kv.dtype)
        rss, host = _host(model, bare)
        taken = {
            "weights": report.weights,
            "kv_cache": report.kv_cache,
            "kv_rows": kv.max_seq_len,
            "activations": report.activations,
            "staging": report.staging,
            "device": model.device.allocated_bytes,
            "rss_with_plans": rss,
            "host_with_plans": host,
            "peak_rss": process.peak_rss_bytes(),
        }
    return load_times, prefill, [(speed, traffic.at(speed.context)) for speed in speeds], taken


def _host(model: Model, bare: int | None) -> tuple[int | None, int | None]:
    """Bytes of this process now, and what of them the model takes of the host."""
    rss = process.rss_bytes()
    return rss, process.host_bytes(rss, bare, model.device.allocated_bytes, model.device.info.kind == "cpu")


def _subject(
    target: str | Path | SyntheticSource,
    device: Device | int | str | None,
    weights: str | None,
    progress: Progress | None,
) -> _Subject:
    if isinstance(target, SyntheticSource):
        source = target

        def make() -> Model:
            return load_model(source, device, weights, progress, open_source=lambda: source)

        return _Subject(*_positions(source), source.nbytes, make)
    with closing(open_weights(target)) as opened:
        model_type, positions = _positions(opened)
        files = process.weight_files(opened.path)
    # Loading is timed with the files in the page cache.
    nbytes = process.read_once(files)
    return _Subject(model_type, positions, nbytes, lambda: load(target, device, weights, progress))


def _positions(source: WeightSource) -> tuple[str, int]:
    model_type, architecture = architecture_of(source.config)
    return model_type, int(architecture.parse_config(source.config).max_position_embeddings)


def _facts(
    target: str | Path | SyntheticSource,
    subject: _Subject,
    model: Model,
    weights: str | None,
    plan: BenchPlan,
    quick: bool,
) -> dict[str, Any]:
    info = model.device.info
    synthetic = isinstance(target, SyntheticSource)
    return {
        "vkdecode": _version(),
        "model": {
            "name": model.path.name,
            "model_type": subject.model_type,
            "synthetic": synthetic,
            "weights": target.dtype.value if isinstance(target, SyntheticSource) else weights,
            "held_bytes": _held(model.weight_specs(), model.weight_store.nbytes),
        },
        "device": {
            "ordinal": info.ordinal,
            "name": info.name,
            "vendor": info.vendor,
            "kind": info.kind,
            "driver": info.driver,
            "lanes": lanes_of(model.device).form,
            "cpu_count": os.cpu_count(),
        },
        "options": {
            "contexts": list(plan.contexts),
            "prefills": list(plan.prefills),
            "tokens": plan.tokens,
            "quick": quick,
        },
    }


def _held(specs: Iterable[WeightSpec], nbytes: Callable[[WeightSpec], int]) -> dict[str, int]:
    """Bytes of the weights by element type."""
    total: dict[str, int] = {}
    for spec in specs:
        total[spec.dtype.value] = total.get(spec.dtype.value, 0) + nbytes(spec)
    return total


def _version() -> str:
    try:
        return version("vkdecode")
    except PackageNotFoundError:
        return "not installed"
