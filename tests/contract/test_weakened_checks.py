"""Each check of the contract holds, and taking any comparison of the package out makes one of its checks fail."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import binding_checks as binding
import candidate_checks as candidate
import contract_checks as pure
import device_checks as real
import pytest
from contract_checks import Bench
from weakening import Weakening, weakenings

from vkdecode.decode import (
    CapturedDecodeSession,
    DecodeSession,
    InferenceContext,
    KvCache,
    held_plans,
    keys,
    rebind,
    step,
)
from vkdecode.gpu import Device
from vkdecode.graph import SymEnv
from vkdecode.models import Model
from vkdecode.runtime import Executable, plan

Check = Callable[[Bench], None]
Outcome = Callable[[Check], BaseException | None]


def _checks(module: Any) -> tuple[Check, ...]:
    """The module's functions that take a bench and nothing else."""
    functions = inspect.getmembers(module, inspect.isfunction)
    mine = [one for _, one in functions if one.__module__ == module.__name__]
    return tuple(one for one in mine if list(inspect.signature(one).parameters) == ["bench"])


WITHOUT_DEVICE = _checks(pure)
ON_A_DEVICE = (*_checks(real), *_checks(candidate), *_checks(binding))

# What of the package decides, and the checks that must notice where it decides less.
GUARDS: Mapping[Any, tuple[Check, ...]] = {
    DecodeSession.validity_for: WITHOUT_DEVICE,
    DecodeSession.is_valid_for: WITHOUT_DEVICE,
    DecodeSession.rebind_kv: WITHOUT_DEVICE,
    DecodeSession.location: WITHOUT_DEVICE,
    DecodeSession.per_token_sym_env: WITHOUT_DEVICE,
    SymEnv.bind: WITHOUT_DEVICE,
    SymEnv.resolve: WITHOUT_DEVICE,
    rebind.check_rebind: WITHOUT_DEVICE,
    rebind.interchange_key: WITHOUT_DEVICE,
    keys.make_shape_key: WITHOUT_DEVICE,
    DecodeSession.executable: (real.a_closed_session_does_not_run,),
    DecodeSession.close: (
        real.a_closed_session_does_not_run,
        real.a_closed_session_lets_go_of_its_storages,
        real.a_refused_pair_is_closed,
        binding.a_closed_plan_gives_its_memory_back_at_once,
    ),
    DecodeSession.bind: (binding.each_part_of_a_steps_data_is_bound,),
    DecodeSession._write: (binding.data_that_do_not_fit_are_refused, binding.each_part_of_a_steps_data_is_bound),
    DecodeSession.run: (
        real.a_changed_graph_is_not_realized,
        real.a_plan_runs_on_its_device_only,
        candidate.candidates_that_are_not_finite_are_the_row,
        real.rungs_agree,
    ),
    DecodeSession.record: (
        candidate.each_kind_is_recorded_once,
        binding.a_captured_step_is_one_submission_and_a_move_where_rows_land,
        real.rungs_agree,
    ),
    CapturedDecodeSession.capture: (binding.what_cannot_be_captured_is_refused,),
    CapturedDecodeSession.is_current: (real.a_capture_of_the_old_cache_does_not_run,),
    CapturedDecodeSession.record: (
        candidate.each_kind_is_recorded_once,
        real.a_capture_of_the_old_cache_does_not_run,
    ),
    CapturedDecodeSession.run: (
        binding.an_empty_run_is_one_submission_and_made_once,
        binding.a_captured_step_is_one_submission_and_a_move_where_rows_land,
        candidate.candidates_leave_their_rows_in_the_cache,
        real.rungs_agree,
    ),
    CapturedDecodeSession.run_empty: (
        real.an_empty_run_takes_no_tokens,
        binding.an_empty_run_is_one_submission_and_made_once,
    ),
    Executable.rebind: (
        binding.a_rebound_plan_writes_and_reads_the_new_cache,
        binding.a_rebind_that_cannot_be_made_changes_nothing,
    ),
    Executable.close: (binding.a_closed_plan_gives_its_memory_back_at_once,),
    step._run_step: (binding.a_step_is_counted_and_its_plan_put_back_or_closed,),
    step._captured: (
        binding.a_step_is_counted_and_its_plan_put_back_or_closed,
        candidate.each_kind_is_recorded_once,
    ),
    held_plans.invalidate_decode_pair_if_stale: (
        real.a_valid_pair_is_kept_with_its_capture,
        real.a_rebound_pair_loses_its_capture,
        real.a_refused_pair_is_closed,
        real.a_stale_pair_is_closed,
        real.a_pair_whose_graph_was_changed_is_closed,
    ),
    held_plans.take_session: (
        real.a_context_hands_out_only_the_asked_path,
        real.prefill_plans_are_held_by_their_options,
    ),
    held_plans.put_session: (binding.a_step_is_counted_and_its_plan_put_back_or_closed,),
    InferenceContext.put_decode_session: (real.a_context_closes_what_it_loses,),
    InferenceContext.close: (real.a_context_closes_what_it_loses, real.prefill_plans_are_held_by_their_options),
    KvCache.device_location: (real.a_cache_vouches_only_for_one_place,),
    KvCache.rebind_slot: (real.allocation_ids_follow_storages,),
    KvCache.truncate_to: (real.allocation_ids_follow_storages, real.truncation_stays_inside_the_cache),
    KvCache.clear: (real.allocation_ids_follow_storages, real.truncation_stays_inside_the_cache),
    KvCache.check_open: (real.truncation_stays_inside_the_cache,),
    KvCache.set_layer: (
        real.a_layer_is_replaced_only_by_its_like,
        real.allocation_ids_follow_storages,
        real.truncation_stays_inside_the_cache,
    ),
    plan.check_topology: (real.a_changed_graph_is_not_realized,),
    step._check_fits: (real.a_step_that_does_not_fit_is_refused_untouched,),
}


def _function(guard: Any) -> FunctionType:
    found = guard.fget if isinstance(guard, property) else getattr(guard, "__func__", guard)
    assert isinstance(found, FunctionType)
    return found


WEAKENED = [(one, checks) for guard, checks in GUARDS.items() for one in weakenings(_function(guard))]


@pytest.fixture(scope="module")
def bench(device: Device, tiny_models: Callable[..., Model]) -> Iterator[Bench]:
    made = Bench(device, lambda name: tiny_models(name, device))
    yield made
    made.close()


@pytest.fixture(scope="module")
def outcome(bench: Bench) -> Outcome:
    """What a check of the package as it is raises, or None; each is run once."""
    return functools.cache(lambda check: _raised(check, bench))


@pytest.mark.parametrize("check", (*WITHOUT_DEVICE, *ON_A_DEVICE), ids=lambda check: check.__name__)
def test_contract(check: Check, outcome: Outcome) -> None:
    error = outcome(check)
    if error is not None:
        raise error


def test_every_guard_can_be_weakened() -> None:
    assert {one.function for one, _ in WEAKENED} == {_function(guard) for guard in GUARDS}


@pytest.mark.parametrize(("weakened", "checks"), WEAKENED, ids=[str(one) for one, _ in WEAKENED])
def test_a_weakened_check_is_noticed(
    weakened: Weakening, checks: tuple[Check, ...], bench: Bench, outcome: Outcome
) -> None:
    # Only a check that the package keeps can show that a weakened one does not.
    kept = [check for check in checks if outcome(check) is None]
    with weakened.applied():
        unnoticed = all(_raised(check, bench) is None for check in kept)
    assert not unnoticed, f"nothing guards {weakened}"


def _raised(check: Check, bench: Bench) -> BaseException | None:
    try:
        check(bench)
    except (Exception, pytest.fail.Exception) as error:
        return error
    return None
