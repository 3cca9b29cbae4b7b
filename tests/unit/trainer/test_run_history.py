"""The history that a run writes, against its metrics, its groups and numbers by hand."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from scripted import build_trainer, make_config, plant, right, token_ids, wrong

from exgrpo_megatron.experience.history import read_history
from exgrpo_megatron.metric_sinks import read_metrics

QUICK = {"checkpointing": {"enabled": False, "export_hf": False}}


def two_right(question_id, samples):
    return [right(question_id), right(question_id), *[wrong(question_id)] * samples][:samples]


def test_a_replayed_answer_is_named_with_its_ratios(tmp_path, data_parallel):
    """Planted with w = 2 at every token of the one question's answer, and 1 of the other's."""
    trainer = build_trainer(tmp_path, two_right, comm=data_parallel)
    plant(trainer, "q1", [right("q1", 1)], ratio=2.0)
    plant(trainer, "q2", [right("q2", 1), right("q2", 2)], ratio=1.0)
    store = trainer.parts.experience
    result = trainer.step()
    replayed = {event.question_id: event for event in result.events if event.kind == "replayed"}
    assert replayed.keys() == {"q1", "q2"}
    one = replayed["q1"]
    assert one.answer == 0
    assert (one.mean_ratio, one.max_ratio) == pytest.approx((2.0, 2.0), rel=1e-4)
    assert replayed["q2"].answer in (1, 2)
    assert (replayed["q2"].mean_ratio, replayed["q2"].max_ratio) == pytest.approx((1.0, 1.0), rel=1e-4)
    chosen = next(group for group in result.groups if group.question.id == "q2").trajectories[-1]
    (stored,) = (answer for answer in store.answers("q2") if answer.serial == replayed["q2"].answer)
    assert np.array_equal(stored.token_ids, chosen.token_ids)


def test_a_replay_step_names_its_answers_too_and_a_question_that_returns_is_told(tmp_path, data_parallel):
    """w = 2 when it is replayed in a step of its own, before which nothing has moved the policy: all new answers are
    wrong. Of the one question that is retired, one is brought back after every step."""
    keys = {"strategy": "replay_step", "retire_from": "replay", "return_retired": {"share": 1.0, "period": 1}}

    def script(question_id, samples):
        return [right(question_id) if question_id == retired else wrong(question_id)] * samples

    retired = "q6"  # the first in line
    trainer = build_trainer(tmp_path, script, comm=data_parallel, experience=keys, loss_fn={"entropy_bonus": "none"})
    plant(trainer, "q1", [right("q1")], ratio=2.0)
    events = trainer.step().events
    (replayed,) = (event for event in events if event.kind == "replayed")
    assert (replayed.question_id, replayed.answer) == ("q1", 0)
    assert (replayed.mean_ratio, replayed.max_ratio) == pytest.approx((2.0, 2.0), rel=1e-3)
    assert [event.kind for event in events if event.question_id == retired] == ["tried", "retired", "returned"]


def test_mean_and_largest_ratio_differ_where_tokens_do(tmp_path, data_parallel):
    trainer = build_trainer(tmp_path, two_right, comm=data_parallel)
    plant(trainer, "q1", [right("q1")])
    (answer,) = trainer.parts.experience.answers("q1")
    ids, length = token_ids(trainer, right("q1")), len(answer.token_ids)
    assert np.array_equal(ids, answer.token_ids)
    trainer.parts.experience._state.keeper.forget(trainer.parts.experience._state.index.row("q1"))
    uneven = answer.logprobs - np.log(np.array([4.0, *[1.0] * (length - 1)], np.float32))
    trainer.parts.experience._state.keeper.keep(
        trainer.parts.experience._state.index.row("q1"), "q1", [type(answer)(ids, uneven, 0, 0)], 9
    )
    (event,) = (event for event in trainer.step().events if event.kind == "replayed")
    assert event.answer == 9
    assert event.max_ratio == pytest.approx(4.0, rel=1e-4)
    assert event.mean_ratio == pytest.approx((4.0 + length - 1) / length, rel=1e-4)


def test_a_runs_history_adds_up_to_its_metrics(tmp_path, run_steps):
    caps = {"experience": {"max_answers_per_question": 2, "max_answers": 6, "eviction": "least_recently_replayed"}}
    run_steps(make_config(tmp_path, **QUICK, **caps), 6)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = dict(read_history(tmp_path / "run" / "experience_history.jsonl"))
    assert list(steps) == [record["step"] for record in records if record["step"]] == [1, 2, 3, 4, 5, 6]
    for record in (record for record in records if record["step"]):
        kinds = Counter(event.kind for event in steps[record["step"]])
        reasons = Counter(event.reason for event in steps[record["step"]])
        assert kinds["tried"] == 4
        assert kinds["replayed"] == record["experience/replayed_questions"]
        assert kinds["stored"] == record["experience/stored_this_step"]
        assert kinds["retired"] == record["experience/retired_this_step"]
        assert reasons["max_answers_per_question"] == record["experience/evicted_of_question"]
        assert reasons["max_answers"] == record["experience/evicted_of_answers"]
        again = [event.count for event in steps[record["step"]] if event.reason == "duplicate"]
        assert sum(again) == record["experience/already_stored"]
    every = list(chain.from_iterable(steps.values()))
    kinds = Counter(event.kind for event in every)
    assert min(kinds["replayed"], kinds["stored"], kinds["evicted"], kinds["left_out"]) > 0
    assert kinds["stored"] - kinds["evicted"] == records[-1]["experience/stored_answers"]
    rates = [event.count / event.of for event in steps[6] if event.kind == "tried"]
    assert np.mean(rates) == pytest.approx(records[-1]["reward/pass_rate"])


def test_a_run_without_it_writes_none_and_one_begun_anew_keeps_the_older_one(tmp_path, run_steps):
    path = tmp_path / "run" / "experience_history.jsonl"
    run_steps(make_config(tmp_path, **QUICK), 2)
    first = path.read_bytes()
    run_steps(make_config(tmp_path, **QUICK), 1)
    assert path.with_suffix(".1.jsonl").read_bytes() == first
    assert list(dict(read_history(path))) == [1]
    path.unlink()
    off = {"log_dir": str(tmp_path / "run"), "tensorboard_enabled": False, "experience_history": False}
    seen = []
    run_steps(make_config(tmp_path, **QUICK, logger=off), 1, seen.append)
    assert seen == [1]
    assert not path.exists()
