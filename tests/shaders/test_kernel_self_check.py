"""The start-up check of shared memory and numbers, with workgroups from one lane to several subgroups."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_lab import Words, blank, run_once

from vkdecode.gpu.self_check import check_constants, check_operands, judge, result_words

KEYS = ["self_check"]


def run(workgroup: int, **wrong: int) -> Words:
    buffers = {"operands": check_operands(workgroup), "result": blank(result_words(workgroup))}
    out = run_once("self_check", buffers, {**check_constants(workgroup), **wrong}, (1, 1, 1))["result"]
    np.testing.assert_array_equal(out[result_words(workgroup) :], blank(out.size - result_words(workgroup)))
    return out[: result_words(workgroup)]


@pytest.mark.parametrize("workgroup", [1, 2, 8, 32, 64, 256])
def test_a_sound_device_passes(workgroup: int) -> None:
    assert judge(workgroup, run(workgroup)) == ((), ())


def test_another_number_of_rounds_is_noticed() -> None:
    shared, numbers = judge(64, run(64, ROUNDS=4))
    assert shared == ("shared memory: the value handed on over 64 lanes is wrong in 64 of them",)
    assert numbers == ()
