"""What a step does at its edges: retired questions still in line, epoch borders, refusals, skipped updates, metrics."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scripted import all_wrong, build_trainer, fresh_ids, half_right, plant, replayed_members, right, wrong

from exgrpo_megatron.metrics import find_metric


def all_right(name, samples):
    return [right(name)] * samples


@pytest.fixture
def make(tmp_path, data_parallel):
    def build(script=all_wrong, **sections):
        return build_trainer(tmp_path, script, comm=data_parallel, **sections)

    return build


def test_a_question_retired_while_in_line_comes_once_more_as_new_and_nothing_is_stored_of_it(make):
    # q9 waits in line for step 2 (6 4 2 12 | 9 ...) and is replayed and solved in step 1.
    trainer = make(lambda name, samples: all_right(name, samples) if samples == 3 else half_right(name, samples))
    plant(trainer, "q9", [right("q9", 2)])
    first = trainer.step()
    assert set(replayed_members(first.groups)) == {"q9"}
    assert trainer.parts.experience.is_retired("q9")
    trainer.parts.engine.script = half_right
    second = trainer.step()
    assert "q9" in fresh_ids(second)
    assert second.metrics["experience/retired_again"] == 1
    assert trainer.parts.experience.answers("q9") == ()
    assert "q9" not in replayed_members(second.groups)
    # Its group is trained on all the same: half of it is right, so it has a gradient.
    assert next(group for group in second.groups if group.question.id == "q9").num_correct == 2


def test_a_replayed_question_is_never_new_in_the_same_step_and_keeps_its_place_in_line(make):
    trainer = make()
    plant(trainer, "q6", [right("q6")])
    plant(trainer, "q2", [right("q2")])
    first = trainer.step()
    assert set(replayed_members(first.groups)) == {"q2", "q6"}
    # 6 and 2 are passed over, and are first in line when they are not replayed.
    assert fresh_ids(first) == ["q4", "q12"]
    trainer.parts.experience.keep_only(set())
    assert fresh_ids(trainer.step()) == ["q6", "q2", "q9", "q5"]


def test_a_step_across_an_epoch_border_has_no_question_twice(make):
    trainer = make(num_questions=6)
    seen = [fresh_ids(trainer.step()) for _ in range(6)]
    assert all(len(set(step)) == 4 for step in seen)
    # 24 places are four epochs of 6: every question four times, none wasted.
    assert all(sum(step.count(name) for step in seen) == 4 for name in trainer.questions)


def test_an_answer_refused_at_the_door_is_counted_and_named(make):
    def with_a_nan(question, ids):
        logprobs = np.full(len(ids), -0.5, dtype=np.float32)
        logprobs[1] = np.nan if question.id == "q4" else -0.5
        return logprobs

    trainer = make(half_right, loss_fn={"old_logprobs": "engine"})
    trainer.parts.engine.recorder = with_a_nan
    result = trainer.step()
    assert result.metrics["experience/refused"] == 2
    assert trainer.parts.experience.answers("q4") == ()
    warning = next(text for text in result.warnings if "cannot be stored" in text)
    assert "question 'q4': log-prob 1 of 4 is nan" in warning


def test_a_skipped_update_is_a_warning_and_counted_in_its_own_step_only(make):
    trainer = make(half_right, loss_fn={"old_logprobs": "engine"})
    sound = trainer.parts.engine.recorder
    trainer.parts.engine.recorder = lambda question, ids: np.full(len(ids), np.nan, dtype=np.float32)
    before = {name: tensor.clone() for name, tensor in trainer.parts.policy.export_weights()}
    result = trainer.step()
    assert (result.metrics["policy/skipped_updates"], result.metrics["policy/version"]) == (1, 0)
    assert any("1 of 1 optimiser steps skipped, 1 so far" in text for text in result.warnings)
    assert all(bool((tensor == before[name]).all()) for name, tensor in trainer.parts.policy.export_weights())
    trainer.parts.engine.recorder = sound
    result = trainer.step()
    assert (result.metrics["policy/skipped_updates"], result.metrics["policy/version"]) == (0, 1)
    assert not any("skipped" in text for text in result.warnings)
    assert trainer.state_dict()["skipped_updates"] == 1


@pytest.mark.parametrize("broken_update", [0, 1])
def test_a_gradient_norm_that_is_not_finite_shows_whichever_update_it_was(make, monkeypatch, broken_update):
    trainer = make(half_right, policy={"train_global_batch_size": 8})
    norms = [1.0, 1.0]
    norms[broken_update] = math.nan
    update = trainer.parts.policy.update
    monkeypatch.setattr(
        trainer.parts.policy, "update", lambda *args, **kw: replace(update(*args, **kw), grad_norm=norms.pop(0))
    )
    assert math.isnan(trainer.step().metrics["policy/grad_norm"])


def test_a_replayed_answer_that_is_graded_wrong_now_is_counted_and_not_rewarded(make):
    trainer = make()
    plant(trainer, "q1", [wrong("q1")])
    result = trainer.step()
    assert result.metrics["experience/replayed_wrong"] == 1
    assert replayed_members(result.groups)["q1"].reward == 0.0
    # k = 0: nothing changes, the answer stays.
    assert len(trainer.parts.experience.answers("q1")) == 1
    assert result.metrics["groups/none_correct"] == 1.0


def test_correct_answers_that_are_not_stored_are_counted_by_why(make):
    trainer = make(lambda name, samples: [right(name), right(name), wrong(name), wrong(name)])
    first = trainer.step().metrics
    assert (first["experience/stored_this_step"], first["experience/already_stored"]) == (4, 4)
    late = make(half_right, experience={"collect_from": "mixed_phase", "start_pass_rate": 0.9})
    metrics = late.step().metrics
    assert (metrics["experience/stored_this_step"], metrics["experience/not_collected"]) == (0, 8)


def test_every_metric_is_documented_and_finite(make):
    trainer = make(half_right)
    for _ in range(2):
        metrics = trainer.step().metrics
        assert all(find_metric(name) for name in metrics)
        assert all(math.isfinite(value) for value in metrics.values())
        assert set(metrics) >= {"data/discarded", "data/retired_kept", "experience/bucket_3", "policy/clip_share"}


def test_the_embedded_engines_log_probs_are_the_actors_before_and_after_an_update(make):
    # One optimiser step a batch: every new token has w = 1 when the engine has the actor's weights.
    generation = {"max_new_tokens": 40, "temperature": 0.8}
    trainer = make(None, loss_fn={"old_logprobs": "engine"}, policy={"generation": generation})
    for version in (1, 2):
        metrics = trainer.step().metrics
        assert metrics["policy/version"] == version
        assert abs(math.log(metrics["ratio_fresh/min"])) < 1e-5
        assert abs(math.log(metrics["ratio_fresh/max"])) < 1e-5


class TwoRanks:
    """Rank 0 of two; what rank 1 would send is made from what rank 0 sends."""

    rank, size = 0, 2

    def __init__(self, other):
        self.other = other

    def all_gather(self, value):
        return [value, self.other(value)]


def test_times_are_those_of_the_slowest_rank(make, monkeypatch):
    from exgrpo_megatron import step_metrics

    trainer = make(half_right)
    records = []
    computed = step_metrics.step_metrics
    monkeypatch.setattr("exgrpo_megatron.trainer.step_metrics", lambda *args: records.append(args) or computed(*args))
    trainer.step()
    parts, record, clock = records[0]

    def slower(value):
        return {name: seconds + 100 for name, seconds in value.items()} if isinstance(value, dict) else value

    metrics = computed(replace(parts, comm=TwoRanks(slower)), record, clock)
    # 16 answers of 4 tokens (\boxed{, digit, }, eos) or more in 100 s: one rank alone would claim thousands a second.
    assert metrics["time/rollout_s"] > 100
    assert metrics["rollout/tokens_per_s"] == pytest.approx(metrics["rollout/tokens"] / metrics["time/rollout_s"])
