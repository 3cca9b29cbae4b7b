"""The folder of a run (`logger.log_dir`): its lock, recipe, metrics, and what it exported."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from exgrpo_megatron.checkpointing import CheckpointStore
from exgrpo_megatron.comm import Communicator, together
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.experience.history import HISTORY_FILE, HistoryWriter
from exgrpo_megatron.files import replace_text, writable_folder
from exgrpo_megatron.loggers.choice import open_loggers
from exgrpo_megatron.loggers.protocol import RunFacts
from exgrpo_megatron.metric_sinks import JsonlSink, MetricSink, MetricsLogger, TensorBoardSink, read_metrics
from exgrpo_megatron.recipe import dump_recipe, to_show
from exgrpo_megatron.versions import git_revision, versions

RECIPE_FILE = "recipe.yaml"
NEMO_RL_FILE = "nemo_rl.txt"
"""What became of the keys of a configuration of NeMo-RL, where the recipe was one."""
METRICS_FILE = "metrics.jsonl"
EXPORT_FOLDER = "hf"
_EXPORT_FILE = "export.json"


class RunFolder:
    """Where the files of a recipe's run lie. Only the main process may write."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path = Path(config.logger.log_dir)

    @property
    def export(self) -> Path:
        """The Hugging Face folder of the finished run."""
        return self.path / EXPORT_FOLDER

    @property
    def experience(self) -> Path:
        """Where the stored answers of the run lie while it runs; checkpoints have their own."""
        return Path(self.config.experience.store_dir or self.path / "experience")

    def begin(self, last_step: int) -> Path | None:
        """Make the folder that of this recipe, which goes on after `last_step`.

        A run that begins anew would truncate metrics of one before it: they are moved to `metrics.1.jsonl` and so on,
        and the new path is returned. Its history of questions goes along.
        """
        replace_text(self.path / RECIPE_FILE, dump_recipe(self.config))
        metrics = self.path / METRICS_FILE
        if last_step > 0 or not metrics.is_file() or not any(record["step"] > 0 for record in read_metrics(metrics)):
            return None
        number = next(n for n in count(1) if not metrics.with_suffix(f".{n}.jsonl").exists())
        history = self.path / HISTORY_FILE
        if history.is_file():
            history.rename(history.with_suffix(f".{number}.jsonl"))
        return metrics.rename(metrics.with_suffix(f".{number}.jsonl"))

    def exported_step(self) -> int | None:
        """The step whose weights `export` holds, as far as is known."""
        try:
            step = json.loads((self.path / _EXPORT_FILE).read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if (self.export / "config.json").is_file() else None

    def set_exported_step(self, step: int | None) -> None:
        """Note what `export` holds; None while that is not certain."""
        if step is None:
            (self.path / _EXPORT_FILE).unlink(missing_ok=True)
        else:
            replace_text(self.path / _EXPORT_FILE, json.dumps({"step": step}) + "\n")


def checkpoint_store(config: Config, comm: Communicator) -> CheckpointStore:
    """The checkpoints of the recipe's run."""
    folder = Path(config.checkpointing.checkpoint_dir or Path(config.logger.log_dir) / "checkpoints")
    return CheckpointStore(folder, config.checkpointing, comm)


@contextmanager
def locked_folder(config: Config, comm: Communicator) -> Iterator[RunFolder]:
    """The run's folder, that of its checkpoints and that of its stored answers, made, and locked against a second run.
    Collective; raises ConfigError on every process."""
    folders = {"logger.log_dir": Path(config.logger.log_dir)}
    if config.checkpointing.checkpoint_dir:
        folders["checkpointing.checkpoint_dir"] = Path(config.checkpointing.checkpoint_dir)
        _check_apart(*folders.values())
    if config.experience.enabled and config.experience.store_dir:
        folders["experience.store_dir"] = Path(config.experience.store_dir)
    held: set[Path] = set()
    with ExitStack() as stack:
        # Nobody may go on where the lock is another run's: each process deletes what it takes for left over.
        with comm.places.inside("locking the run's folder"), together(comm):
            for key, path in folders.items():
                writable_folder(path, key)
                if comm.is_main and path.resolve() not in held:
                    stack.enter_context(locked(path, key))
                    held.add(path.resolve())
        yield RunFolder(config)


@contextmanager
def open_metrics(
    config: Config, comm: Communicator, last_step: int, folder: Path | None = None
) -> Iterator[MetricsLogger]:
    """The metrics files in `folder` (the run's) and the tools of others on rank 0, without lines after `last_step`;
    nothing on the others. Collective; raises UserError on every process where one of them cannot be opened."""
    with together(comm):
        logger = _opened(config, comm, last_step, folder) if comm.is_main else MetricsLogger([])
    failed = True
    try:
        yield logger
        failed = False
    finally:
        logger.close(failed=failed)


def _opened(config: Config, comm: Communicator, last_step: int, folder: Path | None) -> MetricsLogger:
    run = Path(config.logger.log_dir)
    at = folder or run
    sinks: list[MetricSink] = [JsonlSink(at / METRICS_FILE)]
    if config.logger.tensorboard_enabled:
        sinks.append(TensorBoardSink(at / "tensorboard"))
    for sink in sinks:
        sink.truncate_after(last_step)
    facts = RunFacts(
        logger=config.logger,
        folder=at,
        name=run.resolve().name,
        suffix="" if folder is None else f"-{at.name}",
        recipe=to_show(config).model_dump(mode="json"),
        made_with=_made_with(comm),
        files=tuple(path for path in (at / RECIPE_FILE,) if path.is_file()),
    )
    return MetricsLogger(sinks, open_loggers(facts, last_step))


def _made_with(comm: Communicator) -> dict[str, str]:
    revision = git_revision(Path(__file__).parent)
    found = {"git_revision": revision} if revision else {}
    return {**versions(), **found, "processes": str(comm.world_size)}


def open_history(config: Config, comm: Communicator, last_step: int) -> HistoryWriter | None:
    """The run's history of questions on rank 0, without lines after `last_step`; None on the others, and where
    `logger.experience_history` is false."""
    if not comm.is_main:
        return None
    history = HistoryWriter(Path(config.logger.log_dir) / HISTORY_FILE)
    history.truncate_after(last_step)
    return history if config.logger.experience_history else None


def _check_apart(log_dir: Path, checkpoint_dir: Path) -> None:
    if checkpoint_dir.resolve() in [log_dir.resolve(), *log_dir.resolve().parents]:
        raise ConfigError(
            f"logger.log_dir = {str(log_dir)!r} lies in checkpointing.checkpoint_dir = {str(checkpoint_dir)!r}, where "
            f"old checkpoints are deleted; choose another of the two"
        )


@contextmanager
def locked(path: Path, key: str) -> Iterator[None]:
    """A folder locked against a second process; raises ConfigError naming `key` where it is locked already."""
    with (path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{key} = {str(path)!r}: another run is writing there; wait for it, stop it, or choose another {key}"
            ) from None
        yield
