"""The loggers of a recipe: whether their packages are there, and their runs begun or gone on with."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator

from exgrpo_megatron.config import LoggerConfig
from exgrpo_megatron.errors import ConfigError, UserError
from exgrpo_megatron.loggers.guarded import GuardedLogger, Memory
from exgrpo_megatron.loggers.protocol import LoggerError, RunFacts, RunLogger

FOLDER = "loggers"
"""Of a run: a file for each tool, with what it calls the run."""

logger = logging.getLogger(__name__)


def check_loggers(config: LoggerConfig) -> None:
    """Raise ConfigError where a logger's package is missing, or what it needs to send anything."""
    for title, name in _wanted(config):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logger.{name}_enabled = true, but {title} is not installed: pip install 'exgrpo-megatron[{name}]', "
                f"or set logger.{name}_enabled=false"
            )
    if config.wandb_enabled:
        from exgrpo_megatron.loggers.wandb_logger import check  # noqa: PLC0415

        check(config.wandb)


def open_loggers(facts: RunFacts, last_step: int) -> list[GuardedLogger]:
    """Those of the recipe, for a run that begins (`last_step` 0) or goes on after `last_step`.

    A new run must find its loggers; of one that goes on, the loggers that cannot be reached are left out, with a
    warning.

    Raises:
        UserError: a logger of a new run cannot begin.
    """
    found = []
    for title, name in _wanted(facts.logger):
        memory = Memory(facts.folder / FOLDER / f"{name}.json")
        if last_step > 0:
            memory.recall()
        try:
            run = _factory(name)(facts, memory.run_id)
        except LoggerError as error:
            if last_step == 0:
                raise UserError(
                    f"logger.{name}_enabled = true, but {title} cannot begin a run: {error}; mend it, or set "
                    f"logger.{name}_enabled=false"
                ) from error
            logger.warning("%s gets nothing of this part of the run: %s", title, error)
            continue
        found.append(GuardedLogger(title, run, memory))
    return found


def _wanted(config: LoggerConfig) -> Iterator[tuple[str, str]]:
    """Title, and the name of module, section and extra alike."""
    if config.wandb_enabled:
        yield "Weights & Biases", "wandb"
    if config.mlflow_enabled:
        yield "MLflow", "mlflow"


def _factory(name: str) -> Callable[[RunFacts, str | None], RunLogger]:
    if name == "wandb":
        from exgrpo_megatron.loggers.wandb_logger import WandbLogger  # noqa: PLC0415

        return WandbLogger
    from exgrpo_megatron.loggers.mlflow_logger import MlflowLogger  # noqa: PLC0415

    return MlflowLogger
