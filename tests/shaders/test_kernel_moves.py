"""Kernels that only move values: word copies, a view's columns, the last token's row, and the start-up check."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_lab import F32, Words, blank, ceil_div, check, generator, normal, poisoned, run_once, subgroup

KEYS = ["concat", "contiguize", "copy_words", "last_row", "subgroup_check"]


@pytest.mark.parametrize(
    ("workgroup", "workgroups", "count"),
    [(64, (1, 1, 1), 1), (8, (3, 1, 1), 45), (5, (2, 1, 1), 29), (64, (2, 1, 1), 0)],
)
def test_words_are_copied(workgroup: int, workgroups: tuple[int, int, int], count: int) -> None:
    source = generator(count).integers(0, 1 << 32, 60, np.uint32)
    push = {"source_start": 7, "target_start": 3, "count": count}
    out = run_once("copy_words", {"source": source, "target": blank(60)}, {"WORKGROUP": workgroup}, workgroups, push)[
        "target"
    ]
    expected = blank(out.size)
    expected[3 : 3 + count] = source[7 : 7 + count]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("columns", "offset", "behind", "workgroup"), [(1, 0, 0, 64), (37, 5, 3, 8), (64, 64, 0, 64), (65, 1, 1, 64)]
)
def test_the_columns_of_a_view_are_put_together(columns: int, offset: int, behind: int, workgroup: int) -> None:
    tokens = 3
    x = poisoned((tokens, offset + columns + behind))
    x[:, offset : offset + columns] = normal(generator(columns), tokens, columns)
    spec = {"WORKGROUP": workgroup, "COLUMNS": columns, "X_OFFSET": offset, "X_STRIDE": x.shape[1]}
    groups = (ceil_div(columns, workgroup), tokens, 1)
    out = run_once("contiguize", {"x": x, "y": blank(tokens * columns)}, spec, groups)["y"]
    check(out, x[:, offset : offset + columns], 0.0)
    with pytest.raises(AssertionError, match="values are wrong"):
        wrong = run_once("contiguize", {"x": x, "y": blank(tokens * columns)}, {**spec, "X_OFFSET": offset + 1}, groups)
        check(wrong["y"], x[:, offset : offset + columns], 0.0)


@pytest.mark.parametrize(("a", "b", "workgroup"), [(1, 1, 64), (37, 5, 8), (64, 1, 64), (3, 130, 16)])
def test_columns_are_joined(a: int, b: int, workgroup: int) -> None:
    tokens = 3
    left, right = normal(generator(a), tokens, a), normal(generator(b, "right"), tokens, b)
    spec = {"WORKGROUP": workgroup, "A_COLUMNS": a, "B_COLUMNS": b}
    buffers = {"a": left, "b": right, "y": blank(tokens * (a + b))}
    out = run_once("concat", buffers, spec, (ceil_div(a + b, workgroup), tokens, 1))["y"]
    check(out, np.concatenate([left, right], axis=1), 0.0)


def last_row(tokens: int, count: int, columns: int, workgroup: int) -> tuple[Words, F32]:
    x = poisoned((tokens, columns))
    x[max(count, 1) - 1] = normal(generator(count, columns), columns)
    buffers = {"x": x, "token_count": np.array([count], np.uint32), "y": blank(columns)}
    spec = {"WORKGROUP": workgroup, "COLUMNS": columns}
    return run_once("last_row", buffers, spec, (ceil_div(columns, workgroup), 1, 1))["y"], x[max(count, 1) - 1]


@pytest.mark.parametrize(("count", "columns", "workgroup"), [(1, 1, 64), (5, 37, 8), (8, 64, 64), (7, 65, 64)])
def test_the_row_of_the_last_real_token(count: int, columns: int, workgroup: int) -> None:
    out, row = last_row(8, count, columns, workgroup)
    check(out, row, 0.0)


def test_a_wrong_token_count_is_noticed() -> None:
    out, _ = last_row(8, 5, 37, 64)
    _, other = last_row(8, 6, 37, 64)
    with pytest.raises(AssertionError, match="values are wrong"):
        check(out, other, 0.0)


def test_a_workgroup_of_the_subgroup_size_passes_the_check() -> None:
    out = run_once("subgroup_check", {"result": blank(subgroup())}, {"WORKGROUP": subgroup()}, (1, 1, 1))["result"]
    expected = blank(out.size)
    expected[: subgroup()] = 1
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_workgroup_of_another_size_fails_the_check(factor: float) -> None:
    size = int(subgroup() * factor)
    out = run_once("subgroup_check", {"result": blank(size)}, {"WORKGROUP": size}, (1, 1, 1))["result"]
    assert (out[:size] == 0).all()
    assert (out[size:] == blank(1)).all()
