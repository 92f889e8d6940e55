"""Routed experts: which ones a token takes, their products out of a stack of matrices, and the sum by weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_lab import (
    F32,
    F64,
    POISON,
    Words,
    blank,
    check,
    generator,
    normal,
    poisoned,
    run_once,
    subgroup,
    words_of,
)
from numpy.typing import NDArray

from vkdecode.gpu import Lanes
from vkdecode.graph import Graph, LinearAttrs, Op, WeightSpec
from vkdecode.runtime.kernels import choose_kernel
from vkdecode.runtime.weight_layout import device_rows, pack_rows
from vkdecode.weights.blocks import decode_rows, ggml_type, random_rows
from vkdecode.weights.dtypes import DType

KEYS = ["expert_sum", "route"]
NONE = np.uint32(0xFFFFFFFF)

# Routing


def route(logits: F32, used: int, normalized: bool, count: int, workgroup: int = 64) -> Words:
    """Rows of experts and bits of weights, [tokens, 2, used]."""
    tokens, experts = logits.shape
    buffers = {"x": logits, "token_count": np.array([count], np.uint32), "route": blank(tokens * 2 * used)}
    spec = {"WORKGROUP": workgroup, "EXPERTS": experts, "USED": used, "NORMALIZED": int(normalized)}
    out = run_once("route", buffers, spec, (tokens, 1, 1))["route"]
    check(out[tokens * 2 * used :], np.zeros(0), 0.0)
    return out[: tokens * 2 * used].reshape(tokens, 2, used)


@pytest.mark.parametrize(
    ("experts", "used", "workgroup"), [(4, 2, 64), (1, 1, 8), (128, 8, 64), (60, 4, 16), (7, 7, 4), (512, 10, 64)]
)
@pytest.mark.parametrize("normalized", [False, True])
def test_the_best_experts_come_first_with_their_weights(
    experts: int, used: int, workgroup: int, normalized: bool
) -> None:
    logits = poisoned((4, experts))
    logits[:3] = normal(generator(experts, used), 3, experts) * 3
    out = route(logits, used, normalized, 3, workgroup)
    best = np.argsort(-logits[:3], axis=1, kind="stable")[:, :used]
    np.testing.assert_array_equal(out[:3, 0], best)
    powers = np.exp(logits[:3].astype(np.float64) - logits[:3].max(axis=1, keepdims=True))
    chosen = np.take_along_axis(powers, best, axis=1)
    expected = chosen / (chosen if normalized else powers).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[:3, 1].view(np.float32), expected, rtol=1e-5)
    assert (out[3, 0] == NONE).all()  # a row behind the step's tokens


def test_of_equal_experts_the_lower_ones_are_taken() -> None:
    logits = np.array([[1, 2, 2, 0, 2], [0, -0.0, 0, -0.0, 0]], np.float32)
    out = route(logits, 3, True, 2)
    assert out[:, 0].tolist() == [[1, 2, 4], [0, 1, 2]]
    np.testing.assert_allclose(out[:, 1].view(np.float32), 1 / 3, rtol=1e-6)


def test_whatever_the_logits_are_the_experts_differ_and_exist() -> None:
    """An expert that does not exist would be read from behind the stack."""
    logits = np.array([[np.nan, np.inf, -np.inf, np.nan, 1e38]] * 2, np.float32)
    logits[1] = np.nan
    out = route(logits, 4, False, 2)
    assert out[:, 0].tolist() == [[0, 3, 1, 4], [0, 1, 2, 3]]


def test_far_logits_give_weights_without_overflow() -> None:
    out = route(np.array([[3e38, -3e38, 0, 88]], np.float32), 2, False, 1)
    assert out[0, 0].tolist() == [0, 3]
    assert out[0, 1].view(np.float32).tolist() == [1.0, 0.0]


# The sum


@pytest.mark.parametrize(("used", "columns", "workgroup"), [(1, 1, 64), (2, 64, 64), (8, 131, 16)])
@pytest.mark.parametrize(("shared", "residual"), [(False, False), (True, False), (False, True), (True, True)])
def test_outputs_are_added_by_their_weights(
    used: int, columns: int, workgroup: int, shared: bool, residual: bool
) -> None:
    tokens, rng = 3, generator(used, columns, shared, residual)
    x, weights = normal(rng, tokens, used, columns), np.abs(normal(rng, tokens, used))
    beside, gate, rest = normal(rng, tokens, columns), normal(rng, tokens, 1) * 3, normal(rng, tokens, columns)
    routes = np.stack([np.full((tokens, used), POISON), weights.view(np.uint32)], axis=1)
    unread = poisoned((1,))
    buffers: dict[str, NDArray[Any]] = {
        "x": x,
        "route": routes,
        "from_shared": beside if shared else unread,
        "shared_gate": gate if shared else unread,
        "residual": rest if residual else unread,
        "y": blank(tokens * columns),
    }
    spec = {
        "WORKGROUP": workgroup,
        "COLUMNS": columns,
        "USED": used,
        "HAS_SHARED": int(shared),
        "HAS_RESIDUAL": int(residual),
    }
    out = run_once("expert_sum", buffers, spec, (-(-columns // workgroup), tokens, 1))["y"]
    terms = x.astype(np.float64) * weights[:, :, None]
    more = [beside / (1 + np.exp(-gate.astype(np.float64)))] * shared + [rest.astype(np.float64)] * residual
    expected, sizes = terms.sum(axis=1), np.abs(terms).sum(axis=1)
    for one in more:
        expected, sizes = expected + one, sizes + np.abs(one)
    check(out, expected, sizes)


# Products out of a stack

EXPERTS, USED, TOKENS = 5, 2, 3


def lanes_of(form: str) -> Lanes:
    size = subgroup()
    return Lanes("subgroup", size, size, size, 4, 16, 2) if form == "subgroup" else Lanes("shared", 8, 64, 64, 4, 8, 3)


class Stack:
    """Experts' matrices, of which all that no token takes are poison, and a product that the planner chose."""

    def __init__(self, form: str, dtype: DType, order: str, own_x: bool, tokens: int) -> None:
        rng = generator(form, dtype, order, own_x)
        self.lanes, self.dtype, self.order = lanes_of(form), dtype, order
        self.columns = 2 * dtype.block_columns if dtype.is_block else 36
        self.rows = self.lanes.block_rows + 5
        paired = order == "gated"
        parts = (EXPERTS * self.rows,) * (2 if paired else 1)
        names = ("gate", "up")[: len(parts)]
        self.spec = WeightSpec(names, parts, self.columns, dtype, order, experts=EXPERTS)
        held = sum(parts)
        if dtype.is_block:
            self.stored: NDArray[Any] = random_rows(rng, held, self.columns, dtype)
            values = decode_rows(self.stored, ggml_type(dtype), dtype.block_bytes)
        else:
            self.stored = normal(rng, held, self.columns).astype(dtype.numpy)
            values = self.stored
        self.weight = values.astype(np.float64).reshape(len(parts), EXPERTS, self.rows, self.columns)
        self.bias = normal(rng, held)
        self.ids = np.array([[3, 0], [4, 3], [0, 4]], np.uint32)[:tokens]
        self.x = normal(rng, tokens, USED if own_x else 1, self.columns)
        self.norm_weight = normal(rng, self.columns)

    def dispatch(self, normed: bool, count: int) -> Words:
        """What the chosen kernel gives for the first `count` of the tokens; the others have no experts."""
        graph = Graph()
        tokens = len(self.ids)
        x = graph.data("x", (tokens, self.x[0].size))
        logits, token_count = graph.data("logits", (tokens, EXPERTS)), graph.data("token_count", (1,), DType.U32)
        ways = graph.route(logits, token_count, USED, True)
        vector = WeightSpec(
            self.spec.names, self.spec.part_rows, 1, DType.F32, self.order, vector=True, experts=EXPERTS
        )
        node = graph.expert_linear(x, graph.weight(self.spec), ways, graph.weight(vector))
        norm = [graph.weight(WeightSpec(("n",), (self.columns,), 1, DType.F32, vector=True))] * normed
        if self.order == "gated":
            attrs = LinearAttrs(
                True, 1e-2 if normed else None, "rms", False, "gated", Op.CLAMPED_SWIGLU, experts_used=USED
            )
            inputs = [x, graph.weight(self.spec), graph.weight(vector), *norm, ways]
            node = graph.add_node(Op.LINEAR, inputs, (tokens, USED * self.rows), attrs)
        choice = choose_kernel(graph, node, self.lanes)
        routes = np.full((tokens, 2, USED), POISON)
        routes[:, 0] = self.ids
        routes[count:, 0] = NONE
        values: dict[Any, NDArray[Any]] = {
            graph.weight(self.spec): self.packed(),
            x: self.x,
            graph.weight(vector): self.in_slots(self.bias.reshape(-1, 1)).reshape(-1),
            node: blank(tokens * USED * self.rows),
            ways: routes,
            **dict.fromkeys(norm, self.norm_weight),
        }
        names = [binding.name for binding in choice.kernel.bindings]
        buffers = {name: values[bound] for name, bound in zip(names, choice.bindings, strict=True)}
        push = {name: value for name, value in choice.push.items() if isinstance(value, int)}
        return run_once(choice.kernel.key, buffers, choice.spec, choice.workgroups, push)["y"]

    def in_slots(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows in the order of the device, poison for padding and for the experts that no token takes."""
        slots = device_rows(self.spec, self.lanes.tile, self.lanes.block_rows)
        out: NDArray[Any] = (
            np.full((slots.size, rows.shape[1]), 0xFF, np.uint8)
            if rows.dtype == np.uint8
            else poisoned((slots.size, rows.shape[1]), rows.dtype)
        )
        taken = np.isin(slots // self.rows % EXPERTS, self.ids) & (slots >= 0)
        out[taken] = rows[slots[taken]]
        return out

    def packed(self) -> Words:
        return words_of(pack_rows(self.in_slots(self.stored), self.dtype, self.lanes.tile))

    def expected(self, normed: bool) -> tuple[F64, F64]:
        """Values [tokens, used, rows] and what their errors are relative to."""
        x = self.x.astype(np.float64)
        if normed:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-2) * self.norm_weight
        bias = self.bias.astype(np.float64).reshape(-1, EXPERTS, self.rows)
        x = np.broadcast_to(x, (len(x), USED, self.columns))
        sizes = np.abs(self.weight) + np.abs(self.weight).max(axis=-1, keepdims=True)
        value = np.einsum("ptkrc,tkc->ptkr", self.weight[:, self.ids], x) + bias[:, self.ids]
        size = np.einsum("ptkrc,tkc->ptkr", sizes[:, self.ids], np.abs(x)) + np.abs(bias[:, self.ids])
        if self.order == "plain":
            return value[0], size[0]
        gate, up = np.minimum(value[0], 7), np.clip(value[1], -7, 7)
        with np.errstate(over="ignore"):
            closed = gate / (1 + np.exp(-1.702 * gate))
        return closed * (up + 1), 1.2 * size[0] * np.abs(up + 1) + np.abs(closed) * (size[1] + 1)


STACKS = [
    ("plain", True, False),
    ("plain", False, False),
    ("gated", False, False),
    ("gated", False, True),
]


@pytest.mark.parametrize("form", ["subgroup", "shared"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.Q4_0, DType.Q4_K, DType.Q8_0])
@pytest.mark.parametrize(("order", "own_x", "normed"), STACKS)
def test_a_token_meets_the_matrices_of_its_experts_and_no_others(
    form: str, dtype: DType, order: str, own_x: bool, normed: bool
) -> None:
    stack = Stack(form, dtype, order, own_x, TOKENS)
    values, sizes = stack.expected(normed)
    check(stack.dispatch(normed, TOKENS), values, sizes)


@pytest.mark.parametrize("form", ["subgroup", "shared"])
def test_rows_behind_the_tokens_of_a_step_are_left_alone(form: str) -> None:
    stack = Stack(form, DType.F32, "gated", False, TOKENS)
    values, sizes = stack.expected(False)
    check(stack.dispatch(False, 2), values, sizes, (np.arange(TOKENS) < 2)[:, None, None])


@pytest.mark.parametrize("form", ["subgroup", "shared"])
def test_another_expert_is_noticed(form: str) -> None:
    stack = Stack(form, DType.F32, "plain", True, 1)
    values, sizes = stack.expected(False)
    check(stack.dispatch(False, 1), values, sizes)
    stack.ids = stack.ids[:, ::-1].copy()
    with pytest.raises(AssertionError, match="values are wrong"):
        check(stack.dispatch(False, 1), values, sizes)
