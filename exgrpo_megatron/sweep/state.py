"""What a sweep knows of its runs from one call of the command to the next: `<out>/sweep.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import yaml

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.recipe import changed_keys
from exgrpo_megatron.run_folder import METRICS_FILE, RECIPE_FILE
from exgrpo_megatron.sweep.arms import Run

STATE_FILE = "sweep.json"
RunStatus = Literal["waiting", "running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunState:
    """Of one run; `running` in a file that nobody writes any more means that the sweep was killed."""

    status: RunStatus = "waiting"
    exit_code: int | None = None
    seconds: float = 0.0
    """Of its last process."""
    message: str = ""
    """Of a failed one."""


class SweepState:
    """The state of every run, written at each change."""

    def __init__(self, out: Path, runs: Sequence[Run]) -> None:
        """Raises ConfigError where the file cannot be read, or a run that has begun there was of another recipe."""
        self._path = out / STATE_FILE
        self._out = out
        known = self._read()
        self._states = {self._key(run): known.get(self._key(run), RunState()) for run in runs}
        self._others = {key: state for key, state in known.items() if key not in self._states}
        for run in runs:
            _check_recipe(run)

    def __getitem__(self, run: Run) -> RunState:
        return self._states[self._key(run)]

    def set(self, run: Run, state: RunState) -> None:
        """Raises UserError where it cannot be written."""
        self._states[self._key(run)] = state
        content = {key: asdict(value) for key, value in {**self._others, **self._states}.items()}
        replace_text(self._path, json.dumps({"runs": content}, indent=1) + "\n")

    def _key(self, run: Run) -> str:
        return str(run.folder.relative_to(self._out))

    def _read(self) -> dict[str, RunState]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return {key: RunState(**values) for key, values in content["runs"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self._path}: cannot be read ({error}); choose another --out, or delete it") from error


def is_whole(run: Run) -> bool:
    """Whether the run has done its last step."""
    metrics = run.folder / METRICS_FILE
    steps = [record["step"] for record in read_metrics(metrics)] if metrics.is_file() else []
    return max(steps, default=0) >= run.config.grpo.max_num_steps


def _check_recipe(run: Run) -> None:
    """What lies there must have been begun with this very recipe, or the table would compare something else."""
    path = run.folder / RECIPE_FILE
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); choose another --out, or delete {run.folder}") from error
    lines = changed_keys(before if isinstance(before, dict) else {}, run.config.model_dump(mode="json"))
    # The same folder may be named from another place.
    changed = [line for line in lines if not line.startswith("logger.log_dir:")]
    if changed:
        raise ConfigError(
            f"{run.folder} was begun with another recipe ({'; '.join(changed[:5])}): choose another --out, or delete "
            f"that folder"
        )
