"""Small whole runs whose answers follow a script, through the session that `exgrpo train` uses."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from other_tools import ROOT

sys.path.insert(0, str(ROOT / "tests" / "unit" / "trainer"))

from scripted import ScriptedEngine, half_right, make_config

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.parts import SilentReporter
from exgrpo_megatron.session import RunOutcome, StopSignal, TrainingRun

STEPS = 5


class StopAfter(SilentReporter):
    """Asks for a stop, as SIGTERM does, once `steps` steps are done; keeps what is noted."""

    def __init__(self, stop: StopSignal, steps: int) -> None:
        self.stop, self.left, self.notes = stop, steps, []

    def step_line(self, metrics):
        self.left -= 1
        self.stop.requested = self.left == 0

    def note(self, text):
        self.notes.append(text)


def config_of(folder: Path, *, held_out: bool = False, **logger):
    """Five steps with a checkpoint every second one; no worker processes."""
    validation = {"path": str(folder / "questions.jsonl"), "id_key": "id", "max_questions": 2} if held_out else None
    return make_config(
        folder,
        grpo={"max_num_steps": STEPS, "val_at_start": held_out},
        env={"math": {"exact_text": True}},
        data={"validation": validation},
        checkpointing={"save_period": 2, "async_save": False, "export_hf": held_out},
        logger={"log_dir": str(folder / "run"), **logger},
    )


@dataclass
class Part:
    """What one process did."""

    notes: list[str]
    training: TrainingRun
    outcome: RunOutcome


def run_part(config, comm, monkeypatch, steps: int = STEPS) -> Part:
    """Train for some steps, resuming where there is a checkpoint."""
    inputs = run_inputs.load_inputs(config, comm)
    monkeypatch.setattr(
        build, "build_engine", lambda *_: ScriptedEngine(inputs.tokenizer, inputs.train.questions, half_right)
    )
    stop = StopSignal()
    reporter = StopAfter(stop, steps)
    training = TrainingRun(config, inputs, inputs.model_dir, comm, reporter)
    return Part(reporter.notes, training, training.run(stop))
