"""A whole run with vLLM rollouts: two steps, and the same two with a stop and a resume between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from vllm_models import TOLERANCE, needs_vllm

from exgrpo_megatron import run_inputs, session
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.parts import SilentReporter
from exgrpo_megatron.recipe import parse_recipe

pytestmark = needs_vllm


class StopAfterOneStep(SilentReporter):
    """Asks for a stop, as SIGTERM does."""

    def __init__(self, stop):
        self.stop = stop

    def step_line(self, metrics):
        self.stop.requested = True


def recipe(folder, model, **agreement):
    return parse_recipe(
        {
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "seed": 5, "max_num_steps": 2},
            "data": {
                "train": {"generator": "chain_arithmetic", "generator_size": 32},
                "validation": {"generator": "chain_arithmetic", "generator_size": 10},
                "max_input_seq_length": 32,
            },
            "experience": {"start_pass_rate": None},
            "policy": {
                "model_name": str(model),
                "train_global_batch_size": 16,
                "max_total_sequence_length": 96,
                "generation": {
                    "backend": "vllm",
                    "max_new_tokens": 48,
                    "vllm_cfg": {"agreement": {"period": 1, "max_abs_difference": TOLERANCE, **agreement}},
                },
                "megatron_cfg": {"optimizer": {"lr": 1e-4}},
            },
            "env": {"math": {"num_workers": 1}},
            "checkpointing": {"save_period": 1, "export_hf": False},
            "logger": {"log_dir": str(folder), "tensorboard_enabled": False},
        }
    )


def train(config, comm, stop_after_one=False):
    Path(config.logger.log_dir).mkdir(parents=True, exist_ok=True)
    stop = session.StopSignal()
    reporter = StopAfterOneStep(stop) if stop_after_one else SilentReporter()
    inputs = run_inputs.load_inputs(config, comm)
    return session.TrainingRun(config, inputs, inputs.model_dir, comm, reporter).run(stop)


def metrics_of(folder):
    """Step -> metrics, without those of time and memory."""
    rows = read_metrics(folder / "metrics.jsonl")
    timed = ("time/", "run/", "rollout/tokens_per_s")
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(timed)} for row in rows}


def test_a_resumed_run_samples_and_trains_as_one_that_was_never_stopped(tmp_path, half_trained_model, data_parallel):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(recipe(whole, half_trained_model), data_parallel).finished
    assert train(recipe(stopped, half_trained_model), data_parallel, stop_after_one=True).last_step == 1
    assert train(recipe(stopped, half_trained_model), data_parallel).first_step == 1
    expected, found = metrics_of(whole), metrics_of(stopped)
    assert expected.keys() == found.keys() == {0, 1, 2}
    for step, row in expected.items():
        assert row["agreement/max_abs_difference"] < TOLERANCE
        assert row["agreement/beyond_limits"] == 0
        for name, value in row.items():
            np.testing.assert_allclose(found[step][name], value, rtol=1e-4, atol=1e-5, err_msg=f"{step} {name}")


def test_beyond_the_limits_a_run_does_not_start_and_says_by_how_much(tmp_path, half_trained_model, data_parallel):
    # Rounding alone is more than this.
    config = recipe(tmp_path / "run", half_trained_model, max_abs_difference=1e-12)
    with pytest.raises(UserError, match=r"largest difference .* \(max_abs_difference = 1e-12\)"):
        train(config, data_parallel)
