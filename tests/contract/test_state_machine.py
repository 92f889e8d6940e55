"""Interleavings of the contract: logits equal to the rebuild rung's, counters equal to the reference's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from decode_machine import World, run_machine, run_scripted
from reference_contract import COUNTERS, Path
from tiny_llama import PATHS

from vkdecode.gpu import Device

REFUSALS = ("RESIDENCY_UNKNOWN", "RESIDENCY_DIFFERS", "None")
VALIDITIES = ("VALID", "ALLOCATION_CHANGED", "STALE")
ERRORS = ("ContextLengthError", "InvalidInputError")


@pytest.fixture(scope="module")
def world(device: Device) -> Iterator[World]:
    """Models on a device and on a second opening of it, which must count as another device."""
    with Device(device.location.ordinal) as opened_again:
        made = World([device, opened_again])
        made.load()
        yield made
        made.close()


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_a_walk_on_which_everything_happens(world: World, path: Path) -> None:
    world.totals.clear()
    run_scripted(world, path)
    expected = {*COUNTERS, *ERRORS, *(f"direct {one}" for one in (*REFUSALS, *VALIDITIES))}
    if path == ("symenv", "bounded"):
        expected -= {"tokens_replayed", "prefill_replays"}
    if path != ("symenv", "masked"):
        expected -= {"one_off_recordings"}
    assert {name for name, count in world.totals.items() if count} == expected


def test_random_walks(world: World) -> None:
    run_machine(world, examples=8, steps=30)
