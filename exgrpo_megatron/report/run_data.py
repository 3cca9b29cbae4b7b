"""What the reports read of a run's folder: its recipe and its metrics, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import ValidationError

from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.metric_sinks import read_metrics

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was written, each of shape [points]. A value that was null is NaN."""

    steps: FloatArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it, finished or not."""

    name: str
    config: Config
    records: list[dict[str, float]]
    """One dict a step, by step (`metrics.read_metrics`)."""

    def series(self, name: str) -> Series:
        """The metric `name`; empty where it was never written."""
        points = [(record["step"], record[name]) for record in self.records if name in record]
        table = np.array(points, dtype=np.float64).reshape(-1, 2)
        return Series(table[:, 0], table[:, 1])

    def table(self, names: list[str]) -> tuple[FloatArray, FloatArray]:
        """Training steps [steps] and the metrics `names` at them [names, steps]; 0 where one was not written."""
        steps = self.training_steps
        rows = {record["step"]: record for record in self.records}
        columns = [[rows[step].get(name, 0.0) for step in steps] for name in names]
        return steps, np.nan_to_num(np.array(columns, dtype=np.float64).reshape(len(names), len(steps)))

    @property
    def training_steps(self) -> FloatArray:
        """Steps with a batch (an evaluation before the first step is none), of shape [steps]."""
        return self.series("reward/pass_rate").steps

    @property
    def replay_start(self) -> float | None:
        """First step of the mixed phase; None where replay has not started."""
        on = self.series("experience/replay_on")
        return float(on.steps[on.values > 0][0]) if (on.values > 0).any() else None


def load_run(run_dir: Path) -> RunData:
    """Read `<run>/recipe.yaml` and `<run>/metrics.jsonl`; UserError where the folder holds no ExGRPO step yet."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{metrics} does not exist, so there is nothing to draw; {_how_to_make(run_dir)}")
    run = RunData(run_dir.resolve().name, _load_config(run_dir), read_metrics(metrics))
    if not len(run.training_steps) and not len(run.series("validation/pass_rate_t1")):
        raise UserError(
            f"{metrics} holds no training step and no evaluation yet; wait for one, or {_how_to_make(run_dir)}"
        )
    return run


def _load_config(run_dir: Path) -> Config:
    path = run_dir / "recipe.yaml"
    if not path.is_file():
        raise UserError(f"{path} does not exist, so {run_dir} is no folder of a run; {_how_to_make(run_dir)}")
    try:
        return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not a recipe of this version of exgrpo-megatron: {error}") from error


def _how_to_make(run_dir: Path) -> str:
    return f"run `exgrpo train RECIPE logger.log_dir={run_dir}` first, or name another run's folder"
