"""Candidates chosen on the device: to the bit those of the row, small to read, and no reason to build a plan again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from stepping import capture_of, kept, lose_devices, run, token_ids
from tiny_llama import PATHS, TINY, changed_copy

from vkdecode.decode import Candidates, DecodeMode, InferenceContext, KvCache
from vkdecode.decode import context as context_module
from vkdecode.errors import ContextLengthError, DeviceLostError, InvalidInputError, VkDecodeError
from vkdecode.generate import generate
from vkdecode.gpu import Device, Download, Recording, Upload
from vkdecode.graph import NodeId, Op
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.runtime.weight_layout import max_units
from vkdecode.sampling import Sampler, SamplingParams
from vkdecode.token_model import KvFeed

PROMPT = token_ids(21, 160)
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.5, "top_k": 64, "top_p": 0.9},
    {"temperature": 3.0, "top_k": 7, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.7, "min_p": 0.05},
)


@pytest.fixture
def context(device: Device) -> Iterator[InferenceContext]:
    with InferenceContext(device) as opened:
        yield opened


@pytest.fixture
def kv(llama: Model) -> Iterator[KvCache]:
    with closing(llama.new_kv_cache(64)) as made:
        yield made


def check_best(best: Candidates, row: NDArray[np.float32], count: int) -> None:
    expected = np.lexsort((np.arange(row.size), -row))[:count]
    np.testing.assert_array_equal(best.token_ids, expected)
    np.testing.assert_array_equal(best.logits.view(np.uint32), row[expected].view(np.uint32))


class RowsOnly:
    """A model without candidates, so that a feed reads whole rows."""

    def __init__(self, model: Model) -> None:
        self.config = model.config
        self.device = model.device
        self.new_kv_cache = model.new_kv_cache
        self.prepare = model.prepare
        self.forward_with_kv_context_persistent = model.forward_with_kv_context_persistent


def chosen(model: Any, params: SamplingParams, kv: KvCache, context: InferenceContext, tokens: int = 8) -> list[int]:
    """A prompt and its continuation through a feed."""
    kv.truncate_to(0)
    feed, sampler = KvFeed(model, kv.max_seq_len, kv, context), Sampler(params)
    feed.prepare(len(PROMPT), sampler)
    found = [feed.next_token(PROMPT, sampler)]
    while len(found) < tokens:
        found.append(feed.next_token(found[-1:], sampler))
    return found


def check_steps(
    model: Model,
    kv: KvCache,
    context: InferenceContext,
    mode: DecodeMode,
    steps: Sequence[Sequence[int]],
    counts: Sequence[int],
) -> None:
    """Candidates of steps from an empty cache against the whole rows."""
    kv.truncate_to(0)
    for tokens in steps:
        start = kv.cached_len
        row = run(model, tokens, kv, context, mode)
        for count in counts:
            kv.truncate_to(start)
            check_best(model.top_candidates(tokens, kv, context, count, mode), row, count)
    assert kv.cached_len == sum(map(len, steps))


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
@pytest.mark.parametrize("lanes", ["subgroup", "shared"])
def test_the_candidates_are_the_best_of_the_row(
    tiny_models: Callable[..., Model], device: Device, shared_device: Device, lanes: str, kv_offset: str, arm: str
) -> None:
    model = tiny_models("llama", device if lanes == "subgroup" else shared_device)
    with InferenceContext(model.device) as context, closing(model.new_kv_cache(64)) as kv:
        for rung in ("captured", "held"):
            steps = (PROMPT[:5], [7], [9], PROMPT[:3])
            check_steps(model, kv, context, DecodeMode(rung, kv_offset, arm), steps, (1, 2, 64))


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS)
def test_so_they_are_where_each_step_is_built_anew(
    llama: Model, kv: KvCache, context: InferenceContext, kv_offset: str, arm: str
) -> None:
    check_steps(llama, kv, context, DecodeMode("rebuild", kv_offset, arm), (PROMPT[:5], [7]), (1, 64))


@pytest.mark.parametrize("name", ["llama-bias-headdim", "llama-tied-mqa", "phi"])
def test_every_architecture_has_them(tiny_models: Callable[..., Model], device: Device, name: str) -> None:
    model = tiny_models(name, device)
    with InferenceContext(device) as context, closing(model.new_kv_cache(64)) as kv:
        for tokens in (PROMPT[:5], [7]):
            row = run(model, tokens, kv, context)
            kv.truncate_to(kv.cached_len - len(tokens))
            check_best(model.top_candidates(tokens, kv, context, 20), row, 20)


def test_without_fusions_and_in_pieces_they_are_the_same(llama: Model, device: Device) -> None:
    for made in ({"fusions": ()}, {"work_per_submission": 1}):
        with InferenceContext(device, **made) as context, closing(llama.new_kv_cache(64)) as kv:
            for tokens in (PROMPT[:5], [7]):
                row = run(llama, tokens, kv, context)
                kv.truncate_to(kv.cached_len - len(tokens))
                check_best(llama.top_candidates(tokens, kv, context, 20), row, 20)


@pytest.mark.parametrize("fields", PARAMS)
def test_the_device_and_the_host_choose_the_same_tokens(
    llama: Model, kv: KvCache, context: InferenceContext, fields: dict[str, float]
) -> None:
    host: Any = RowsOnly(llama)
    texts = set()
    for seed in range(25):
        params = SamplingParams(**fields, seed=seed)  # type: ignore[arg-type]  # floats and ints by name
        on_device = chosen(llama, params, kv, context)
        assert on_device == chosen(host, params, kv, context)
        texts.add(tuple(on_device))
    assert len(texts) == 1 if fields["temperature"] == 0 else len(texts) > 10
    assert context.stats.plans_built == 1


def test_many_seeds_on_one_row_draw_the_same(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    row = run(llama, PROMPT, kv, context)
    kv.truncate_to(0)
    best = llama.top_candidates(PROMPT, kv, context, 40)
    for seed in range(300):
        params = SamplingParams(temperature=2.0, top_k=40, top_p=0.95, min_p=0.01, seed=seed)
        assert Sampler(params).sample_candidates(best.token_ids, best.logits) == Sampler(params).sample(row)


@pytest.mark.parametrize("kv_offset", ["device", "symenv"])
def test_changing_between_rows_and_candidates_builds_nothing_anew(
    llama: Model, kv: KvCache, context: InferenceContext, kv_offset: str
) -> None:
    mode = DecodeMode("captured", kv_offset)

    def once(count: int, tokens: Sequence[int]) -> None:
        kv.truncate_to(0)
        if count:
            llama.top_candidates(tokens, kv, context, count, mode)
        else:
            run(llama, tokens, kv, context, mode)

    for tokens in (PROMPT[:3], PROMPT[:1]):
        for count in (0, 1, 64):
            once(count, tokens)
    stats = context.stats
    assert (stats.plans_built, stats.prefill_plans_built) == (1, 1)
    assert (stats.recordings_made, stats.prefill_recordings_made) == (3, 3)
    before = replace(stats)
    nodes = kept(context).graph_node_count
    for count in (1, 0, 5, 64, 0, 1, 40):
        once(count, PROMPT[:1])
        once(count, PROMPT[:3])
    extra = {"tokens_replayed": before.tokens_replayed + 7, "prefill_replays": before.prefill_replays + 7}
    one_offs = before.one_off_recordings + (14 if kv_offset == "symenv" else 0)
    assert stats == replace(before, **extra, one_off_recordings=one_offs)
    assert kept(context).graph_node_count == nodes


def test_a_rebound_plan_records_each_kind_again(llama: Model, context: InferenceContext) -> None:
    with closing(llama.new_kv_cache(16)) as one, closing(llama.new_kv_cache(16)) as other:
        first = llama.top_candidates([3], one, context, 5)
        run(llama, [3], other, context)
        other.truncate_to(0)
        again = llama.top_candidates([3], other, context, 5)
        np.testing.assert_array_equal(first.logits, again.logits)
        assert (context.stats.plans_built, context.stats.rebinds, context.stats.recordings_made) == (1, 1, 3)


def test_only_the_candidates_are_read(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    def read(count: int, tokens: Sequence[int]) -> int:
        before = context.result_bytes_read
        kv.truncate_to(0)
        llama.top_candidates(tokens, kv, context, count) if count else run(llama, tokens, kv, context)
        return context.result_bytes_read - before

    for tokens in (PROMPT[:1], PROMPT):
        assert [read(count, tokens) for count in (0, 1, 40, 64)] == [4 * 160, 8, 320, 512]


@pytest.mark.parametrize(("kv_offset", "arm"), PATHS[:3])
def test_only_what_is_asked_for_crosses_to_the_host(
    llama: Model, kv: KvCache, context: InferenceContext, kv_offset: str, arm: str
) -> None:
    """Sixteen bytes for the best token, since no buffer has fewer; everything that a step binds is one upload."""
    mode = DecodeMode("captured", kv_offset, arm)
    for tokens in (PROMPT[:1], PROMPT[:5]):
        kv.truncate_to(0)
        run(llama, tokens, kv, context, mode)
        for count in (1, 2, 64):
            kv.truncate_to(0)
            llama.top_candidates(tokens, kv, context, count, mode)
        session = kept(context) if len(tokens) == 1 else next(iter(context.held.values()))
        recordings = capture_of(session)._recordings
        downloads = {node: [one.nbytes for one in made[-1].downloads] for node, made in recordings.items()}
        assert downloads == {
            session.logits_node: [4 * 160],
            session.wanted_node(1): [16],
            session.wanted_node(64): [8 * 64],
        }
        for (recording,) in recordings.values():
            commands = recording._commands
            uploads = [one.storages for one in commands if isinstance(one, Upload)]
            assert uploads == [(session.base_cache[session.token_ids_node].whole,)]
            data = [session.base_cache[node] for node in session.executable.plan.data]
            assert {one.whole for one in data} == set(uploads[0])
            assert sum(one.nbytes for one in data) == uploads[0][0].nbytes
            assert sum(isinstance(one, Download) for one in commands) == 1


def test_the_lists_are_what_decides(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    """Negative control: another list on the host gives other candidates, another row does not."""
    expected = llama.top_candidates([3], kv, context, 3)
    session = kept(context)
    list_of_64 = session.top_k_nodes[1]
    submit = Recording.submit

    def spoil(node: NodeId) -> Candidates:
        def spoiled(recording: Recording) -> None:
            submit(recording)
            words = session.executable.storage(node).data.view(np.uint32)
            words[:6] = words[:6][::-1].copy()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recording, "submit", spoiled)
            kv.truncate_to(0)
            return llama.top_candidates([3], kv, context, 3)

    np.testing.assert_array_equal(spoil(session.logits_node).token_ids, expected.token_ids)
    assert spoil(list_of_64).token_ids.tolist() != expected.token_ids.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=40, seed=1)])
def test_logits_that_are_not_finite_give_the_error_of_the_row(
    device: Device, tmp_path: Path, value: float, params: SamplingParams
) -> None:
    head = load_file(TINY / "llama" / "model.safetensors")["lm_head.weight"].copy()
    head[[33, 150]] = value
    with load(changed_copy(tmp_path / "spoiled", tensors={"lm_head.weight": head}), device=device) as model:
        messages = []
        for used in (model, RowsOnly(model)):
            with InferenceContext(device) as context, closing(model.new_kv_cache(64)) as kv:
                with pytest.raises(VkDecodeError, match=r"of 160 logits are") as raised:
                    chosen(used, params, kv, context)
                messages.append(str(raised.value))
                assert kv.cached_len == 0
        assert messages[0] == messages[1]


def test_a_head_in_parts_gives_the_same_candidates(
    llama: Model, device: Device, monkeypatch: pytest.MonkeyPatch, kv: KvCache, context: InferenceContext
) -> None:
    row = run(llama, PROMPT[:1], kv, context)

    def smaller(nbytes: int, block_rows: int, where: str) -> Callable[..., int]:
        return max_units(row.size * 64 * 4 // 3, block_rows, where)

    monkeypatch.setattr(context_module, "max_units", smaller)
    with (
        load(TINY / "llama", device=device) as split,
        InferenceContext(device) as other,
        closing(split.new_kv_cache(64)) as cache,
    ):
        best = split.top_candidates(PROMPT[:1], cache, other, 30)
        session = kept(other)
        assert session.graph.node(session.logits_node).op is Op.CONCAT
        check_best(best, row, 30)


@pytest.mark.parametrize("count", [0, -1, 65, 1.0, True, "1", None])
def test_a_count_out_of_its_range_is_refused(llama: Model, kv: KvCache, context: InferenceContext, count: Any) -> None:
    with pytest.raises(InvalidInputError, match="count must be a whole number from 1 to 64"):
        llama.top_candidates([3], kv, context, count)
    assert kv.cached_len == 0


def test_a_step_that_does_not_fit_changes_nothing(llama: Model, kv: KvCache, context: InferenceContext) -> None:
    with pytest.raises(ContextLengthError):
        llama.top_candidates([3] * 65, kv, context, 1)
    assert kv.cached_len == 0


@pytest.mark.parametrize("rung", ["captured", "held"])
def test_a_lost_device_is_noticed_by_the_list(
    llama: Model, kv: KvCache, context: InferenceContext, monkeypatch: pytest.MonkeyPatch, rung: str
) -> None:
    mode = DecodeMode(rung)
    llama.top_candidates([3], kv, context, 1, mode)
    lose_devices(monkeypatch)
    with pytest.raises(DeviceLostError, match="top_k"):
        llama.top_candidates([3], kv, context, 1, mode)


def test_preparing_for_candidates_leaves_nothing_to_record(
    llama: Model, kv: KvCache, context: InferenceContext
) -> None:
    for tokens in (5, 1):
        llama.prepare(kv, context, tokens, candidates=40)
    before = replace(context.stats)
    llama.top_candidates(PROMPT[:5], kv, context, 40)
    llama.top_candidates([3], kv, context, 40)
    after = replace(before, tokens_replayed=before.tokens_replayed + 1, prefill_replays=before.prefill_replays + 1)
    assert context.stats == after


def test_generate_reads_no_rows(llama: Model, context: InferenceContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a whole row was read")

    host = [chosen(RowsOnly(llama), SamplingParams(), kv, context, 6) for kv in [llama.new_kv_cache(64)]]
    monkeypatch.setattr(Model, "forward_with_kv_context_persistent", refuse)
    assert generate(llama, PROMPT, max_tokens=6).token_ids[:6] == host[0]
