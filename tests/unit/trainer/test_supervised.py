"""Supervised steps through the actor."""

import numpy as np
import pytest

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.recipe import parse_recipe


def trainer_of(tmp_path, comm, **policy):
    config = parse_recipe(
        {
            "data": {"train": {"generator": "chain_arithmetic"}, "max_input_seq_length": 32},
            "policy": {"model_name": "embedded:chain-qwen2", "max_total_sequence_length": 128, **policy},
            "sft": {"train_global_batch_size": 8, "max_num_steps": 60},
            "logger": {"log_dir": str(tmp_path / "run")},
        }
    )
    return build.build_sft(config, run_inputs.load_inputs(config, comm), comm)


def test_the_loss_is_the_mean_over_response_tokens(tmp_path, data_parallel):
    trainer, actor = trainer_of(tmp_path, data_parallel)
    scored = actor.score(trainer.batches.batch(0), 1.0)
    metrics = trainer.step()
    assert metrics["sft/loss"] == pytest.approx(-np.concatenate([score.logprobs for score in scored]).mean(), rel=1e-5)
    assert metrics["sft/skipped_updates"] == 0


def test_a_skipped_step_is_counted(tmp_path, data_parallel):
    trainer, actor = trainer_of(tmp_path, data_parallel, skip_grad_norm_above=1e-6)
    assert trainer.step()["sft/skipped_updates"] == 1
    assert actor.version == 0
