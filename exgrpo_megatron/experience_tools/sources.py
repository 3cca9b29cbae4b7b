"""Where stored answers are that a path on the command line names: a run's, a checkpoint's, or exported ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exgrpo_megatron.checkpointing import STATE_FILE, CheckpointStore, read_state
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.experience.files import SUMMARY_FILE, Summary, read_summary
from exgrpo_megatron.experience.history import HISTORY_FILE
from exgrpo_megatron.experience.manifest import find_index_files
from exgrpo_megatron.experience.recovery import find_segments
from exgrpo_megatron.experience_tools.readers import AnswerReader, JsonlReader, LiveReader, ParquetReader, SegmentReader
from exgrpo_megatron.experience_tools.rows import is_jsonl
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.run_folder import METRICS_FILE, RECIPE_FILE, RunFolder

_FOLDER = "experience"
"""Of a checkpoint's stored answers, in it."""


@dataclass(frozen=True)
class Source:
    """Stored answers, and what is known around them."""

    path: Path
    """The folder or the file that has them."""
    run: Path | None = None
    """Folder of the run they are of."""
    checkpoint: Path | None = None

    @property
    def history(self) -> Path | None:
        """The run's history of questions, if it is there."""
        return self._of_run(HISTORY_FILE)

    @property
    def metrics(self) -> Path | None:
        return self._of_run(METRICS_FILE)

    @property
    def step(self) -> int | None:
        """Of the checkpoint."""
        return read_state(self.checkpoint)["step"] if self.checkpoint else None

    def config(self, recipe: Path | None = None) -> Config | None:
        """The recipe given, or that of the checkpoint or run, whose folder may have been moved; None: there is none."""
        own = [folder / RECIPE_FILE for folder in (self.checkpoint, self.run) if folder]
        for path in [recipe] if recipe else own:
            if path.is_file() or recipe:
                config = load_recipe(path)
                return _in_folder(config, self.run) if self.run and not recipe else config
        return None

    def summary(self) -> Summary | None:
        """The JSON beside the answers, if there is one; raises CheckpointError where it is damaged."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_summary(folder / SUMMARY_FILE) if (folder / SUMMARY_FILE).is_file() else None

    def reader(self) -> AnswerReader:
        """Reads the answers; raises CheckpointError, DataError where the files are none that can be read."""
        if find_index_files(self.path):
            return SegmentReader(self.path)
        if find_segments(self.path):
            return LiveReader(self.path)
        return JsonlReader(self.path) if is_jsonl(self.path) else ParquetReader(self.path)

    def _of_run(self, name: str) -> Path | None:
        path = self.run / name if self.run else None
        return path if path and path.is_file() else None


def find_source(path: Path, step: int | None = None) -> Source:
    """What `path` names: the folder of a run (its newest checkpoint, or that of `step`; before the first one what the
    run has stored so far), a checkpoint, a folder of stored answers, or a file of them.

    Raises:
        ConfigError, CheckpointError: there is no such path, checkpoint or stored answer.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; give a run, a checkpoint, or exported experience")
    if (path / STATE_FILE).is_file():
        return _of_checkpoint(path, step)
    if (path / RECIPE_FILE).is_file():
        return _of_run(path, step)
    if step is not None:
        raise ConfigError(
            f"--step {step}: {path} is no folder of a run (it has no {RECIPE_FILE}), but stands for itself"
        )
    if path.name == _FOLDER and (path.parent / STATE_FILE).is_file():
        return _of_checkpoint(path.parent, None)
    return Source(path)


def _of_checkpoint(path: Path, step: int | None) -> Source:
    if step is not None:
        raise ConfigError(f"--step {step}: {path} is a checkpoint already; give the folder of its run, or no step")
    run = path.absolute().parents[1]
    return Source(_its_experience(path), run if (run / RECIPE_FILE).is_file() else None, path)


def _of_run(run: Path, step: int | None) -> Source:
    config = _in_folder(load_recipe(run / RECIPE_FILE), run)
    folder = Path(config.checkpointing.checkpoint_dir or run / "checkpoints")
    store = CheckpointStore(folder, config.checkpointing, SingleProcess())
    found = store.latest() if step is None else store.at(step)
    if found is not None:
        return Source(_its_experience(found), run, found)
    there = ", ".join(path.name for path in store.whole()) or "none"
    if step is not None:
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; there are: {there}")
    live = RunFolder(config).experience
    if not find_segments(live):
        raise CheckpointError(f"{run}: no stored answers: it has no checkpoint in {folder}, and none are in {live}")
    return Source(live, run)


def _its_experience(checkpoint: Path) -> Path:
    path = checkpoint / _FOLDER
    if not path.is_dir():
        raise CheckpointError(f"{checkpoint}: a checkpoint without stored answers (it has no folder {_FOLDER})")
    return path


def _in_folder(config: Config, run: Path) -> Config:
    return config.model_copy(update={"logger": config.logger.model_copy(update={"log_dir": str(run)})})
