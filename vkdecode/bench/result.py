"""All figures of one run, as plain dataclasses and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vkdecode.bench.timing import Timing

SCHEMA = 1


@dataclass(frozen=True)
class Speed:
    """How fast one thing was: the median of some calls that each handled `tokens` tokens.

    Attributes:
        name: what was done.
        tokens: tokens of a call.
        context: cached rows before it.
        calls: how often it was done.
        milliseconds: median of a call.
        best_milliseconds: the fastest call.
        worst_milliseconds: the slowest call.
        host_milliseconds: median of a call's time outside the submissions.

    """

    name: str
    tokens: int
    context: int
    calls: int
    milliseconds: float
    best_milliseconds: float
    worst_milliseconds: float
    host_milliseconds: float

    @classmethod
    def of(cls, name: str, tokens: int, context: int, timing: Timing) -> Speed:
        """The figures of a timing."""
        values = (timing.median, timing.best, timing.worst, timing.host_median)
        return cls(name, tokens, context, len(timing.seconds), *(1000.0 * one for one in values))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second at the median."""
        return 1000.0 * self.tokens / self.milliseconds


@dataclass(frozen=True)
class DecodeSpeed:
    """Decoding at one context length, and the memory traffic that it comes to.

    Attributes:
        speed: of one token of the generate loop: the captured step and a greedy choice.
        bytes_per_token: weights and cached rows that a step reads.
        copy_gigabytes_per_second: what the device's fastest copy reached in this run, read and written bytes.

    """

    speed: Speed
    bytes_per_token: int
    copy_gigabytes_per_second: float

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes read per second, in units of 10^9."""
        return self.bytes_per_token / self.speed.milliseconds / 1e6

    @property
    def of_copy_bandwidth(self) -> float:
        """That as a fraction of the copy bandwidth."""
        return self.gigabytes_per_second / self.copy_gigabytes_per_second


@dataclass(frozen=True)
class RungSpeed:
    """One model step realized on one rung and one KV-offset path."""

    rung: str
    kv_offset: str
    speed: Speed


@dataclass(frozen=True)
class LoadTimes:
    """Seconds from the files, which the page cache holds, to a first token.

    Attributes:
        load_seconds: opening the device, reading, packing and uploading.
        plans_seconds: a KV cache, and the plan for the prompt.
        prompt_tokens: length of the prompt.
        prompt_seconds: the prompt's pass and the choice of the first token.
        held_first_token_seconds: the same prompt again, with the plans held.

    """

    load_seconds: float
    plans_seconds: float
    prompt_tokens: int
    prompt_seconds: float
    held_first_token_seconds: float

    @property
    def to_first_token_seconds(self) -> float:
        """Load, plans and prompt."""
        return self.load_seconds + self.plans_seconds + self.prompt_seconds


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the system does not say.

    Attributes:
        file: the weights as files hold them; for a synthetic model, as a file would.
        weights: on the device.
        kv_cache: the cache that all measurements share.
        kv_rows: its rows.
        activations: of the decode plan and the plans of the prompts, on the device.
        staging: the staging buffers of step data and results.
        device: measured while weights, cache and plans are held.
        bare_import: physical memory of a process that only imports the package.
        rss_after_load: of this process, with the weights loaded and nothing else.
        host_after_load: of that, what is neither device memory (on a CPU driver) nor the bare import.
        rss_with_plans: of this process, with cache and plans held and run.
        host_with_plans: of that, the same difference.
        peak_rss: the most that this process held up to then.

    """

    file: int
    weights: int
    kv_cache: int
    kv_rows: int
    activations: int
    staging: int
    device: int
    bare_import: int | None
    rss_after_load: int | None
    host_after_load: int | None
    rss_with_plans: int | None
    host_with_plans: int | None
    peak_rss: int

    @property
    def device_of_file_and_kv(self) -> float:
        """Device bytes over those of the file and the KV cache."""
        return self.device / (self.file + self.kv_cache)


@dataclass(frozen=True)
class CopyBandwidth:
    """What copying from one buffer of the device to another reached, counting bytes read and bytes written.

    Attributes:
        buffer_bytes: bytes of a buffer.
        gigabytes_per_second: by way, in units of 10^9.

    """

    buffer_bytes: int
    gigabytes_per_second: Mapping[str, float]

    @property
    def best_way(self) -> str:
        """The faster way."""
        return max(self.gigabytes_per_second, key=lambda way: self.gigabytes_per_second[way])

    @property
    def best(self) -> float:
        """What the faster way reached."""
        return self.gigabytes_per_second[self.best_way]


@dataclass(frozen=True)
class BenchResult:
    """Everything that a run measured, and on what.

    Attributes:
        facts: version, model and device, as JSON values.
        load: load time and time to first token.
        prefill: by prompt length, plans held.
        decode: by context length.
        rungs: one step by each rung and KV-offset path.
        cache_changes: one step on the same cache, on another one, and with the plan built anew.
        memory: bytes.
        copy: the device's copy bandwidth.

    """

    facts: Mapping[str, Any]
    load: LoadTimes
    prefill: Sequence[Speed]
    decode: Sequence[DecodeSpeed]
    rungs: Sequence[RungSpeed]
    cache_changes: Sequence[Speed]
    memory: Memory
    copy: CopyBandwidth

    @property
    def ratios(self) -> dict[str, float]:
        """Figures that hold on a noisy machine, since both sides come from this run.

        `captured_over_rebuild` is by KV-offset path, `longest_over_shortest_context` is of tokens per second.
        """
        took = {(one.rung, one.kv_offset): one.speed.milliseconds for one in self.rungs}
        found = {
            f"captured_over_rebuild_{kv_offset}": took["rebuild", kv_offset] / spent
            for (rung, kv_offset), spent in took.items()
            if rung == "captured"
        }
        shortest, longest = (self.decode[at].speed.tokens_per_second for at in (0, -1))
        return {**found, "longest_over_shortest_context": longest / shortest}

    def as_json(self) -> dict[str, Any]:
        """Values for `json.dumps`."""
        load = {**asdict(self.load), "to_first_token_seconds": self.load.to_first_token_seconds}
        memory = {**asdict(self.memory), "device_of_file_and_kv": self.memory.device_of_file_and_kv}
        copy = {
            "buffer_bytes": self.copy.buffer_bytes,
            "gigabytes_per_second": dict(self.copy.gigabytes_per_second),
            "best_way": self.copy.best_way,
            "best_gigabytes_per_second": self.copy.best,
        }
        return {
            "schema": SCHEMA,
            **self.facts,
            "load": load,
            "prefill": [_speed(one) for one in self.prefill],
            "decode": [_decode(one) for one in self.decode],
            "rungs": [{"rung": one.rung, "kv_offset": one.kv_offset, **_speed(one.speed)} for one in self.rungs],
            "cache_changes": [_speed(one) for one in self.cache_changes],
            "ratios": self.ratios,
            "memory": memory,
            "copy_bandwidth": copy,
        }


def _speed(speed: Speed) -> dict[str, Any]:
    return {**asdict(speed), "tokens_per_second": speed.tokens_per_second}


def _decode(decode: DecodeSpeed) -> dict[str, Any]:
    return {
        **_speed(decode.speed),
        "bytes_per_token": decode.bytes_per_token,
        "gigabytes_per_second": decode.gigabytes_per_second,
        "of_copy_bandwidth": decode.of_copy_bandwidth,
    }
