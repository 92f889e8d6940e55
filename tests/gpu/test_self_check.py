"""What the check at start-up notices, and what follows from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vkdecode.errors import DeviceError, VkDecodeWarning
from vkdecode.gpu import Device, SelfCheck, choose_lanes, lane_choice, list_devices, run_self_check, self_check
from vkdecode.loading import load

WORKGROUP = 64
TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
NAMES = [name for name, _, _ in self_check._SECTIONS]


@pytest.fixture
def fresh() -> Iterator[Device]:
    """The CPU driver, which picks subgroups where they pass."""
    with Device(min(list_devices(), key=lambda info: (info.kind != "cpu", info.ordinal)).ordinal) as opened:
        yield opened


def found(monkeypatch: pytest.MonkeyPatch, check: SelfCheck) -> None:
    monkeypatch.setattr(lane_choice, "run_self_check", lambda *_: check)


def test_a_sound_device_passes_and_takes_nothing(fresh: Device) -> None:
    for workgroup in (1, 32, 128):
        assert run_self_check(fresh, workgroup) == SelfCheck(True, True, True)
    assert fresh.allocated_bytes == 0


@pytest.mark.parametrize(("column", "name"), [(0, "sum"), (1, "maximum"), (2, "value handed on")])
def test_one_wrong_lane_is_noticed(fresh: Device, column: int, name: str) -> None:
    words = self_check._run(fresh, WORKGROUP)
    assert self_check.judge(WORKGROUP, words) == ((), ())
    words[3 * (WORKGROUP - 1) + column] += np.uint32(1 << 23)
    shared, numbers = self_check.judge(WORKGROUP, words)
    assert shared == (f"shared memory: the {name} over 64 lanes is wrong in 1 of them",)
    assert numbers == ()


@pytest.mark.parametrize("section", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("value", [np.nan, 7e4, 0.3], ids=str)
def test_each_wrong_number_is_noticed(fresh: Device, section: int, value: float) -> None:
    """Put in the place of every single result in turn."""
    words = self_check._run(fresh, WORKGROUP)
    start = 3 * WORKGROUP + sum(size for _, size, _ in self_check._SECTIONS[:section])
    name, size, _ = self_check._SECTIONS[section]
    for at in range(start, start + size):
        changed = words.copy()
        # As two halves where halves are packed: NaN, infinity, or 0.3.
        half = np.float16(min(value, np.inf) if value < 65504 or np.isnan(value) else np.inf)
        two_halves = np.full(2, half).view(np.uint32)[0]
        changed[at] = two_halves if name == "packing to float16" else np.float32(value).view(np.uint32)
        shared, numbers = self_check.judge(WORKGROUP, changed)
        assert shared == ()
        assert len(numbers) == 1 and name in numbers[0]


def test_a_device_that_writes_nothing_fails(fresh: Device) -> None:
    words = np.full(self_check.result_words(WORKGROUP), self_check._UNWRITTEN)
    shared, numbers = self_check.judge(WORKGROUP, words)
    assert len(shared) == 3 and len(numbers) == len(NAMES)


def test_denormal_half_floats_may_be_flushed_but_not_wrong(fresh: Device) -> None:
    words = self_check._run(fresh, WORKGROUP)
    at = 3 * WORKGROUP + int(np.flatnonzero(np.float16(2.0**-24) == self_check._HALVES)[0])
    assert words[at] == np.float32(2.0**-24).view(np.uint32)
    words[at] = 0
    assert self_check.judge(WORKGROUP, words) == ((), ())
    words[at] = np.float32(2.0**-23).view(np.uint32)
    assert self_check.judge(WORKGROUP, words)[1] == ("numbers: unpacking of float16 is wrong for case 4 of 12",)


def test_failing_subgroups_give_the_shared_form_with_one_warning(
    fresh: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, SelfCheck(False, True, True, ("subgroup: half full",)))
    with pytest.warns(VkDecodeWarning, match="fail the self-check, using shared memory") as caught:
        assert choose_lanes(fresh).form == "shared"
    assert len(caught) == 1
    with pytest.raises(DeviceError, match="as one full subgroup"):
        choose_lanes(fresh, "subgroup")


def test_a_device_whose_subgroups_are_refused_still_works(fresh: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise DeviceError("the driver refuses kernel 'subgroup_check'")

    monkeypatch.setattr(self_check, "subgroup_check", refuse)
    with pytest.warns(VkDecodeWarning):
        assert choose_lanes(fresh).form == "shared"


def test_the_shared_form_needs_no_subgroups(fresh: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, SelfCheck(False, True, True, ("subgroup: half full",)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_lanes(fresh, "shared").form == "shared"


@pytest.mark.parametrize("form", ["auto", "subgroup", "shared"])
@pytest.mark.parametrize(
    "check",
    [
        SelfCheck(True, False, True, ("shared memory: the sum over 64 lanes is wrong in 3 of them",)),
        SelfCheck(True, True, False, ("numbers: exp is wrong for case 5 of 8",)),
    ],
    ids=["shared", "numbers"],
)
def test_what_every_kernel_relies_on_may_not_fail(
    fresh: Device, monkeypatch: pytest.MonkeyPatch, check: SelfCheck, form: str
) -> None:
    found(monkeypatch, check)
    with pytest.raises(DeviceError) as caught:
        choose_lanes(fresh, form)
    assert check.details[0] in str(caught.value)
    assert str(fresh.info) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_is_not_loaded_onto_a_device_that_fails(fresh: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, SelfCheck(True, True, False, ("numbers: exp is wrong for case 5 of 8",)))
    with pytest.raises(DeviceError, match=r"would give wrong answers .*exp"):
        load(TINY, device=fresh)
    assert fresh.allocated_bytes == 0
