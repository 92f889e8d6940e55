"""The bench's arithmetic and report, with a clock and figures of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_up_bench import MIB, result, speed
from rich.console import Console

from vkdecode.bench import memory
from vkdecode.bench.options import DEFAULT_PREFILLS, BenchOptions, counts
from vkdecode.bench.plot import check_plot, check_writable, save_plot
from vkdecode.bench.report import headline, mib, tables
from vkdecode.bench.shapes import BUILT_IN
from vkdecode.bench.synthetic import SYNTHETIC_DTYPES, SyntheticSource, synthetic_source
from vkdecode.bench.timing import measure, measure_in_turns, timed
from vkdecode.errors import InvalidInputError, ModelFileError, VkDecodeError
from vkdecode.weights import DType
from vkdecode.weights.blocks import decode_rows, ggml_type


class Clock:
    """Seconds that rise as an action says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.in_submissions = 0.0

    def work(self, host: float, submission: float) -> None:
        self.now += host + submission
        self.in_submissions += submission


def test_host_time_is_what_is_left_of_a_call_without_its_submissions() -> None:
    clock = Clock()
    turns = iter([(0.1, 1.0), (0.3, 2.0), (0.2, 4.0)])
    timing = measure(lambda: clock.work(*next(turns)), 3, lambda: clock.in_submissions, clock=lambda: clock.now)
    assert timing.seconds == pytest.approx((1.1, 2.3, 4.2))
    assert timing.host == pytest.approx((0.1, 0.3, 0.2))
    assert (timing.median, timing.best, timing.worst, timing.host_median) == pytest.approx((2.3, 1.1, 4.2, 0.2))


def test_actions_by_turns_keep_their_times_apart() -> None:
    clock, turns = Clock(), []

    def action(name: str, seconds: float) -> None:
        turns.append(name)
        clock.work(0.0, seconds)

    actions = [lambda: action("a", 1.0), lambda: action("b", 2.0)]
    first, second = measure_in_turns(actions, 2, lambda: clock.in_submissions, clock=lambda: clock.now)
    assert turns == ["a", "b"] * 2
    assert (first.seconds, second.seconds, second.host) == ((1.0, 1.0), (2.0, 2.0), (0.0, 0.0))


def test_a_slow_action_is_repeated_within_the_budget_but_runs_at_least_once() -> None:
    clock = Clock()

    def calls(repeats: int, budget_seconds: float) -> int:
        timing = measure(
            lambda: clock.work(0.0, 1.0),
            repeats,
            lambda: clock.in_submissions,
            budget_seconds=budget_seconds,
            clock=lambda: clock.now,
        )
        return len(timing.seconds)

    assert [calls(5, budget) for budget in (0.0, 2.5, 100.0)] == [1, 3, 5]
    assert calls(0, 100.0) == 1
    clock = Clock()
    assert timed(lambda: clock.work(0.5, 0.0), lambda: clock.now) == 0.5


def test_speeds_traffic_and_fractions() -> None:
    (first, second) = result().decode
    assert first.speed.milliseconds == 20.0
    assert first.speed.tokens_per_second == 50.0
    assert (first.speed.best_milliseconds, first.speed.worst_milliseconds) == (10.0, 30.0)
    assert first.speed.host_milliseconds == 2.0
    assert first.gigabytes_per_second == pytest.approx(5.0)
    assert first.of_copy_bandwidth == pytest.approx(0.25)
    assert second.gigabytes_per_second == pytest.approx(3.0)
    assert speed("prefill", 100.0, tokens=16).tokens_per_second == pytest.approx(160.0)
    assert result().load.to_first_token_seconds == 1.875
    assert result().memory.device_of_file_and_kv == pytest.approx(1.05)
    assert result().ratios == pytest.approx(
        {"captured_over_rebuild_device": 45.0, "longest_over_shortest_context": 0.5}
    )
    assert (result().copy.best_way, result().copy.best) == ("vkCmdCopyBuffer", 20.0)


def test_host_memory_leaves_out_the_import_and_device_memory_only_where_that_is_the_process() -> None:
    assert memory.host_bytes(500, 100, 300, is_cpu=True) == 100
    assert memory.host_bytes(500, 100, 300, is_cpu=False) == 400
    assert memory.host_bytes(None, 100, 300, is_cpu=True) is None
    assert memory.host_bytes(500, None, 300, is_cpu=True) is None
    assert memory.field_bytes("Name:\tx\nVmRSS:\t  12 kB\nVmHWM:\t34 kB\n", "VmHWM") == 34 * 1024
    assert memory.field_bytes("Name:\tx\n", "VmRSS") is None


def test_the_process_and_a_bare_import_have_sizes() -> None:
    bare, now, peak = memory.bare_import_bytes(), memory.rss_bytes(), memory.peak_rss_bytes()
    assert bare is not None and now is not None
    assert MIB < bare < peak
    assert now <= peak


def test_weight_files_are_read_to_the_end(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 10), ("b.safetensors", 20), ("config.json", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert memory.read_once(memory.weight_files(tmp_path)) == 30
    assert memory.weight_files(tmp_path / "config.json") == [tmp_path / "config.json"]


def test_lengths_are_those_that_fit_the_model() -> None:
    plan = BenchOptions().within(8192)
    assert (plan.contexts, plan.prefills, plan.tokens, plan.slow_repeats) == ((50, 250, 1000), DEFAULT_PREFILLS, 32, 3)
    assert plan.rows == 1002
    short = BenchOptions().within(128)
    assert (short.contexts, short.prefills, short.rows) == ((50,), (16, 64), 64)
    shorter = BenchOptions().within(8)
    assert (shorter.contexts, shorter.prefills, shorter.rows) == ((6,), (8,), 8)
    quick = BenchOptions(quick=True).within(8192)
    assert (quick.contexts, quick.prefills, quick.tokens, quick.slow_repeats) == ((50,), (16,), 4, 1)
    asked = BenchOptions(contexts=(90, 7, 7), prefills=(100, 3), tokens=5, quick=True).within(100)
    assert (asked.contexts, asked.prefills, asked.tokens) == ((7, 90), (3, 100), 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contexts": (99,)}, "a context of 99 tokens does not fit: the model has 100 positions, so at most 98"),
        ({"prefills": (101,)}, "a prompt of 101 tokens does not fit"),
        ({"contexts": ()}, "contexts must be one or more positive lengths"),
        ({"prefills": (0,)}, "prefills must be one or more positive lengths"),
        ({"tokens": 0}, "tokens must be positive"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        BenchOptions(**options).within(100)  # type: ignore[arg-type]  # wrong values on purpose


def test_lists_of_lengths() -> None:
    assert counts("50,1000", "--context") == (50, 1000)
    assert counts(" 7 8, 9 ", "--context") == (7, 8, 9)
    for text in ("", ",", "x", "1,-2", "0", "1.5"):
        with pytest.raises(InvalidInputError, match=r"--context .* such as 50,1000"):
            counts(text, "--context")


def test_tables_show_every_figure_and_a_dash_for_what_is_unknown() -> None:
    console = Console(width=200, record=True)
    for table in tables(result(bare=None)):
        console.print(table)
    text = console.export_text()
    for words in (
        "50.0",
        "25%",
        "vkCmdCopyBuffer",
        "160.0",
        "captured, offset by device",
        "1.875",
        "1.050",
        "45.00",
        "-",
    ):
        assert words in text
    assert headline(result()) == "m [1].gguf (random weights), q4_0 50.0 MiB, on Made-Up 9000, none"
    assert (mib(None), mib(3 << 19)) == ("-", "1.5 MiB")


def test_json_holds_every_figure() -> None:
    found = json.loads(json.dumps(result().as_json()))
    assert found["schema"] == 1
    assert found["decode"][0]["of_copy_bandwidth"] == pytest.approx(0.25)
    assert found["rungs"][0]["rung"] == "captured" and found["rungs"][0]["kv_offset"] == "device"
    assert found["load"]["to_first_token_seconds"] == 1.875
    assert found["memory"]["device_of_file_and_kv"] == pytest.approx(1.05)
    assert found["copy_bandwidth"]["best_gigabytes_per_second"] == 20.0


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_a_picture(tmp_path: Path, ending: str, magic: bytes) -> None:
    file = check_plot(str(tmp_path / f"speed.{ending}"))
    save_plot(result(), file)
    assert file.read_bytes().startswith(magic)
    assert file.stat().st_size > 2000


def test_a_plot_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, words in (("x.pdf", "must end with .png or .svg"), ("no/where/x.png", "cannot write")):
        with pytest.raises(InvalidInputError, match=words):
            check_plot(str(tmp_path / path))
    with pytest.raises(InvalidInputError, match="--json: cannot write"):
        check_writable(tmp_path, "--json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(VkDecodeError, match=r"pip install 'vkdecode\[plot\]'"):
        check_plot(str(tmp_path / "x.png"))


def test_the_package_does_not_need_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import vkdecode.bench; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("dtype", SYNTHETIC_DTYPES, ids=lambda dtype: dtype.value)
def test_random_rows_are_numbers_of_a_sane_size(dtype: DType) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rows, again = (
        SyntheticSource("made-up", BUILT_IN["llama-3.2-1b"], dtype).read(name, slice(0, 64))[:, : dtype.row_bytes(512)]
        for _ in range(2)
    )
    np.testing.assert_array_equal(rows.view(np.uint8), again.view(np.uint8))
    rows = np.ascontiguousarray(rows)[:, : dtype.row_bytes(512) // dtype.itemsize]
    values = decode_rows(rows, ggml_type(dtype), dtype.block_bytes) if dtype.is_block else rows.astype(np.float32)
    values = values[:, :512]
    assert values.shape == (64, 512)
    assert np.isfinite(values).all()
    assert 0.015 < float(values.std()) < 0.025
    assert abs(float(values.mean())) < 0.005


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_shapes_have_all_tensors(name: str) -> None:
    source = synthetic_source(name, "f16")
    config = source.config
    layers = int(config["num_hidden_layers"])
    per_layer = [one for one in source.names() if one.startswith(f"model.layers.{layers - 1}.")]
    assert len(per_layer) == 9
    assert f"model.layers.{layers}.input_layernorm.weight" not in source
    assert ("lm_head.weight" in source) == (not config.get("tie_word_embeddings"))
    parameters = sum(int(np.prod(source.info(one).shape)) for one in source.names())
    billions = {"smollm2-135m": 0.1345, "tinyllama-1.1b": 1.10, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213}
    assert parameters / 1e9 == pytest.approx(billions.get(name, 8.03), rel=0.002)


def test_a_row_is_the_same_however_it_is_asked_for() -> None:
    source = synthetic_source("smollm2-135m", "q8_0")
    name = "model.layers.3.mlp.down_proj.weight"
    info = source.info(name)
    assert (info.shape, info.dtype) == ((576, 1536), DType.Q8_0)
    whole = source.read(name)
    assert whole.shape == info.read_shape and whole.flags.c_contiguous
    np.testing.assert_array_equal(source.read(name, slice(5, 9)), whole[5:9])
    np.testing.assert_array_equal(source.read(name, np.array([500, 2])), whole[[500, 2]])
    assert not (source.read(name) == source.read("model.layers.4.mlp.down_proj.weight")).all()
    assert all((one != other).any() for one, other in pairwise(whole[:50]))
    np.testing.assert_array_equal(source.read("model.norm.weight", slice(0, 3)), np.ones(3, np.float32))
    source.close()
    assert source.read(name, slice(0, 1)).shape == (1, info.read_shape[1])
    with pytest.raises(ModelFileError, match="no tensor"):
        source.info("model.layers.30.mlp.down_proj.weight")
    with pytest.raises(InvalidInputError):
        source.read(name, np.array([576]))


def test_heads_and_odd_rows_take_a_format_that_fits() -> None:
    eight = synthetic_source("llama-3.1-8b", "q4_0")
    for vocabulary in ("lm_head.weight", "model.embed_tokens.weight"):
        assert eight.info(vocabulary).dtype is DType.Q8_0
        assert synthetic_source("llama-3.1-8b", "q4_k").info(vocabulary).dtype is DType.Q6_K
        assert synthetic_source("llama-3.1-8b", "q5_1").info(vocabulary).dtype is DType.Q5_1
    assert eight.info("model.layers.0.mlp.down_proj.weight").dtype is DType.Q4_0
    assert eight.info("model.norm.weight").dtype is DType.F32
    small = synthetic_source("smollm2-135m", "q4_k")
    assert small.info("model.embed_tokens.weight").dtype is DType.Q8_0
    assert small.info("model.layers.0.mlp.up_proj.weight").dtype is DType.Q8_0
    assert small.info("model.layers.0.mlp.down_proj.weight").dtype is DType.Q4_K
    odd = SyntheticSource("odd", {**BUILT_IN["smollm2-135m"], "intermediate_size": 40}, DType.Q8_0)
    assert odd.info("model.layers.0.mlp.down_proj.weight").dtype is DType.F16
    billions = eight.nbytes / 1e9
    assert 5.0 < billions < 5.2


def test_a_phi_config_has_phi_tensors(tmp_path: Path) -> None:
    config = {
        "model_type": "phi",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = synthetic_source(str(tmp_path), "bf16")
    assert source.path.name == tmp_path.name
    assert source.info("model.layers.1.self_attn.dense.weight").shape == (64, 64)
    assert not source.read("lm_head.bias").any()


def test_synthetic_models_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"neither a built-in shape nor a config\.json; built in: smollm2-135m"):
        synthetic_source("llama-9-1b")
    with pytest.raises(InvalidInputError, match="synthetic weights must be one of f32, f16"):
        synthetic_source("llama-3.2-1b", "q9")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(VkDecodeError, match="mamba"):
        synthetic_source(str(tmp_path))
