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


def begun(replay: ReplaySchedule, steps: int, epochs: list[int] | None = None) -> list[bool]:
    return [replay.begin(step, epochs[step - 1] if epochs else 0) for step in range(1, steps + 1)]


def test_replay_starts_with_a_step_or_with_an_epoch_and_stays_on():
    assert begun(schedule(start_step=3), 4) == [False, False, True, True]
    assert begun(schedule(start_epoch=1), 5, [0, 0, 1, 1, 2]) == [False, False, True, True, True]
    assert not any(begun(schedule(start_step=1, enabled=False), 3))


@pytest.mark.parametrize("start", [{"start_step": 3}, {"start_epoch": 2}])
def test_another_start_replaces_the_default_pass_rate(start: dict[str, int]):
    replay = schedule(**start)
    assert not replay.observe(1.0)
    assert ExperienceConfig.model_validate(start).start_pass_rate is None
    assert ExperienceConfig().start_pass_rate == 0.35


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"start_step": 3, "start_epoch": 1}, "start_epoch = 1 and start_step = 3: replay starts once"),
        ({"start_step": 3, "start_pass_rate": 0.2}, "start_pass_rate = 0.2 and start_step = 3"),
        ({"stop_pass_rate": 0.4}, "stop_pass_rate = 0.4 is above start_pass_rate = 0.35"),
        ({"stop_pass_rate": 0.4, "start_step": 2}, "stop_pass_rate = 0.4, but start_pass_rate is null"),
        ({"pass_rate_steps": 2, "start_pass_rate": None}, "pass_rate_steps = 2 has no effect"),
        ({"return_retired": {"share": 0.1, "period": 25}, "retire_from": "never"}, "'never' retires nothing"),
    ],
)
def test_starts_that_do_not_fit_are_refused_by_name(keys: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        schedule(**keys)


def test_between_stop_and_start_replay_stays_as_it_is():
    replay = schedule(start_pass_rate=0.4, stop_pass_rate=0.2)
    rates = (0.3, 0.41, 0.3, 0.2, 0.19, 0.3, 0.4, 0.5)
    assert [replay.observe(rate) for rate in rates] == [False, True, True, True, False, False, False, True]


def test_both_rates_are_compared_with_a_mean_that_begins_anew_at_each_turn():
    replay = schedule(start_pass_rate=0.4, stop_pass_rate=0.2, pass_rate_steps=2)
    # Means, from the second step on: .45 turns on; then nothing until there are two again: (0 + .5) / 2 = .25, and
    # (.5 + .1) / 2 = .3 stay, (.1 + .1) / 2 = .1 turns off; (.9 alone) is no mean of two.
    rates = (0.9, 0.0, 0.0, 0.5, 0.1, 0.1, 0.9)
    assert [replay.observe(rate) for rate in rates] == [False, True, True, True, True, False, False]


def test_a_step_without_new_questions_changes_nothing():
    replay = schedule(start_pass_rate=0.4, stop_pass_rate=0.2)
    replay.observe(0.5)
    assert replay.observe(None)


def test_the_rates_of_a_mean_survive_a_resume():
    replay, resumed = (schedule(start_pass_rate=0.4, pass_rate_steps=2) for _ in range(2))
    replay.observe(0.9)
    resumed.load_state_dict(replay.state_dict())
    assert resumed.observe(0.0)


def test_a_step_replays_with_the_probability_from_seed_and_step_alone():
    keys = {"start_pass_rate": None, "replay_probability": 0.3}
    drawn = begun(ReplaySchedule(ExperienceConfig.model_validate(keys), seed=1), 2000)
    # 600 expected, with a deviation of sqrt(2000 x .3 x .7) = 20.5.
    assert abs(sum(drawn) - 600) < 62
    again = ReplaySchedule(ExperienceConfig.model_validate(keys), seed=1)
    assert [again.begin(step, 7) for step in (900, 5, 1999)] == [drawn[899], drawn[4], drawn[1998]]
    assert begun(ReplaySchedule(ExperienceConfig.model_validate(keys), seed=2), 2000) != drawn
    for probability in (0.0, 1.0):
        replay = schedule(start_pass_rate=None, replay_probability=probability)
        assert set(begun(replay, 50)) == {probability == 1.0}
