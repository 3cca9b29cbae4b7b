"""Bucket weights against the table of docs/algorithm.md; counts against enumerated probabilities."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import numpy as np
import pytest

from exgrpo_megatron.config import BucketWeight
from exgrpo_megatron.experience.buckets import bucket_counts, bucket_weights, draw_counts

SEVEN = np.full(7, 10)
DRAWS = 10_000


def within_four_errors(count: int, probability: float) -> bool:
    """Whether a binomial count out of DRAWS is within four standard errors of its expectation."""
    return abs(count / DRAWS - probability) <= 4 * (probability * (1 - probability) / DRAWS) ** 0.5


@pytest.mark.parametrize(
    ("kind", "sigma", "expected"),
    [
        ("counts", 1.0, [0.00443, 0.05401, 0.24204, 0.39905, 0.24204, 0.05401, 0.00443]),
        ("accuracy", 1.0, [0.13733, 0.14281, 0.14619, 0.14734, 0.14619, 0.14281, 0.13733]),
        # By hand: k / 28; sqrt(k) / sum of sqrt(1..7) = 13.47757; min(k, 4) / 22.
        ("linear", 1.0, [1 / 28, 2 / 28, 3 / 28, 4 / 28, 5 / 28, 6 / 28, 7 / 28]),
        ("sqrt", 1.0, [0.07420, 0.10493, 0.12851, 0.14839, 0.16591, 0.18175, 0.19631]),
        ("linear_clip", 1.0, [1 / 22, 2 / 22, 3 / 22, 4 / 22, 4 / 22, 4 / 22, 4 / 22]),
        ("uniform", 1.0, [1 / 7] * 7),
    ],
)
def test_weights_of_eight_answers_a_question(kind: BucketWeight, sigma: float, expected: list[float]):
    np.testing.assert_allclose(bucket_weights(kind, SEVEN, sigma), expected, atol=6e-6)


def test_every_kind_of_weight_differs_from_every_other():
    sizes = np.array([3, 1, 4, 1, 5, 9, 2])
    weights = {kind: bucket_weights(kind, sizes, 1.0).round(6).tobytes() for kind in get_args(BucketWeight)}
    assert len(set(weights.values())) == len(weights) == 6


def test_sigma_is_in_accuracy_units_for_accuracy_and_in_counts_for_counts():
    """By hand: neighbours of the middle have exp(-(1/8)^2 / (2 * 0.25)) and exp(-1 / (2 * 0.25)) of its weight."""
    accuracy = bucket_weights("accuracy", SEVEN, 0.5)
    counts = bucket_weights("counts", SEVEN, 0.5)
    assert accuracy[2] / accuracy[3] == pytest.approx(np.exp(-1 / 32))
    assert counts[2] / counts[3] == pytest.approx(np.exp(-2))


def test_odd_group_sizes_have_two_middle_buckets():
    weights = bucket_weights("counts", np.full(4, 1), 1.0)
    assert weights[1] == weights[2] > weights[0] == weights[3]


def test_a_very_narrow_normal_still_has_weights():
    np.testing.assert_array_equal(bucket_weights("counts", SEVEN, 1e-3), [0, 0, 0, 1, 0, 0, 0])
    assert np.isfinite(bucket_weights("counts", np.full(4, 1), 1e-3)).all()


def test_overflow_moves_to_buckets_with_room_by_their_original_probabilities():
    """Enumerated by hand for sizes (1, 1, 10), weights (.5, .3, .2) and 2 draws.

    (2,0,0), .25, moves one to (1,1,0) or (1,0,1) at .6 and .4; (0,2,0), .09, to (1,1,0) or (0,1,1) at 5/7 and 2/7.
    """
    expected = {
        (1, 1, 0): 0.30 + 0.25 * 0.6 + 0.09 * 5 / 7,
        (1, 0, 1): 0.20 + 0.25 * 0.4,
        (0, 1, 1): 0.12 + 0.09 * 2 / 7,
        (0, 0, 2): 0.04,
    }
    rng = np.random.default_rng(0)
    weights, sizes = np.array([0.5, 0.3, 0.2]), np.array([1, 1, 10])
    seen = Counter(tuple(draw_counts(2, weights, sizes, rng).tolist()) for _ in range(DRAWS))
    assert set(seen) == set(expected)
    for outcome, probability in expected.items():
        assert within_four_errors(seen[outcome], probability), (outcome, seen[outcome], probability)


def test_overflow_has_the_law_of_moving_one_question_at_a_time():
    """A naive implementation that moves one at a time, on a case in which several buckets overflow together."""
    weights, sizes = np.array([0.6, 0.2, 0.15, 0.05]), np.array([2, 1, 2, 4])
    rng = np.random.default_rng(1)

    def one_at_a_time() -> tuple[int, ...]:
        counts = rng.multinomial(6, weights)
        while (counts > sizes).any():
            counts[int(np.argmax(counts > sizes))] -= 1
            room = np.where(counts < sizes, weights, 0.0)
            counts[int(rng.choice(4, p=room / room.sum()))] += 1
        return tuple(counts.tolist())

    naive = Counter(one_at_a_time() for _ in range(DRAWS))
    ours = Counter(tuple(draw_counts(6, weights, sizes, rng).tolist()) for _ in range(DRAWS))
    for outcome in naive | ours:
        pooled = (naive[outcome] + ours[outcome]) / (2 * DRAWS)
        assert abs(naive[outcome] - ours[outcome]) / DRAWS <= 4 * (2 * pooled * (1 - pooled) / DRAWS) ** 0.5


def test_empty_buckets_give_nothing_and_the_rest_is_renormalised():
    rng = np.random.default_rng(2)
    sizes = np.array([0, 0, 5, 0, 0, 5, 0])
    first = sum(int(bucket_counts("counts", 1, sizes, 1.0, rng)[2]) for _ in range(DRAWS))
    assert within_four_errors(first, 0.24204 / (0.24204 + 0.05401))


@pytest.mark.parametrize("kind", get_args(BucketWeight))
@pytest.mark.parametrize("n", [0, 1, 10, 23, 24, 1000])
def test_the_number_drawn_is_always_the_smaller_of_wanted_and_available(kind: BucketWeight, n: int):
    sizes = np.array([1, 0, 0, 2, 0, 0, 20])
    for sigma in (1.0, 0.01):
        counts = bucket_counts(kind, n, sizes, sigma, np.random.default_rng(3))
        assert counts.sum() == min(n, 23)
        assert (counts <= sizes).all()


@pytest.mark.parametrize("kind", get_args(BucketWeight))
def test_nothing_stored_gives_nothing(kind: BucketWeight):
    assert bucket_counts(kind, 8, np.zeros(7, dtype=np.int64), 1.0, np.random.default_rng(0)).tolist() == [0] * 7


def test_uniform_draws_every_stored_question_alike():
    """The only question of bucket 1 is among 5 of 10 in half of all draws; by bucket weights it would be in 41%."""
    rng = np.random.default_rng(4)
    single = sum(int(bucket_counts("uniform", 5, np.array([1, 9]), 1.0, rng)[0]) for _ in range(DRAWS))
    assert within_four_errors(single, 0.5)
