"""What each limit looks at, how long a guard holds, what it says; through `Trainer.step`: test_replay_control.py."""

from __future__ import annotations

import json
import math

import pytest

from exgrpo_megatron.algorithm.guards import Guards
from exgrpo_megatron.config import GUARD_LIMITS, GuardsConfig
from exgrpo_megatron.metrics import METRICS

LIMITS = {
    "min_ess_replayed": 0.5, "min_ess_fresh": 0.6, "max_ratio_replayed": 10.0, "max_ratio_fresh": 3.0,
    "max_kl_replayed": 0.2, "max_kl_fresh": 0.1,
}  # fmt: skip


def guards(**keys: object) -> Guards:
    return Guards(GuardsConfig.model_validate(keys))


def test_every_limit_looks_at_a_metric_that_is_there():
    keys = set(GuardsConfig.model_fields) - {"action", "hold_steps", "ratio_cap"}
    assert keys == set(GUARD_LIMITS) == set(LIMITS)
    assert {metric for metrics in GUARD_LIMITS.values() for metric in metrics} <= METRICS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_may_be_met_and_not_be_passed(name: str):
    limit, watching = LIMITS[name], guards(**{name: LIMITS[name]})
    worse, better = limit * (1 + 1e-6), limit * (1 - 1e-6)
    if name.startswith("min"):
        worse, better = better, worse
    for metric in GUARD_LIMITS[name]:
        assert watching.crossed({metric: worse}) == {metric: worse}
        assert watching.crossed({metric: limit}) == watching.crossed({metric: better}) == {}
        assert list(watching.crossed({metric: math.nan})) == [metric]
    others = {metric for key in GUARD_LIMITS if key != name for metric in GUARD_LIMITS[key]}
    assert watching.crossed(dict.fromkeys(others, worse)) == {}


def test_a_guard_holds_the_steps_after_the_last_crossing():
    watching = guards(max_ratio_replayed=4.0, action="on_policy", hold_steps=3)
    crossed = {"ratio_replayed/max": 5.0}
    assert not watching.held(5)
    watching.observe(5, crossed)
    assert [watching.held(step) for step in (6, 7, 8, 9)] == [True, True, True, False]
    watching.observe(7, crossed)
    watching.observe(8, {})
    assert [watching.held(step) for step in (9, 10, 11)] == [True, True, False]
    # One limit, though groups and replay steps both crossed it.
    crossed = {**crossed, "ratio_replay_step/max": 6.0}
    assert watching.metrics(crossed, held=True) == {"guards/crossed": 1, "guards/crossings": 2, "guards/held": 1.0}


@pytest.mark.parametrize(
    ("action", "clips", "forbids"), [("warn", False, False), ("clip", True, False), ("on_policy", False, True)]
)
def test_the_action_says_what_is_done_and_every_crossing_is_told(action: str, clips: bool, forbids: bool):
    watching = guards(max_ratio_replayed=4.0, min_ess_fresh=0.5, action=action)
    for step in (3, 4):
        (text,) = watching.observe(step, {"ratio_replayed/max": 5.25, "ratio_fresh/ess": 0.125})
        assert "ratio_replayed/max = 5.25 (experience.guards.max_ratio_replayed = 4)" in text
        assert "ratio_fresh/ess = 0.125 (experience.guards.min_ess_fresh = 0.5)" in text
        assert f"experience.guards.action = '{action}'" in text
        assert (f"Steps {step + 1} to {step + 10} " in text) == (action != "warn")
    assert watching.observe(5, {}) == []
    assert (watching.clips(6), watching.forbids_replay(6)) == (clips, forbids)


def test_a_hold_survives_a_resume():
    watching, resumed = (guards(max_kl_replayed=1.0, action="clip", hold_steps=2) for _ in range(2))
    watching.observe(4, {"ratio_replay_step/k3": 2.0})
    resumed.load_state_dict(json.loads(json.dumps(watching.state_dict())))
    assert [resumed.clips(step) for step in (5, 6, 7)] == [True, True, False]
    assert resumed.metrics({}, held=False)["guards/crossings"] == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"action": "clip"}, "action = 'clip' has no effect with every limit null"),
        ({"max_kl_fresh": 1.0, "hold_steps": 5}, "hold_steps = 5 has no effect with action = 'warn'"),
        ({"max_kl_fresh": 1.0, "action": "on_policy", "ratio_cap": 2.0}, "ratio_cap = 2.0 has no effect with action"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        guards(**keys)


def test_without_limits_there_is_nothing_to_report():
    assert guards().metrics({}, held=False) == {}
