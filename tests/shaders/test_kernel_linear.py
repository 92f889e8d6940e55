"""Products with a tiled weight and everything fused around them: norms, bias, residual, rotation, activations."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_lab import TURN, axes_of, bits, check, subgroup, variants
from kv_rows import KV_DTYPES
from products import ACTIVATIONS, DTYPES, EPSILON, NORMS, SHARED_SHAPES, SUBGROUP_SHAPES, Fused, Problem, Shape

from vkdecode.gpu import Lanes
from vkdecode.graph import Graph, WeightSpec
from vkdecode.runtime.kernels import choose_kernel
from vkdecode.weights.dtypes import BLOCK_DTYPES, DType

KEYS = [
    key
    for form, tokens in (("subgroup", [1, 16]), ("shared", [1, 8]))
    for dtype in DTYPES
    for count in tokens
    for epilogue, kinds in (("plain", ["none"]), ("gated", ["none"]), ("rope", list(KV_DTYPES)))
    for key in variants("linear", LANES=[form], DTYPE=[dtype], TOKENS=[count], EPILOGUE=[epilogue], KV=kinds)
]


def fused_of(index: int) -> Fused:
    """What the kernel of this index is tested with: something else at each width."""
    row = index // 4 + 2 * TURN
    norm = NORMS[(index + row) % 3]
    epilogue = axes_of(KEYS[index])["EPILOGUE"]
    if epilogue == "plain":
        return Fused(norm, ACTIVATIONS[row // 2 % 3], row // 6 % 2 == 0)
    return Fused(norm, ACTIVATIONS[1 + row // 2 % 2] if epilogue == "gated" else "none")


# Five shapes in a Latin square over the epilogues and the other axes, moved on for each width.
CASES = [
    pytest.param(key, shapes[number], fused_of(index), id=f"{key} {number}")
    for index, key in enumerate(KEYS)
    for shapes in [SUBGROUP_SHAPES if "LANES=subgroup" in key else SHARED_SHAPES]
    for number in [(index + index // 5 + 2 * TURN) % 5]
]


@pytest.mark.parametrize(("key", "shape", "fused"), CASES)
def test_product(key: str, shape: Shape, fused: Fused) -> None:
    problem = Problem(key, shape, fused)
    problem.check(problem.run())
    if problem.epilogue == "rope":
        # The last token has the cache's last row, or none; and a step without tokens.
        last = problem.cache_rows - problem.count
        for offset, count in ((last, problem.count), (last + 1, problem.count), (0, 0)):
            problem.offset, problem.count = offset, count
            problem.check(problem.run())
    problem.trial.close()


def test_each_shape_and_each_norm_meet_what_they_can_differ_for() -> None:
    cases = [(axes_of(str(case.values[0])), case.values[1], fused_of(index)) for index, case in enumerate(CASES)]
    shapes = SUBGROUP_SHAPES + SHARED_SHAPES
    assert len({(axes["KV"], axes["EPILOGUE"], shape) for axes, shape, _ in cases}) == 4 * len(shapes)
    assert {shape for axes, shape, _ in cases if DTYPES[axes["DTYPE"]].is_block} == set(shapes)
    met = {(axes["LANES"], axes["EPILOGUE"], axes["TOKENS"], fused.norm) for axes, _, fused in cases}
    assert len(met) == 2 * 3 * 2 * 3
    plain = [(axes, fused) for axes, _, fused in cases if axes["EPILOGUE"] == "plain"]
    assert len({(axes["LANES"], axes["TOKENS"], fused.activation, fused.residual) for axes, fused in plain}) == 24
    gates = [(axes, fused) for axes, _, fused in cases if axes["EPILOGUE"] == "gated"]
    assert len({(axes["LANES"], axes["TOKENS"], fused.activation) for axes, fused in gates}) == 8


CONTROL = "linear LANES=shared DTYPE=f16 TOKENS=8 EPILOGUE=rope KV=f16"
NORMED = Fused("rms")
WRONG = "are wrong|outside the output"


@pytest.mark.parametrize(
    "wrong",
    [
        {"COLUMNS": 32},
        {"COLUMNS": 40},
        {"rows": 68},
        {"TILE": 4},
        {"EPSILON_BITS": bits(2 * EPSILON)},
        {"HAS_BIAS": 0},
        {"QUERY_HEADS": 2},
        {"KV_HEADS": 1},
        {"ROTARY_DIM": 16},
        {"groups": 1},
        {"outputs": 64},
        {"cache_rows": 13},
        {"OFFSET_ON_DEVICE": 0},
        {"NORM": 0},
        {"NORM": 2},
    ],
    ids=str,
)
def test_a_wrong_constant_is_noticed(wrong: dict[str, int]) -> None:
    spec = {name: value for name, value in wrong.items() if name.isupper()}
    problem = Problem(CONTROL, SHARED_SHAPES[0], NORMED, spec)
    assert (problem.rows, problem.outputs, problem.cache_rows) == (70, 60, 14)
    problem.offset = problem.cache_rows - problem.count
    push = {name: value for name, value in wrong.items() if name not in spec}
    with pytest.raises(AssertionError, match=WRONG):
        problem.check(problem.run(push))


def test_the_control_itself_passes() -> None:
    problem = Problem(CONTROL, SHARED_SHAPES[0], NORMED)
    problem.offset = problem.cache_rows - problem.count
    problem.check(problem.run())


@pytest.mark.parametrize("shape", [SHARED_SHAPES[0], SHARED_SHAPES[2]], ids=["on-device", "pushed"])
def test_a_wrong_offset_is_noticed(shape: Shape) -> None:
    problem = Problem(CONTROL, shape, NORMED)
    problem.offset += 1
    out = problem.run()
    problem.offset -= 1
    with pytest.raises(AssertionError, match=WRONG):
        problem.check(out)


def test_a_wrong_token_count_is_noticed() -> None:
    for key in (CONTROL, CONTROL.replace("rope KV=f16", "plain KV=none")):
        for shape, count in ((SHARED_SHAPES[1], 8), (SHARED_SHAPES[3], 9)):
            problem = Problem(key, shape, NORMED)
            with pytest.raises(AssertionError, match=WRONG):
                problem.check(problem.run(token_count=np.array([count], np.uint32)))


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (CONTROL, SHARED_SHAPES[0]),
        ("linear LANES=subgroup DTYPE=f32 TOKENS=1 EPILOGUE=rope KV=f16", SUBGROUP_SHAPES[0]),
    ],
    ids=["shared", "subgroup"],
)
def test_half_floats_in_the_cache_end_at_the_largest_one(key: str, shape: Shape) -> None:
    """Values of K and V that no half float holds become the largest of their sign."""
    problem = Problem(key, shape)
    problem.x[: problem.count] *= np.float32(3e4)
    out = problem.run()
    problem.check(out)
    for name in ("cache_k", "cache_v"):
        row = out[name].view(np.float16)[problem.offset * 20 : (problem.offset + 1) * 20]
        assert np.isfinite(row).all() and (np.abs(row) == 65504).any() and (np.abs(row) < 65504).any()


def test_an_infinite_gate_closes() -> None:
    """Gates far below zero give zero, not NaN."""
    problem = Problem(
        "linear LANES=subgroup DTYPE=f32 TOKENS=1 EPILOGUE=gated KV=none", SUBGROUP_SHAPES[1], Fused(activation="silu")
    )
    problem.x[:] = 0.25
    problem.stored[:] = np.array([[-1e30] * 4, [3.0] * 4], np.float32)
    check(problem.run()["y"], np.zeros((1, 1)), 0.0)


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_a_wrong_byte_in_a_block_is_noticed(dtype: DType) -> None:
    """Wherever a stored block is wrong, the product is: all bytes are where the kernel reads them."""
    problem = Problem(f"linear LANES=subgroup DTYPE={dtype.value} TOKENS=1 EPILOGUE=plain KV=none", SUBGROUP_SHAPES[1])
    for byte in np.linspace(0, dtype.block_bytes - 1, 5).astype(int):
        problem.draw()
        problem.stored[0, byte] ^= 0x55
        with pytest.raises(AssertionError, match="values are wrong"):
            problem.check(problem.run())


@pytest.mark.parametrize("form", ["subgroup", "shared"])
def test_the_widest_work_of_a_group_stays_within_what_a_driver_runs(form: str) -> None:
    """Two workgroups wanted for 1,280 rows of 22,400 columns and a tile of tokens: the planner cuts their loops."""
    size = subgroup()
    lanes = (
        Lanes("subgroup", size, size, size, 4, 16, 2) if form == "subgroup" else Lanes("shared", 8, 256, 64, 4, 8, 2)
    )
    graph = Graph()
    graph.data("token_count", (1,), DType.U32)
    weight = graph.weight(WeightSpec(("w",), (1280,), 22_400, DType.F16))
    choice = choose_kernel(graph, graph.linear(graph.data("x", (lanes.token_tile, 22_400)), weight), lanes)
    assert choice.workgroups[0] > 1
    groups = choice.push["groups"]
    assert isinstance(groups, int)
    assert groups * choice.workgroups[0] * 4 * lanes.tile >= 1280
    split, tokens = choice.spec["WORKGROUP"] // lanes.tile, lanes.token_tile
    shape = Shape(
        22_400, 1, 1280 // lanes.tile, 0, groups=groups, heads=(1, 1, 4, 4), room=tokens, count=tokens,
        tile=lanes.tile, split=split, stage_packs=choice.spec["X_CHUNK"] // 32,
    )  # fmt: skip
    problem = Problem(choice.kernel.key, shape, changed=choice.spec)
    problem.check(problem.run())
