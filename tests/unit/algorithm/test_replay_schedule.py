"""The delayed start and the number of replayed questions."""

from __future__ import annotations

import pytest

from exgrpo_megatron.algorithm.replay_schedule import ReplaySchedule, num_replayed
from exgrpo_megatron.config import ExperienceConfig


def schedule(**keys: object) -> ReplaySchedule:
    return ReplaySchedule(ExperienceConfig.model_validate({"collect_from": "start", **keys}))


def test_replay_starts_after_a_step_strictly_above_the_threshold_and_stays_on():
    replay = schedule(start_pass_rate=0.35)
    assert [replay.observe(rate) for rate in (0.1, 0.35, 0.36, 0.0)] == [False, False, True, True]


def test_without_a_threshold_replay_is_on_from_the_first_step():
    assert schedule(start_pass_rate=None).on


def test_a_threshold_of_zero_waits_for_the_first_correct_answer():
    replay = schedule(start_pass_rate=0.0)
    assert [replay.observe(rate) for rate in (0.0, 0.001)] == [False, True]


@pytest.mark.parametrize("start_pass_rate", [0.35, None])
def test_disabled_experience_never_replays_or_collects(start_pass_rate: float | None):
    replay = schedule(enabled=False, start_pass_rate=start_pass_rate)
    assert not replay.observe(1.0)
    assert not replay.on
    assert not replay.collecting


def test_collection_from_the_start_does_not_wait_for_replay():
    assert schedule(collect_from="start").collecting


def test_collection_from_the_mixed_phase_waits_for_replay():
    replay = schedule(collect_from="mixed_phase")
    assert not replay.collecting
    replay.observe(0.9)
    assert replay.collecting


def test_the_phase_survives_a_resume():
    replay = schedule()
    replay.observe(0.9)
    resumed = schedule()
    resumed.load_state_dict(replay.state_dict())
    assert resumed.on
    resumed = schedule(start_pass_rate=None)
    resumed.load_state_dict(schedule().state_dict())
    assert resumed.on
    disabled = schedule(enabled=False)
    disabled.load_state_dict(replay.state_dict())
    assert not disabled.on


@pytest.mark.parametrize(
    ("share", "num_prompts", "expected"),
    [
        (0.5, 128, 64),
        (0.5, 127, 63),
        (0.5, 3, 1),
        (0.5, 1, 0),
        (0.29, 128, 37),
        (0.29, 100, 29),
        (1.0, 8, 8),
        (0.0, 8, 0),
    ],
)
def test_the_share_is_rounded_down(share: float, num_prompts: int, expected: int):
    """docs/algorithm.md: 128->64, 127->63, 3->1, 1->0; (128, .29)->37. 0.29 of 100 is 29, though 0.29 * 100 < 29."""
    assert num_replayed(share, num_prompts, available=10**6) == expected


def test_no_more_is_replayed_than_there_is():
    assert num_replayed(0.5, 128, available=10) == 10
    assert num_replayed(0.5, 128, available=0) == 0
