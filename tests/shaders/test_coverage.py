"""No kernel goes untested."""

from __future__ import annotations

import test_kernel_attention
import test_kernel_elementwise
import test_kernel_embed
import test_kernel_experts
import test_kernel_kv_move
import test_kernel_kv_write
import test_kernel_linear
import test_kernel_moves
import test_kernel_norm
import test_kernel_rope
import test_kernel_self_check
import test_kernel_top_k

from vkdecode.gpu import registry

MODULES = (
    test_kernel_attention,
    test_kernel_elementwise,
    test_kernel_embed,
    test_kernel_experts,
    test_kernel_kv_move,
    test_kernel_kv_write,
    test_kernel_linear,
    test_kernel_moves,
    test_kernel_norm,
    test_kernel_rope,
    test_kernel_self_check,
    test_kernel_top_k,
)


def test_every_kernel_has_a_test() -> None:
    tested = [key for module in MODULES for key in module.KEYS]
    assert len(tested) == len(set(tested))
    assert sorted(tested) == registry().keys()


def test_the_cases_cover_the_keys() -> None:
    for module in (test_kernel_attention, test_kernel_linear):
        assert {case.values[0] for case in module.CASES} == set(module.KEYS)
