"""A bench result with round numbers, made without a device."""

from __future__ import annotations

from vkdecode.bench.result import BenchResult, CopyBandwidth, DecodeSpeed, LoadTimes, Memory, RungSpeed, Speed
from vkdecode.bench.timing import Timing

MIB = 1 << 20


def speed(name: str, milliseconds: float, tokens: int = 1, context: int = 0) -> Speed:
    return Speed(name, tokens, context, 3, milliseconds, milliseconds / 2, milliseconds * 2, milliseconds / 10)


def result(bare: int | None = 20 * MIB) -> BenchResult:
    host = None if bare is None else 90 * MIB
    timing = Timing((0.010, 0.020, 0.030), (0.001, 0.002, 0.003))
    return BenchResult(
        facts={
            "vkdecode": "0",
            "model": {"name": "m [1].gguf", "synthetic": True, "weights": "q4_0", "held_bytes": {"q4_0": 50 * MIB}},
            "device": {"name": "Made-Up 9000", "driver": "none"},
        },
        load=LoadTimes(1.5, 0.25, 16, 0.125, 0.1),
        prefill=[speed("prefill", 100.0, tokens=16)],
        decode=[
            DecodeSpeed(Speed.of("decode", 1, 50, timing), 100_000_000, 20.0),
            DecodeSpeed(speed("decode", 40.0, context=250), 120_000_000, 20.0),
        ],
        rungs=[
            RungSpeed("captured", "device", speed("captured, device", 20.0, context=50)),
            RungSpeed("rebuild", "device", speed("rebuild, device", 900.0, context=50)),
        ],
        cache_changes=[speed("same cache: plan reused", 20.0, context=50)],
        memory=Memory(
            file=100 * MIB,
            weights=102 * MIB,
            kv_cache=20 * MIB,
            kv_rows=252,
            activations=2 * MIB,
            staging=2 * MIB,
            device=126 * MIB,
            bare_import=bare,
            rss_after_load=212 * MIB,
            host_after_load=host,
            rss_with_plans=300 * MIB,
            host_with_plans=host,
            peak_rss=400 * MIB,
        ),
        copy=CopyBandwidth(256 * MIB, {"copy_words": 10.0, "vkCmdCopyBuffer": 20.0}),
    )
