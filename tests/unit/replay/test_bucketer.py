"""Rates of questions over their last attempts, and tiers."""

import math

import pytest

from exgrpo_megatron.replay import DifficultyBucketer


def test_the_rate_is_the_share_of_right_ones():
    bucketer = DifficultyBucketer()
    assert math.isnan(bucketer.rate("q"))
    assert bucketer.update("q", True, False, False) == pytest.approx(1 / 3)
    assert bucketer.update("q", True) == 0.5
    assert (bucketer.rate("q"), bucketer.num_attempts("q")) == (0.5, 4)
    assert math.isnan(bucketer.rate("another"))


def test_attempts_beyond_the_window_are_forgotten():
    # The last four of six: right, wrong, wrong, right.
    short, long = DifficultyBucketer(window_size=4), DifficultyBucketer(window_size=6)
    for bucketer in (short, long):
        bucketer.update("q", True, True, True, False, False, True)
    assert (short.rate("q"), long.rate("q")) == (0.5, pytest.approx(4 / 6))
    assert short.num_attempts("q") == 6


def test_the_variance_of_rewards_is_a_rate_on_the_side_of_their_mean():
    # Variance .04 is that of p = .5 -+ sqrt(.25 - .04) = .041742 and .958258; of right and wrong it is their share.
    bucketer = DifficultyBucketer("reward_variance")
    assert bucketer.update("low", 0.1, 0.5) == pytest.approx(0.041742, abs=1e-5)
    assert bucketer.update("high", 0.5, 0.9) == pytest.approx(0.958258, abs=1e-5)
    assert bucketer.update("both", 1, 0, 0, 0) == pytest.approx(0.25)
    assert bucketer.update("both", 1, 1) == 1.0
    assert math.isnan(bucketer.rate("never"))
    assert (bucketer.window_size, DifficultyBucketer().window_size) == (None, 100)


@pytest.mark.parametrize(
    ("right", "tiers", "expected"),
    # Of ten attempts; five tiers have their borders at 1/4, 5/12, 7/12, 3/4 and three at 3/8 and 5/8.
    [(0, 5, 1), (2, 5, 1), (3, 5, 2), (5, 5, 3), (7, 5, 4), (8, 5, 5), (10, 5, 5), (3, 3, 1),
     (4, 3, 2), (7, 3, 3), (5, 1, 1)],
)  # fmt: skip
def test_tiers_are_steps_of_the_rate(right, tiers, expected):
    bucketer = DifficultyBucketer()
    bucketer.update("q", *[True] * right, *[False] * (10 - right))
    assert bucketer.tier("q", tiers) == expected


def test_what_it_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match="metric = 'entropy': must be one of correctness_rate, reward_variance"):
        DifficultyBucketer(metric="entropy")
    for size in (0, 129):
        with pytest.raises(ValueError, match=f"window_size = {size}: must be from 1 to 128"):
            DifficultyBucketer(window_size=size)
    with pytest.raises(ValueError, match="window_size = 5 has no effect with metric = 'reward_variance'"):
        DifficultyBucketer("reward_variance", 5)
    with pytest.raises(ValueError, match="'q' has no attempts"):
        DifficultyBucketer().tier("q")
