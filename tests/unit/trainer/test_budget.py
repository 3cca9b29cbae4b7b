"""What a run has spent, over its steps and across a resume."""

import logging

from scripted import build_trainer, half_right, plant, right

from exgrpo_megatron.budget import Budget


def test_what_was_spent_adds_up_and_goes_on_after_a_resume(tmp_path, data_parallel):
    def make():
        return build_trainer(tmp_path, half_right, comm=data_parallel)

    trainer = make()
    plant(trainer, "q1", [right("q1")])
    # Step 1: q1 is replayed, so 3 + 3 x 4 new answers; then two questions are, so 2 x 3 + 2 x 4.
    metrics = [trainer.step().metrics for _ in range(2)]
    assert [m["budget/answers"] for m in metrics] == [15, 29]
    assert [m["budget/stored_answers"] for m in metrics] == [1, 3]
    assert [m["budget/optimizer_steps"] for m in metrics] == [1, 2]
    assert metrics[1]["budget/tokens"] == sum(m["rollout/tokens"] for m in metrics)
    other = make()
    other.load_state_dict(trainer.state_dict())
    assert other.budget == trainer.budget


def test_a_checkpoint_without_a_budget_begins_anew_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert Budget.resumed(None) == Budget()
    assert "budget/... begins anew" in caplog.text
