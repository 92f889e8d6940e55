"""Made-up devices with the smallest limits that Vulkan allows: each is planned for or refused, before any upload."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import GPU, ROOMY, SMALLEST, SUBGROUPS, MadeUpSource, gpu, llama_8b, mixtral_8x7b, phi_2, planned_model
from spirv_shared import declared_shared_bytes

from vkdecode.decode import (
    CHUNK_SIZES,
    MAX_LANDING_ROWS,
    DecodeMode,
    KvGeometry,
    StepOptions,
    plan_step,
    prompt_steps,
)
from vkdecode.decode.memory import MINIMAL_ROWS
from vkdecode.errors import DeviceError, OutOfDeviceMemoryError, ShaderError
from vkdecode.gpu import DeviceInfo, Kernel, check_dispatch, lanes_of, registry
from vkdecode.graph import Graph, Op, WeightSpec
from vkdecode.models import Model
from vkdecode.runtime import Dispatch, Plan, WeightStore, check_plan, max_cached_rows, weight_constants
from vkdecode.weights import DType

PATHS = (("device", "bounded"), ("device", "masked"), ("symenv", "masked"), ("symenv", "bounded"))
PLANNABLE = {name: value for name, value in SMALLEST.items() if name != "max_storage_buffers_per_stage"}
SOURCES: dict[str, Callable[[], MadeUpSource]] = {"llama": llama_8b, "phi": phi_2}
MOST_BINDINGS = 12


def small_llama(**config: Any) -> MadeUpSource:
    """Two layers of Llama 3 8B: every kind of dispatch is there."""
    return llama_8b(num_hidden_layers=2, **config)


def steps_of(model: Model) -> Iterator[StepOptions]:
    for kv_offset, arm in PATHS:
        mode = DecodeMode("captured", kv_offset, arm)
        yield from prompt_steps(model, 600, mode)
        yield from (one for size in CHUNK_SIZES for one in prompt_steps(model, size, mode))
        if model.max_step_tokens("all") >= CHUNK_SIZES[0]:
            yield StepOptions(CHUNK_SIZES[0], "all", kv_offset, arm)


def kernel_of(key: str) -> Kernel:
    name, *terms = key.split()
    return registry().get(name, **dict(term.split("=", 1) for term in terms))


def declared_shared(dispatch: Dispatch) -> int:
    return _declared(dispatch.kernel.key, tuple(dispatch.spec[name] for name in dispatch.kernel.spec))


@functools.cache
def _declared(key: str, values: tuple[int, ...]) -> int:
    return declared_shared_bytes(kernel_of(key).code, dict(enumerate(values)))


def faults(graph: Graph, plan: Plan, info: DeviceInfo, store: WeightStore) -> list[str]:
    """Limits that a plan breaks, derived here from the plan and the SPIR-V."""
    limits, found = info.limits, []
    most = min(limits.max_storage_buffer_range_bytes, limits.max_memory_allocation_bytes)
    sizes = [*plan.arena_bytes, *plan.results.values()]
    for node in map(graph.node, plan.constants):
        if node.op is Op.WEIGHT:
            sizes.append(store.nbytes(graph.attrs(node.id, WeightSpec)))
        else:
            sizes.append(math.prod(node.shape) * node.dtype.itemsize)
    found += [f"buffer of {size}" for size in sizes if size > most]
    for one in plan.dispatches:
        lanes = one.spec["WORKGROUP"]
        kept = (
            lanes <= limits.max_compute_work_group_invocations
            and lanes <= limits.max_compute_work_group_size[0]
            and len(one.bindings) <= limits.max_storage_buffers_per_stage
            and 4 * len(one.push) <= limits.max_push_constants_bytes
            and declared_shared(one) <= limits.max_compute_shared_memory_bytes
            and all(a <= b for a, b in zip(one.workgroups, limits.max_compute_work_group_count, strict=True))
        )
        found += [] if kept else [one.kernel.key]
    return found


def check_keeps(model: Model, info: DeviceInfo) -> None:
    lanes = lanes_of(model.device)
    checked = 0
    for graph, plan in every_plan(model, str(model.config), lanes, model.device.largest_buffer_bytes):
        assert faults(graph, plan, info, model.weight_store) == []
        check_plan(graph, plan, info, lanes)
        checked += 1
    assert checked >= 2 * len(PATHS)


_plans: dict[tuple[object, ...], list[tuple[Graph, Plan]]] = {}


def every_plan(model: Model, *key: object) -> list[tuple[Graph, Plan]]:
    """The plans of all steps over caches of both types; models with equal keys have equal ones."""
    if key not in _plans:
        _plans[key] = [
            plan_step(model, options, model.kv_geometry(4096, dtype))
            for options in dict.fromkeys(steps_of(model))
            for dtype in ("f32", "f16")
        ]
    return _plans[key]


@pytest.mark.parametrize("lanes", [None, SUBGROUPS], ids=["shared", "subgroup"])
@pytest.mark.parametrize("name", PLANNABLE)
def test_each_smallest_limit_alone_is_kept(monkeypatch: pytest.MonkeyPatch, name: str, lanes: Any) -> None:
    info = gpu(**{name: PLANNABLE[name]})
    check_keeps(planned_model(monkeypatch, info, small_llama(), lanes), info)


def test_all_smallest_limits_together_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    info = gpu(**PLANNABLE)
    for source in (small_llama(), phi_2(layers=2)):
        check_keeps(planned_model(monkeypatch, info, source), info)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("limits", [{}, PLANNABLE], ids=["alone", "all"])
def test_four_bindings_are_refused_by_name_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, name: str, limits: dict[str, Any]
) -> None:
    """Attention alone reads q, two caches and a count, and writes one: Vulkan's least of 4 is not enough."""
    info = gpu(**{**limits, "max_storage_buffers_per_stage": 4})
    with pytest.raises(
        DeviceError,
        match=r"^kernel '.*': ([5-9]|1[0-2]) exceeds maxPerStageDescriptorStorageBuffers of .*Made-Up 9000.* is 4$",
    ):
        planned_model(monkeypatch, info, SOURCES[name]())


def test_twelve_bindings_are_enough_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    info = gpu(max_storage_buffers_per_stage=MOST_BINDINGS)
    check_keeps(planned_model(monkeypatch, info, small_llama()), info)
    assert max(len(kernel_of(key).bindings) for key in registry().keys()) == MOST_BINDINGS  # noqa: SIM118  # no mapping
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"with at least {MOST_BINDINGS} storage buffers in a kernel" in readme


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_storage_buffer_range_bytes": 1 << 12},
            r"fits one storage buffer of device 0: Made-Up 9000.*: \d+ bytes, and 4096 are allowed",
        ),
        ({"max_compute_work_group_count": (8, 65535, 65535)}, r"\d+ exceeds maxComputeWorkGroupCount\[0\] of .* is 8$"),
        ({"max_compute_work_group_count": (1 << 20, 1, 1)}, r"16 exceeds maxComputeWorkGroupCount\[1\] of .* is 1$"),
        ({"max_compute_shared_memory_bytes": 512}, r"\d+ exceeds maxComputeSharedMemorySize of .* is 512$"),
        ({"max_compute_work_group_invocations": 32}, r"64 exceeds maxComputeWorkGroupInvocations of .* is 32$"),
        ({"max_compute_work_group_size": (32, 32, 32)}, r"64 exceeds maxComputeWorkGroupSize\[0\] of .* is 32$"),
        ({"max_memory_allocation_count": 20}, r"needs \d+ allocations, .*maxMemoryAllocationCount of .* is 20$"),
    ],
)
def test_less_than_vulkan_allows_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        planned_model(monkeypatch, gpu(**limits), small_llama())


STACK = (
    r"^the weight model\.layers\.0\..*\.experts\.0\.w1\.weight to .*\.experts\.7\.w3\.weight, 16 tensors of 1879048192"
)


def test_experts_that_one_buffer_cannot_hold_are_refused_with_the_type_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info, source = gpu(max_storage_buffer_range_bytes=1 << 30), mixtral_8x7b(layers=1)
    message = (
        rf"{STACK} bytes exceeds maxStorageBufferRange of device 0: Made-Up 9000[^;]*, 1073741824 bytes; "
        r"the experts of a layer lie in one buffer; load with weights='q8_0', which makes it (\d+) bytes$"
    )
    with pytest.raises(DeviceError, match=message) as refused:
        planned_model(monkeypatch, info, source)
    held = planned_model(monkeypatch, info, source, weights=DType.Q8_0)
    largest = max(held.weight_store.nbytes(spec) for spec in held.weight_specs() if spec.experts)
    assert str(refused.value).endswith(f"which makes it {largest} bytes")
    assert 16 * 14_336 * 4096 * 34 // 32 <= largest <= 1 << 30


def test_experts_that_no_type_makes_fit_need_another_device_or_file(monkeypatch: pytest.MonkeyPatch) -> None:
    message = rf"{STACK} bytes .*; use a device with larger storage buffers, or a file stored at fewer bits$"
    with pytest.raises(DeviceError, match=message):
        planned_model(monkeypatch, gpu(**PLANNABLE), mixtral_8x7b(layers=1))


def test_push_constants_beyond_the_limit_are_refused() -> None:
    kernel = registry().get("copy_words")
    check_dispatch(gpu(max_push_constants_bytes=12), kernel, {"WORKGROUP": 64}, (1, 1, 1), [16, 16])
    with pytest.raises(DeviceError, match=r"12 exceeds maxPushConstantsSize of .* which is 11"):
        check_dispatch(gpu(max_push_constants_bytes=11), kernel, {"WORKGROUP": 64}, (1, 1, 1), [16, 16])


def test_a_head_of_five_million_rows_keeps_to_65535_workgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    info = gpu(max_compute_work_group_count=(65535, 65535, 65535))
    model = planned_model(
        monkeypatch,
        info,
        llama_8b(
            num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=5_000_000
        ),
    )
    graph, plan = plan_step(model, StepOptions(1, "last", "device", "bounded"), model.kv_geometry(64, "f32"))
    assert faults(graph, plan, info, model.weight_store) == []
    head = next(one for one in reversed(plan.dispatches) if graph.node(one.node).op is Op.LINEAR)
    assert head.workgroups[0] > 32768


# Steps and caches that shrink


@pytest.mark.parametrize(
    ("heads", "inner", "sizes"),
    [
        (4, 14_336, {1, 16, 256}),
        (4, 262_144, {1, 16, 64}),
        (4, 600_000, {1, 16}),
        (8000, 14_336, {1}),
    ],
)
def test_chunks_shrink_where_an_activation_would_exceed_a_buffer(
    monkeypatch: pytest.MonkeyPatch, heads: int, inner: int, sizes: set[int]
) -> None:
    info = gpu(**PLANNABLE)
    source = llama_8b(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=128,
        intermediate_size=inner,
    )
    model = planned_model(monkeypatch, info, source)
    assert {one.seq for one in prompt_steps(model, 256 + 12)} == sizes
    for options in prompt_steps(model, 256 + 12):
        graph, plan = plan_step(model, options, model.kv_geometry(16, "f32"))
        assert faults(graph, plan, info, model.weight_store) == []


def test_all_logits_of_a_vast_vocabulary_are_taken_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama_8b(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=2_200_000
    )
    model = planned_model(monkeypatch, gpu(**PLANNABLE), source)
    assert model.max_step_tokens("all") == 15
    assert model.max_step_tokens("last") >= 256


def test_a_cache_whose_layers_exceed_a_buffer_names_the_largest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned_model(monkeypatch, gpu(**PLANNABLE))
    with pytest.raises(
        DeviceError,
        match=r"K of 164102144 bytes exceeds .* of device 0: Made-Up 9000.*, 134217728 bytes; use a smaller context "
        r"\(max_seq_len up to 32704 fits, up to 65472 with dtype='f16'\)",
    ):
        model.new_kv_cache(40_000)
    with pytest.raises(DeviceError, match=r"\(max_seq_len up to 65472 fits\)"):
        model.new_kv_cache(65_473, dtype="f16")
    for rows, dtype in ((32_704, "f32"), (65_472, "f16")):
        with pytest.raises(AssertionError, match="something was allocated"):
            model.new_kv_cache(rows, dtype)


@given(st.integers(1, 400), st.integers(0, 40), st.sampled_from([DType.F32, DType.F16]))
def test_the_longest_cache_within_so_many_bytes_is_the_longest(rows: int, more: int, dtype: DType) -> None:
    geometry = KvGeometry(2, 2, 1, 8, dtype)
    nbytes = rows * geometry.row_bytes + more
    longest = geometry.max_len_within(nbytes)
    assert replace(geometry, max_seq_len=longest).nbytes <= nbytes < replace(geometry, max_seq_len=longest + 1).nbytes


def test_a_cache_that_a_cpu_driver_would_not_read_to_its_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned_model(monkeypatch, replace(gpu(**PLANNABLE), kind="cpu"))
    geometry = model.kv_geometry(1, "f16")
    lanes = lanes_of(model.device)
    most = max_cached_rows(lanes, geometry.head_dim) - MAX_LANDING_ROWS
    assert MINIMAL_ROWS < most < 65_472
    with pytest.raises(DeviceError, match=rf"{most + 1} rows is too long .* use max_seq_len up to {most}, or a GPU"):
        model.new_kv_cache(most + 1, dtype="f16")
    with pytest.raises(AssertionError, match="something was allocated"):
        model.new_kv_cache(most, dtype="f16")
    # Whoever makes a cache another way meets the same refusal where its plan is built.
    options = StepOptions(1, "last", "device", "bounded")
    for rows in (most, most + 1):
        graph, plan = plan_step(model, options, replace(geometry, max_seq_len=rows))
        check_plan(graph, plan, gpu(**PLANNABLE), lanes)
        if rows == most:
            check_plan(graph, plan, model.device.info, lanes)
        else:
            with pytest.raises(DeviceError, match=rf"{most + 1} rows is too long .* up to {most},"):
                check_plan(graph, plan, model.device.info, lanes)


# Memory


def test_a_model_that_does_not_fit_is_refused_with_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfDeviceMemoryError) as refused:
        planned_model(monkeypatch, gpu(8 << 30))
    message = str(refused.value)
    assert "Made-Up 9000" in message and f"{8 << 30} of {8 << 30} free" in message
    for part in ("weights 16", "a KV cache of 16 rows", "activations", "fewer bits"):
        assert part in message


def test_weights_at_16_bits_are_offered_where_they_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama_8b(DType.F32)
    with pytest.raises(OutOfDeviceMemoryError, match=r"weights='f16' \(160\d+ bytes of weights\), which fits"):
        planned_model(monkeypatch, gpu(20 << 30), source)
    with pytest.raises(OutOfDeviceMemoryError, match="use a smaller model"):
        planned_model(monkeypatch, gpu(14 << 30), source)


def test_the_last_byte_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfDeviceMemoryError) as refused:
        planned_model(monkeypatch, gpu(1 << 20))
    needed = int(str(refused.value).split("needs ")[1].split()[0])
    planned_model(monkeypatch, gpu(needed))
    with pytest.raises(OutOfDeviceMemoryError):
        planned_model(monkeypatch, gpu(needed - 1))


def test_a_cache_that_does_not_fit_names_a_length_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned_model(monkeypatch, gpu(33 << 29))
    used = sum(model.weight_store.nbytes(spec) for spec in model.weight_specs())
    vars(model.device)["free_bytes"] = (33 << 29) - used
    with pytest.raises(OutOfDeviceMemoryError, match=r"8192 rows of f32 takes 2164260864 bytes") as refused:
        model.new_kv_cache(8192)
    most = int(str(refused.value).split("up to ")[1].split()[0])
    half = int(str(refused.value).split("up to ")[2].split()[0])
    assert 0 < most < 8192 and half == 8192
    assert model.memory_report(most).total <= 33 << 29
    assert model.memory_report(most + 64).total > (33 << 29) - (64 << 20)


def test_a_report_adds_up_and_reads_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned_model(monkeypatch, GPU)
    report = model.memory_report()
    assert (report.max_seq_len, report.kv_dtype, report.heap) == (8192, "f32", 64 << 30)
    assert report.kv_cache == 32 * 2 * 8 * (8192 + MAX_LANDING_ROWS) * 128 * 4
    assert 16 << 30 > report.weights > 2 * 8_000_000_000
    assert report.activations > report.staging > 4 * 128_256
    assert report.total == report.weights + report.kv_cache + report.activations + report.staging
    assert report.fits and not replace(report, heap=report.total - 1).fits
    assert model.memory_report(8192, "f16").kv_cache * 2 == report.kv_cache
    lines = str(report).splitlines()
    assert len(lines) == 6 and lines[0].endswith("MiB") and "8192 rows of f32" in lines[1]


# Shared memory


@pytest.mark.parametrize("lanes", [None, SUBGROUPS], ids=["shared", "subgroup"])
@pytest.mark.parametrize("source", [small_llama, phi_2], ids=["llama", "phi"])
def test_the_shared_memory_of_each_kernel_is_what_its_code_declares(
    monkeypatch: pytest.MonkeyPatch, source: Any, lanes: Any
) -> None:
    model = planned_model(monkeypatch, GPU, source(), lanes)
    seen: dict[str, int] = {}
    for options in dict.fromkeys(steps_of(model)):
        _, plan = plan_step(model, options, model.kv_geometry(64, "f16"))
        for one in plan.dispatches:
            if one.kernel.key not in seen:
                seen[one.kernel.key] = declared_shared(one)
                assert one.kernel.shared_bytes(one.spec) == seen[one.kernel.key], one.kernel.key
    assert (max(seen.values()) > 2048) == (lanes is None)


@pytest.mark.parametrize("values", [range(64, 512, 4), range(60, 7, -1)])
def test_every_kernel_declares_what_is_computed(values: range) -> None:
    for key in registry().keys():  # noqa: SIM118  # a registry is no mapping
        kernel = kernel_of(key)
        spec = dict(zip(kernel.spec, values, strict=False))
        assert kernel.shared_bytes(spec) == declared_shared_bytes(kernel.code, dict(enumerate(spec.values()))), key


ATTENTION = {"WORKGROUP": 64, "HEAD_DIM": 128}
TOP_K = {"WORKGROUP": 64, "LISTED": 256, "K": 5}


@pytest.mark.parametrize(
    ("key", "spec", "nbytes"),
    [
        ("copy_words", {}, 0),
        ("norm LANES=subgroup NORM=rms", {}, 0),
        ("norm LANES=shared NORM=layer", {"WORKGROUP": 128}, 512),
        ("self_check", {"WORKGROUP": 8}, 32),
        ("route", {"EXPERTS": 7}, 28 + 28),
        ("route", {"EXPERTS": 128}, 512 + 512),
        # The pairs of the list are aligned to 8 bytes, so that the number of those chosen may take 4 bytes more.
        ("top_k LANES=shared", TOP_K, 256 + 2048 + (20 + 4) + (4 + 4)),
        ("top_k LANES=subgroup", {**TOP_K, "K": 64}, 2048 + 256 + (4 + 4)),
        ("linear LANES=subgroup DTYPE=f32 TOKENS=16 EPILOGUE=plain KV=none", {"WORKGROUP": 64, "X_CHUNK": 256}, 0),
        ("linear LANES=shared DTYPE=q4_k TOKENS=8 EPILOGUE=gated KV=none", {"WORKGROUP": 64, "X_CHUNK": 256}, 9472),
        (
            "linear LANES=shared DTYPE=f16 TOKENS=1 EPILOGUE=plain KV=none",
            {"WORKGROUP": 2, "X_CHUNK": 32},
            16 + 128 + 32,
        ),
        ("attention LANES=subgroup KV=f16 QUERIES=8", ATTENTION, 1024),
        ("attention LANES=shared KV=f16 QUERIES=1", ATTENTION, 256 + 1024 + 512 + 256),
        ("attention LANES=shared KV=f32 QUERIES=3", {"WORKGROUP": 32, "HEAD_DIM": 100}, 128 + 512 + 1200 + 384),
    ],
)
def test_shared_memory_is_what_one_would_count_by_hand(key: str, spec: dict[str, int], nbytes: int) -> None:
    kernel = kernel_of(key)
    assert kernel.shared_bytes({**dict.fromkeys(kernel.spec, 1), **spec}) == nbytes


def test_shared_memory_of_constants_that_are_not_the_kernels_is_refused() -> None:
    with pytest.raises(ShaderError, match="kernel 'route' takes the specialization constants"):
        registry().get("route").shared_bytes({"EXPERTS": 8})


def test_the_smallest_device_of_this_test_is_the_smallest_that_vulkan_allows() -> None:
    for name, value in SMALLEST.items():
        roomy = getattr(ROOMY, name)
        assert value <= roomy if isinstance(value, int) else all(a <= b for a, b in zip(value, roomy, strict=True))


def test_weights_of_a_plan_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned_model(monkeypatch, GPU, small_llama())
    graph, plan = plan_step(model, StepOptions(1, "last", "device", "bounded"), model.kv_geometry(64, "f32"))
    specs = weight_constants(graph, plan)
    assert len(specs) == len(set(specs)) == len(model.weight_specs())


def test_constants_that_are_not_the_kernels_are_refused() -> None:
    with pytest.raises(ShaderError, match="kernel 'copy_words' takes the specialization constants"):
        check_dispatch(GPU, registry().get("copy_words"), {}, (1, 1, 1), [16, 16])
