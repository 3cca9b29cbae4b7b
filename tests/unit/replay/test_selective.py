"""Which steps replay, and what."""

import numpy as np
import pytest
from test_trajectory_buffer import five, names

from exgrpo_megatron.replay import SelectiveReplay


def steps_that_replay(replay, buffer, steps):
    return [bool(replay.select(buffer, 1)) for _ in range(steps)]


def test_so_many_steps_replay_as_the_probability_says():
    buffer = five()
    # Standard error of the share in 200 steps at most .035.
    for probability in (0.0, 0.3, 1.0):
        replay = SelectiveReplay("random", probability)
        assert np.mean(steps_that_replay(replay, buffer, 200)) == pytest.approx(probability, abs=0.13)


def test_seed_and_number_of_the_step_decide_which_steps():
    buffer, first = five(), SelectiveReplay(seed=1)
    whole = steps_that_replay(first, buffer, 40)
    again, another = SelectiveReplay(seed=1), SelectiveReplay(seed=2)
    again.load_state_dict({"step": 25})
    assert steps_that_replay(again, buffer, 15) == whole[25:]
    assert again.state_dict() == first.state_dict() == {"step": 40}
    assert steps_that_replay(another, buffer, 40) != whole


def test_a_strategy_says_which_questions():
    def replayed(*args, **options):
        return names(SelectiveReplay(*args, **options).select(five(), 9))

    # Rates .1 to .9, entropies .5 to .1: medium ones are q3, q5, q7; the lowest quarter of entropies are q7 and q9.
    assert replayed("entropy_guided", 1.0) == ["q7"]
    assert replayed("entropy_guided", 1.0, entropy_percentile=75) == ["q3", "q5", "q7"]
    assert replayed("entropy_guided", 1.0, (0.6, 1.0)) == ["q7", "q9"]
    assert replayed("difficulty_guided", 1.0) == ["q3", "q5", "q7"]
    assert replayed("difficulty_guided", 1.0, (0.0, 0.5)) == ["q1", "q3", "q5"]
    assert replayed("random", 1.0) == ["q1", "q3", "q5", "q7", "q9"]


def test_excluded_questions_are_not_replayed():
    assert names(SelectiveReplay("random", 1.0).select(five(), 9, exclude={"q1"})) == ["q3", "q5", "q7", "q9"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "lowest"}, "strategy = 'lowest'"),
        ({"replay_probability": 1.1}, "replay_probability = 1.1"),
        ({"medium_difficulty_range": (0.7, 0.3)}, "medium_difficulty_range"),
        ({"strategy": "random", "medium_difficulty_range": (0.3, 0.7)}, "medium_difficulty_range has no effect"),
        ({"strategy": "random", "entropy_percentile": 25}, "entropy_percentile has no effect"),
        ({"strategy": "difficulty_guided", "entropy_percentile": 25}, "entropy_percentile has no effect"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SelectiveReplay(**options)
