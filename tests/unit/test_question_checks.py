"""What a run says of its held-out questions before it begins."""

import json

import pytest

from exgrpo_megatron import run_inputs
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.question_checks import check_best_checkpoint
from exgrpo_megatron.recipe import parse_recipe


@pytest.fixture
def lines(tmp_path):
    """Lines for a recipe with six training and two held-out questions, all of the category `sums`."""
    for name, first, count in (("train", 1, 6), ("held_out", 8, 2)):
        rows = [{"question": f"{n}+1", "answer": n + 1, "kind": "sums"} for n in range(first, first + count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def describe(validation=True, grpo=None, **sections):
        held_out = {"path": str(tmp_path / "held_out.jsonl"), "category_key": "kind"}
        raw = {
            "data": {
                "train": {"path": str(tmp_path / "train.jsonl")},
                "validation": held_out if validation else None,
                "max_input_seq_length": 16,
            },
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, **(grpo or {})},
            "policy": {
                "model_name": "embedded:chain-qwen2",
                "train_global_batch_size": 4,
                "max_total_sequence_length": 112,
            },
            "logger": {"log_dir": str(tmp_path / "run")},
            **sections,
        }
        config = parse_recipe(raw)
        return list(check_best_checkpoint(config, run_inputs.load_inputs(config, SingleProcess())))

    return describe


def test_nothing_is_said_where_every_checkpoint_is_evaluated_or_none_can_be(lines):
    assert lines(grpo={"val_period": 10}, checkpointing={"save_period": 20}) == []
    assert lines(grpo={"val_period": 10}, checkpointing={"save_period": 15, "enabled": False}) == []
    assert lines(validation=False, grpo={"val_period": 10}, checkpointing={"save_period": 15}) == []


def test_checkpoints_that_cannot_be_the_best_are_told(lines):
    """Of steps 15, 30, 45 and 10, 20, 30 the first in both is 30."""
    (line,) = lines(grpo={"val_period": 10}, checkpointing={"save_period": 15})
    assert "grpo.val_period = 10 and checkpointing.save_period = 15, so that every 30 steps, and at the end," in line
    (line,) = lines(grpo={"val_period": 0}, checkpointing={"save_period": 15})
    assert "at the end alone there is one that can be the best in validation/pass_rate_greedy" in line


def test_the_same_is_told_of_sets_in_training(lines, tmp_path):
    sets = {"sums": {"path": str(tmp_path / "held_out.jsonl"), "in_training": True, "group": "ID"}}
    told = {"grpo": {"val_period": 10}, "eval": {"sets": sets}}
    (line,) = lines(
        validation=False, checkpointing={"save_period": 15, "metric_name": "validation/macro_avg/ID"}, **told
    )
    assert "that can be the best in validation/macro_avg/ID" in line


def test_a_metric_of_a_category_that_no_question_has_is_refused(lines):
    assert lines(checkpointing={"metric_name": "validation/pass_rate_t1/sums"}) == []
    with pytest.raises(ConfigError, match="no held-out question has the category 'sum'; there are 'sums'"):
        lines(checkpointing={"metric_name": "validation/pass_rate_t1/sum"})
