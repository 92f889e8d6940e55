from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vkdecode.errors import InvalidInputError, SamplingError, VkDecodeError
from vkdecode.sampling import Sampler, SamplingParams

logit_rows = st.lists(
    # A coarse grid makes ties common.
    st.one_of(st.integers(-8, 8).map(lambda n: n / 2), st.just(-math.inf), st.floats(-40, 40, width=32)),
    min_size=1,
    max_size=60,
).filter(lambda row: any(math.isfinite(value) for value in row))


def reference_kept(logits: NDArray[np.float32], params: SamplingParams) -> dict[int, float]:
    """Filter with plain sorting, one token at a time: id -> probability."""
    scaled = [float(value) / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        order = order[: params.top_k]

    def probabilities(ids: list[int]) -> dict[int, float]:
        weights = {i: math.exp(scaled[i] - scaled[ids[0]]) for i in ids}
        total = math.fsum(weights.values())
        return {i: weight / total for i, weight in weights.items()}

    if params.top_p < 1:
        before, kept = 0.0, []
        for i, probability in probabilities(order).items():
            # The slack forgives rounding in sums taken in another order.
            if before >= params.top_p + 1e-9:
                break
            kept.append(i)
            before += probability
        order = kept
    if params.min_p:
        order = [i for i in order if math.exp(scaled[i] - scaled[order[0]]) >= params.min_p * (1 - 1e-9)]
    return probabilities(order)


@given(
    row=logit_rows,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=300, deadline=None)
def test_a_sampled_id_survives_every_filter_computed_independently(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.array(row, dtype=np.float32)
    params = SamplingParams(temperature, top_k, top_p, min_p, seed)
    kept = reference_kept(logits, params)
    sampler = Sampler(params)
    for _ in range(5):
        drawn = sampler.sample(logits)
        assert drawn in kept
        assert logits[drawn] > -math.inf


@given(row=logit_rows, top_k=st.integers(0, 5), seed=st.integers(0, 100))
def test_greedy_is_the_lowest_id_with_the_highest_logit(row: list[float], top_k: int, seed: int) -> None:
    logits = np.array(row, dtype=np.float32)
    expected = min(i for i, value in enumerate(logits) if value == max(logits))
    assert Sampler(SamplingParams(top_k=top_k, seed=seed)).sample(logits) == expected
    assert Sampler(SamplingParams(temperature=1.0, top_k=1, seed=seed)).sample(logits) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.5, seed=4),
        SamplingParams(temperature=2.0, top_k=4, seed=5),
        SamplingParams(temperature=1.0, top_p=0.8, seed=6),
        SamplingParams(temperature=1.5, top_k=7, top_p=0.9, min_p=0.1, seed=7),
    ],
)
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    logits = np.random.default_rng(11).normal(0, 1.5, 12).astype(np.float32)
    expected = reference_kept(logits, params)
    sampler, draws = Sampler(params), 20_000
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=logits.size)
    assert set(np.flatnonzero(counts)) <= set(expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    degrees = len(expected) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)  # five standard deviations


def test_the_seed_makes_draws_repeatable_and_no_seed_does_not() -> None:
    logits = np.zeros(5000, dtype=np.float32)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.sample(logits) for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(None) != draws(None)


def test_ties_at_the_border_of_top_k_keep_the_lowest_ids() -> None:
    logits = np.array([1, 2, 1, 3, 1, 1], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=50.0, top_k=4, seed=1))
    assert {sampler.sample(logits) for _ in range(400)} == {0, 1, 2, 3}


def test_a_nucleus_larger_than_the_first_candidates_is_whole() -> None:
    logits = np.zeros(50_000, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.5, seed=1))
    drawn = [sampler.sample(logits) for _ in range(200)]
    assert max(drawn) < 25_001  # equal tokens enter in id order
    assert max(drawn) > 20_000


def test_the_nucleus_takes_the_token_that_crosses_the_border() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.6, seed=1))
    assert {sampler.sample(logits) for _ in range(300)} == {0, 1}


def test_a_tiny_temperature_is_greedy_and_not_an_overflow() -> None:
    logits = np.array([0.0, 3e38, -3e38, 2.9e38], dtype=np.float32)
    with np.errstate(all="raise"):
        assert Sampler(SamplingParams(temperature=1e-320, top_k=3, top_p=0.9, seed=1)).sample(logits) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1.0, math.nan, 2.0], "1 of 3 logits are NaN"),
        ([1.0, math.inf, math.inf], "2 of 3 logits are infinite"),
        ([-math.inf] * 4, "all 4 logits are -inf"),
    ],
)
def test_logits_that_mean_nothing_are_refused(row: list[float], words: str, temperature: float) -> None:
    with pytest.raises(VkDecodeError, match=words):
        Sampler(SamplingParams(temperature=temperature)).sample(np.array(row, dtype=np.float32))


@pytest.mark.parametrize("shape", [(0,), (), (2, 3)])
def test_logits_of_the_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="shape"):
        Sampler().sample(np.zeros(shape, dtype=np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, math.nan, math.inf, 101, 10**400, True, "1", None)],
        *[("top_k", v) for v in (-1, 2.0, 2**31, 10**5000, True, None, "5")],
        *[("top_p", v) for v in (0.0, -0.5, 1.01, math.nan, False, "x" * 500)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan, True)],
        *[("seed", v) for v in (-1, 2**64, 1.0, True, "7")],
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else type(value).__name__,
)
def test_a_field_out_of_range_is_named_in_one_line(field: str, value: object) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # wrong values are the point
    message = str(caught.value)
    assert message.startswith(f"{field} is ")
    assert "must be" in message
    assert len(message.splitlines()) == 1
    assert len(message) < 200


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(np.float32(0.5), np.int64(3), np.float64(0.9), 0, np.uint64(7))  # type: ignore[arg-type]  # numpy ints are not int to mypy
    assert Sampler(params).sample(np.array([0, 9], dtype=np.float32)) == 1
