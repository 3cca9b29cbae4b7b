"""Every key of `experience:` that says which stored questions are drawn changes that, through the trainer."""

import numpy as np
import pytest
from scripted import all_wrong, build_trainer, plant, replayed_members, right, token_ids

from exgrpo_megatron.types import Group, Trajectory


@pytest.fixture
def make(tmp_path, data_parallel):
    """A trainer whose engine answers wrong, on B = 8 questions of K = 4 answers."""

    def build(**experience):
        return build_trainer(
            tmp_path,
            all_wrong,
            comm=data_parallel,
            num_questions=16,
            grpo={"num_prompts_per_step": 8},
            data={"train": {"category_key": "answer"}},
            experience={**experience, "replay_ratio": 1.0},
        )

    return build


# experience.difficulty, difficulty_window, difficulty_range, difficulty_range_unit, difficulty_per_category

# q1 q2 q3 have 1, q4 q5 2 and q6 3 of 4 right, then q6 none of 4.
RATES = {"q1": 1, "q2": 1, "q3": 1, "q4": 2, "q5": 2, "q6": 3}
MIDDLE = {"difficulty_range": [0.3, 0.7]}


@pytest.mark.parametrize(
    ("keys", "drawable"),
    [
        ({}, "123456"),
        # A group without a right answer does not move the question: 3/4.
        (MIDDLE, "45"),
        # Three of its last eight answers, and none of its last four.
        ({**MIDDLE, "difficulty": "window", "difficulty_window": 8}, "456"),
        ({"difficulty_range": [0.0, 0.2], "difficulty": "window", "difficulty_window": 4}, "6"),
        # Rewards of 0 and 1: the last group's share.
        ({"difficulty_range": [0.0, 0.2], "difficulty": "reward_variance"}, "6"),
        # Rates .25 .25 .25 .5 .5 .75: half of six do not exceed .25, seven tenths (4.2, so 5) .5.
        ({"difficulty_range": [0.5, 0.7], "difficulty_range_unit": "quantile"}, "12345"),
        ({"difficulty_range": [0.6, 0.7], "difficulty_range_unit": "quantile"}, "45"),
        # A question is a category of its own, and its only rate is each of its quantiles.
        (
            {
                "difficulty_range": [0.6, 0.7],
                "difficulty_range_unit": "quantile",
                "difficulty_per_category": True,
                "bucket_weight": "uniform",
            },
            "123456",
        ),
    ],
)
def test_only_questions_of_the_difficulty_named_are_replayed(make, keys, drawable):
    trainer = make(**keys)
    for name, k in RATES.items():
        plant(trainer, name, [right(name)], k=k)
    plant(trainer, "q6", [], k=0)
    drawn = trainer.replay.draw(1, mixed=True)
    assert set(drawn.replayed) == {f"q{number}" for number in drawable}
    assert drawn.num_drawable == len(drawable)
    assert len(drawn.fresh) == 8 - len(drawable)


# experience.entropy_percentile


def test_only_answers_of_low_recorded_entropy_are_replayed(make):
    """Recorded means of -log-prob: .5 and 1.5 of q1, 1 of q2, 2 of q3, .25 of q4. The lowest: .5 1 2 .25, of which
    three quarters do not exceed 1."""
    trainer = make(entropy_percentile=75, answer_choice="newest")
    for name, entropies in {"q1": (0.5, 1.5), "q2": (1.0,), "q3": (2.0,), "q4": (0.25,)}.items():
        for style, entropy in enumerate(entropies):
            plant_with_entropy(trainer, name, right(name, style), entropy)
    result = trainer.step()
    replayed = replayed_members(result.groups)
    assert set(replayed) == {"q1", "q2", "q4"}
    # The newest of q1's is beyond the limit.
    np.testing.assert_array_equal(replayed["q1"].token_ids, token_ids(trainer, right("q1")))
    assert result.metrics["experience/drawable_questions"] == 3
    assert result.metrics["experience/buffer_questions"] == 4


def test_a_run_with_an_entropy_percentile_begins_with_nothing_stored(make):
    metrics = make(entropy_percentile=75).step().metrics
    assert (metrics["experience/drawable_questions"], metrics["experience/replayed_questions"]) == (0, 0)


def plant_with_entropy(trainer, name, text, entropy):
    ids = token_ids(trainer, text)
    members = [Trajectory(ids, np.full(len(ids), -entropy, np.float32), 1.0, False, "stop", 0)]
    members += [Trajectory(ids[:1], np.array([-1.0], np.float32), 0.0, False, "stop", 0)] * 3
    trainer.parts.experience.record([Group(trainer.questions[name], tuple(members))], step=0, collect=True)
