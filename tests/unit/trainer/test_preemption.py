"""SIGTERM at any moment of a run: it saves, and the same command goes on as if nothing had happened."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
from scripted import make_config
from test_resume import untimed, weights

from exgrpo_megatron import run_inputs, supervised
from exgrpo_megatron.parts import SilentReporter
from exgrpo_megatron.places import Places
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.stop import StoppedAtOnceError, StopSignal

# (the step after which the run stops, where the signal comes); one run after the other.
MOMENTS = [
    (0, "loading the model"),
    (1, "step 1: rollout"),
    (1, "resuming from step_000001"),
    (2, "step 2: update"),
    (3, "evaluation (t1): rollout"),
    (4, "checkpoint of step 4: begin"),
    (5, "checkpoint of step 5: finish"),
]
STEPS = 7


@pytest.fixture
def sigterm_at(monkeypatch):
    """Sends this process SIGTERM as it enters the place of a name, once."""
    inside, due = Places.inside, []

    @contextmanager
    def watched(self, name):
        with inside(self, name):
            if name in due:
                due.remove(name)
                os.kill(os.getpid(), signal.SIGTERM)
            yield

    monkeypatch.setattr(Places, "inside", watched)
    return due


def test_a_run_that_is_stopped_at_every_moment_is_the_run_that_was_not(tmp_path, run_steps, stored_rows, sigterm_at):
    def config_in(folder):
        folder.mkdir()
        questions = {"path": str(folder / "questions.jsonl"), "id_key": "id"}
        return make_config(
            folder, 48, data={"validation": questions}, checkpointing={"export_hf": False, "save_period": 1},
            grpo={"val_period": 3, "max_num_steps": STEPS},
        )  # fmt: skip

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    straight, _ = run_steps(config_in(whole), STEPS)
    config = config_in(cut)
    for step, moment in MOMENTS:
        sigterm_at.append(moment)
        with StopSignal().installed() as stop:
            stopped, _ = run_steps(config, STEPS, stop=stop)
        assert sigterm_at == [], moment
        # One is finished as soon as it is written, or before the next begins.
        assert stopped.trainer.last_step in (step, step + moment.endswith("finish")), moment
        step = stopped.trainer.last_step
        saved = stopped.store.latest()
        assert (saved.name if saved else None) == (f"step_{step:06d}" if step else None)
    last, _ = run_steps(config, STEPS)

    metrics = untimed(whole / "run" / "metrics.jsonl")
    assert len(metrics) == STEPS + 1  # one more before the first step
    assert [record["step"] for record in metrics if "validation/pass_rate_t1" in record] == [0, 3, 6, 7]
    assert untimed(cut / "run" / "metrics.jsonl") == metrics
    expected = weights(straight)
    assert all(bool((tensor == expected[name]).all()) for name, tensor in weights(last).items())
    ours, theirs = (folder / "run" / "checkpoints" / f"step_{STEPS:06d}" for folder in (cut, whole))
    assert stored_rows(ours / "experience") == stored_rows(theirs / "experience")
    own = {"recipe": None, "data": None}
    left, right = (json.loads((folder / "state.json").read_text()) for folder in (ours, theirs))
    assert {**left, **own} == {**right, **own}


def test_sigterm_comes_more_than_once_for_one_request_and_ctrl_c_after_it_stops_at_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("exgrpo_megatron.stop.time.monotonic", lambda: now[0])
    with StopSignal().installed() as stop:
        for now[0] in (100.0, 100.5, 130.0):  # Slurm to every process, torchrun to its ranks, Slurm when grace is over
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(StoppedAtOnceError):
            os.kill(os.getpid(), signal.SIGINT)


def supervised_config(folder, **sft):
    return parse_recipe(
        {
            "data": {"train": {"generator": "chain_arithmetic"}, "max_input_seq_length": 32},
            "policy": {"model_name": "embedded:chain-qwen2", "max_total_sequence_length": 128},
            "sft": {
                "train_global_batch_size": 8,
                "max_num_steps": 6,
                "warm_start_dir": str(folder),
                "scheduler": {"lr_warmup_iters": 2},
                **sft,
            },
            "logger": {"log_dir": str(folder / "run"), "tensorboard_enabled": False},
        }
    )


class Notes(SilentReporter):
    def __init__(self):
        self.notes, self.skipped = [], 0

    def note(self, text):
        self.notes.append(text)

    def skip(self, steps):
        self.skipped += steps


def warm_started(config, comm):
    """The folder, or None; and what was said."""
    reporter, inputs = Notes(), run_inputs.load_inputs(config, comm)
    with StopSignal().installed() as stop:
        return supervised.warm_start(config, inputs, comm, reporter, stop), reporter


def test_a_stopped_warm_start_goes_on_and_ends_as_if_nothing_had_been(tmp_path, data_parallel, sigterm_at):
    config = supervised_config(tmp_path / "cut")
    sigterm_at.append("supervised step 4")
    made, reporter = warm_started(config, data_parallel)
    checkpoint = tmp_path / "cut" / "run" / "sft" / "checkpoints" / "step_000004"
    assert made is None
    assert reporter.notes[-1] == f"stopped after supervised step 4 of 6, saved in {checkpoint}"
    made, reporter = warm_started(config, data_parallel)
    assert f"going on from {checkpoint}: 4 of 6 steps are done" in reporter.notes
    assert reporter.skipped == 4
    assert not checkpoint.parent.exists()
    whole, _ = warm_started(supervised_config(tmp_path / "whole"), data_parallel)
    assert (made / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    ours, theirs = (untimed(tmp_path / name / "run" / "sft" / "metrics.jsonl") for name in ("cut", "whole"))
    assert len(ours) == 6
    assert ours == theirs


def test_a_warm_start_of_another_recipe_begins_anew(tmp_path, data_parallel, sigterm_at):
    sigterm_at.append("supervised step 2")
    warm_started(supervised_config(tmp_path), data_parallel)
    made, reporter = warm_started(supervised_config(tmp_path, seed=7), data_parallel)
    assert made is not None
    assert reporter.skipped == 0
    assert any("is of other supervised steps than the recipe's, which begin anew" in note for note in reporter.notes)
