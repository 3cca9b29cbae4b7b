"""Freshness and drain, every number by hand; and the alarms that look at them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from exgrpo_megatron.config import AlarmsConfig
from exgrpo_megatron.experience.alarms import ALARMS, Alarms
from exgrpo_megatron.experience.freshness import Freshness, StepSeen
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.metrics import find_metric
from exgrpo_megatron.types import StoredAnswer


def answer(step: int, version: int) -> StoredAnswer:
    return StoredAnswer(np.array([1], np.int32), np.array([-0.5], np.float32), version, step)


def seen(step: int, **changed: object) -> StepSeen:
    """A step of 8 new questions out of 100, in which nothing happened."""
    given = {
        "step": step, "version": 2 * (step - 1), "num_retired": 0, "num_fresh": 8, "num_returned": 0,
        "epoch_length": 100, "replayed": [], "report": RecordReport(), **changed,
    }  # fmt: skip
    return StepSeen(**given)  # type: ignore[arg-type]


def watching(stored: int = 0, **keys: object) -> Freshness:
    freshness = Freshness(AlarmsConfig.model_validate(keys), num_questions=100)
    freshness.begin(stored)
    return freshness


def retiring(step: int, count: int, total: int, returned: int = 0) -> StepSeen:
    report = RecordReport(retired=[f"q{i}" for i in range(count)])
    return seen(step, num_retired=total, num_returned=returned, epoch_length=100 - total, report=report)


def test_time_left_is_what_is_left_over_the_mean_net_retirement_of_the_last_steps():
    freshness = watching(average_steps=2)
    first = freshness.observe(retiring(1, 10, 10))
    assert first["freshness/data_left"] == 0.9
    assert "freshness/steps_left" not in first  # one step is no mean of two
    second = freshness.observe(retiring(2, 4, 14))
    # 86 left, (10 + 4) / 2 = 7 a step; 8 new questions a step, 86 in the next epoch.
    assert second["freshness/steps_left"] == pytest.approx(86 / 7)
    assert second["freshness/epochs_left"] == pytest.approx(86 / 7 * 8 / 86)
    third = freshness.observe(retiring(3, 2, 10, returned=6))
    # (4 + 2 - 6) / 2 = 0: there is no end in sight.
    assert third["freshness/data_left"] == 0.9
    assert "freshness/steps_left" not in third


def test_ages_are_in_steps_since_storing_and_in_versions_since_writing():
    # Step 10 begins with version 18. Of another run, and so without a version of this one, is the prefilled answer.
    replayed = [("a", answer(9, 16)), ("b", answer(6, 10)), ("c", answer(2, 2)), ("d", answer(0, 5000))]
    metrics = watching().observe(seen(10, replayed=replayed))
    ages = {name: value for name, value in metrics.items() if "/age_" in name}
    assert ages == {
        "freshness/age_steps_mean": 23 / 4,
        "freshness/age_steps_median": 6.0,  # of 1, 4, 8, 10
        "freshness/age_steps_max": 10,
        "freshness/age_versions_mean": pytest.approx((2 + 8 + 16) / 3),
        "freshness/age_versions_median": 8.0,
        "freshness/age_versions_max": 16,
    }


def test_duplicates_are_a_share_of_the_correct_new_answers_that_could_be_stored():
    metrics = watching().observe(seen(1, report=RecordReport(stored=3, duplicates=1, refused=[], truncated=5)))
    assert metrics["freshness/duplicates"] == 0.25
    assert "freshness/duplicates" not in watching().observe(seen(1))


def test_repeated_looks_back_as_many_steps_as_the_recipe_says():
    freshness = watching(repeat_steps=2)

    def replay(step: int, names: str) -> float | None:
        return freshness.observe(seen(step, replayed=[(name, answer(1, 0)) for name in names])).get(
            "freshness/repeated"
        )

    assert replay(2, "ab") == 0
    assert replay(3, "acd") == pytest.approx(1 / 3)
    assert replay(4, "") is None
    # Steps 3 and 4 replayed a, c, d; b was replayed in step 2.
    assert replay(5, "ab") == 0.5


def test_uses_are_replays_over_answers_stored_those_from_elsewhere_included():
    freshness = watching(stored=4)
    first = freshness.observe(seen(1, replayed=[("a", answer(0, 0))] * 2, report=RecordReport(stored=4)))
    assert first["freshness/uses_per_answer"] == 2 / 8
    freshness.begin(8)
    second = freshness.observe(seen(2, replayed=[("a", answer(0, 0))] * 4, report=RecordReport(stored=0)))
    assert second["freshness/uses_per_answer"] == 6 / 8
    assert "freshness/uses_per_answer" not in watching().observe(seen(1))


def test_what_is_remembered_survives_a_resume():
    def steps(freshness: Freshness, numbers: range) -> list[dict[str, float]]:
        return [
            freshness.observe(
                seen(
                    step,
                    num_retired=3 * step,
                    replayed=[(f"q{step // 2}", answer(step - 1, 0))],
                    report=RecordReport(stored=1, retired=["x"] * 3),
                )
            )
            for step in numbers
        ]

    straight, cut, resumed = (watching(average_steps=3, repeat_steps=2) for _ in range(3))
    whole = steps(straight, range(1, 9))
    steps(cut, range(1, 5))
    resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
    assert steps(resumed, range(5, 9)) == whole[4:]


OFF = {"min_data_left": None, "drain_before_end": False}
THRESHOLDS = {
    "min_data_left": 0.3, "min_epochs_left": 2.0, "max_mean_age_steps": 50.0, "max_mean_age_versions": 80.0,
    "max_duplicates": 0.5, "max_repeated": 0.5, "max_uses_per_answer": 20.0,
}  # fmt: skip


def alarms(last_step: int = 50, **keys: object) -> Alarms:
    return Alarms(AlarmsConfig.model_validate({**OFF, **keys}), last_step)


def test_every_alarm_has_a_key_and_a_metric():
    assert set(ALARMS) == set(AlarmsConfig.model_fields) - {"average_steps", "repeat_steps"}
    assert set(ALARMS) == {*THRESHOLDS, "drain_before_end"}
    assert all(find_metric(alarm.metric) and find_metric(f"alarm/{name}") for name, alarm in ALARMS.items())


@pytest.mark.parametrize("name", THRESHOLDS)
def test_an_alarm_rings_once_a_crossing_and_again_after_its_number_was_back(name: str):
    limit, metric = THRESHOLDS[name], ALARMS[name].metric
    bad, good = (limit * 0.9, limit) if ALARMS[name].below else (limit * 1.1, limit)
    watching = alarms(**{name: limit})
    told = [watching.observe(step, {metric: value}) for step, value in enumerate([good, bad, bad, good, bad], 1)]
    assert [len(texts) for texts in told] == [0, 1, 0, 0, 1]
    assert f"{metric} = {bad:.4g} is {'below' if ALARMS[name].below else 'above'} " in told[1][0]
    assert f"experience.alarms.{name} = {limit:g}" in told[1][0]
    assert ALARMS[name].remedy in told[1][0]
    # A step in which the number has no value leaves the alarm as it is.
    assert watching.observe(6, {}) == []
    assert watching.metrics(6) == {f"alarm/{name}": 1.0}
    assert alarms().observe(1, {metric: bad}) == []


def test_the_drain_alarm_compares_with_the_steps_that_the_run_has_left():
    watching = alarms(last_step=30, drain_before_end=True)
    assert watching.observe(10, {"freshness/steps_left": 20.0}) == []
    (text,) = watching.observe(11, {"freshness/steps_left": 18.0})
    assert "freshness/steps_left = 18 is below the 19 steps left in the run (experience.alarms.dr" in text


def test_a_ringing_alarm_says_nothing_anew_after_a_resume_and_none_is_left_where_it_was_turned_off():
    ringing, resumed, silenced = alarms(max_repeated=0.5), alarms(max_repeated=0.5), alarms()
    assert ringing.observe(1, {"freshness/repeated": 0.6})
    state = json.loads(json.dumps(ringing.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.observe(2, {"freshness/repeated": 0.7}) == []
    silenced.load_state_dict(state)
    silenced.observe(2, {})
    assert silenced.state_dict() == {"ringing": []}
    assert silenced.metrics(2) == {}
