"""Counts and warnings; shares are worked out by hand in the test names and comments."""

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.alarm import RewardAlarm, verdict_counts
from exgrpo_megatron.rewards.verifier import Status, Verdict


def verdicts(**counts: int) -> list[Verdict]:
    return [Verdict(1.0 if status == "correct" else 0.0, status) for status in counts for _ in range(counts[status])]  # type: ignore[arg-type]


def test_counts_name_every_status_also_at_zero() -> None:
    assert verdict_counts(verdicts(correct=2, wrong=1, timeout=3)) == {
        "correct": 2,
        "wrong": 1,
        "no_box": 0,
        "not_literal": 0,
        "too_long": 0,
        "timeout": 3,
        "error": 0,
    }


def test_all_zero_rewards_warn_from_the_configured_step_until_a_reward_comes() -> None:
    alarm = RewardAlarm(MathEnvConfig(all_zero_alarm_steps=3))
    zero, some = verdicts(wrong=8), verdicts(wrong=7, correct=1)
    lengths = [len(alarm.observe(step)) for step in (zero, zero, some, zero, zero, zero, zero, some, zero)]
    assert lengths == [0, 0, 0, 0, 0, 1, 1, 0, 0]


def test_the_all_zero_warning_says_how_long_and_what_the_answers_were() -> None:
    alarm = RewardAlarm(MathEnvConfig(all_zero_alarm_steps=1))
    (warning,) = alarm.observe(verdicts(wrong=6, no_box=2))
    assert "0 for 1 steps in a row" in warning
    assert "wrong 6, no_box 2" in warning
    assert "env.math.all_zero_alarm_steps" in warning


def test_format_rejections_warn_above_the_share_and_not_at_it() -> None:
    alarm = RewardAlarm(MathEnvConfig(format_alarm_share=0.5))
    assert alarm.observe(verdicts(correct=5, no_box=2, not_literal=2, too_long=1)) == []  # 5 of 10
    (warning,) = alarm.observe(verdicts(correct=4, no_box=3, not_literal=2, too_long=1))  # 6 of 10
    assert "rejected 6 of 10" in warning
    assert "no_box 3, not_literal 2, too_long 1" in warning


def test_failures_warn_above_a_tenth_and_not_at_it() -> None:
    alarm = RewardAlarm(MathEnvConfig())
    assert alarm.observe(verdicts(correct=18, timeout=1, error=1)) == []  # 2 of 20
    (warning,) = alarm.observe(verdicts(correct=17, timeout=2, error=1))  # 3 of 20
    assert "3 of 20" in warning
    assert "timeout 2, error 1" in warning


def test_conditions_that_hold_together_are_all_named() -> None:
    alarm = RewardAlarm(MathEnvConfig(all_zero_alarm_steps=1, format_alarm_share=0.5))
    assert len(alarm.observe(verdicts(no_box=8, timeout=2))) == 3


def test_a_step_without_answers_neither_warns_nor_counts() -> None:
    alarm = RewardAlarm(MathEnvConfig(all_zero_alarm_steps=2))
    assert [len(alarm.observe(step)) for step in (verdicts(wrong=1), [], verdicts(wrong=1))] == [0, 0, 1]


def test_the_streak_survives_a_resume() -> None:
    config = MathEnvConfig(all_zero_alarm_steps=2)
    alarm, resumed = RewardAlarm(config), RewardAlarm(config)
    alarm.observe(verdicts(wrong=4))
    resumed.load_state_dict(alarm.state_dict())
    assert len(resumed.observe(verdicts(wrong=4))) == 1


def test_every_status_belongs_to_one_of_the_groups_the_warnings_use() -> None:
    from typing import get_args

    from exgrpo_megatron.rewards.alarm import FAILURE_STATUSES, FORMAT_STATUSES

    assert {*FORMAT_STATUSES, *FAILURE_STATUSES, "correct", "wrong"} == set(get_args(Status))
