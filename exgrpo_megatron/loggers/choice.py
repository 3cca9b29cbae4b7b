"""The loggers of a recipe: whether their packages are there, and their runs begun or gone on with."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator

from exgrpo_megatron.addresses import secrets_in, without_credentials
from exgrpo_megatron.config import LoggerConfig
from exgrpo_megatron.errors import ConfigError, UserError
from exgrpo_megatron.loggers import mlflow_store
from exgrpo_megatron.loggers.guarded import GuardedLogger, Memory, in_a_line
from exgrpo_megatron.loggers.protocol import LoggerError, RunFacts, RunLogger

FOLDER = "loggers"
"""Of a run: a file for each tool, with what it calls the run."""

_ADDRESSES = ("MLFLOW_TRACKING_URI", "WANDB_BASE_URL")
_KEYS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY")
"""Of the environment."""

logger = logging.getLogger(__name__)


def check_loggers(config: LoggerConfig) -> None:
    """Raise ConfigError where a logger's package is missing, or what it needs to keep anything."""
    for title, name in _wanted(config):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logger.{name}_enabled = true, but {title} is not installed: pip install 'exgrpo-megatron[{name}]', "
                f"or set logger.{name}_enabled=false"
            )
    if config.wandb_enabled:
        from exgrpo_megatron.loggers.wandb_logger import check  # noqa: PLC0415

        check(config.wandb)
    if config.mlflow_enabled:
        mlflow_store.check(config)


def open_loggers(facts: RunFacts, last_step: int) -> list[GuardedLogger]:
    """Those of the recipe, for a run that begins (`last_step` 0) or goes on after `last_step`.

    A new run must find its loggers; of one that goes on, the loggers that cannot be reached are left out, with a
    warning.

    Raises:
        UserError: a logger of a new run cannot begin.
    """
    found: list[GuardedLogger] = []
    secrets = _secrets(facts.logger)
    for title, name in _wanted(facts.logger):
        memory = Memory(facts.folder / FOLDER / f"{name}.json")
        if last_step > 0:
            memory.recall()
        try:
            run = _factory(name)(facts, memory.run_id)
        except Exception as error:  # noqa: BLE001  # errors of tools of others have no base of their own
            own = isinstance(error, LoggerError)
            reason = without_credentials(str(error), secrets) if own else in_a_line(error, secrets)
            if last_step == 0:
                for log in found:
                    log.close(failed=True)
                raise UserError(
                    f"logger.{name}_enabled = true, but {title} cannot begin a run: {reason}; mend it, or set "
                    f"logger.{name}_enabled=false"
                ) from None  # the error itself may have credentials
            logger.warning("%s gets nothing of this part of the run: %s", title, reason)
            continue
        found.append(GuardedLogger(title, run, memory, secrets))
    return found


def _wanted(config: LoggerConfig) -> Iterator[tuple[str, str]]:
    """Title, and the name of module, section and extra alike."""
    if config.wandb_enabled:
        yield "Weights & Biases", "wandb"
    if config.mlflow_enabled:
        yield "MLflow", "mlflow"


def _secrets(config: LoggerConfig) -> list[str]:
    """What no message may have, of the recipe's addresses and of those that the tools take from the environment."""
    addresses = [config.mlflow.tracking_uri or "", *(os.environ.get(name, "") for name in _ADDRESSES)]
    plain = [value for name in _KEYS if (value := os.environ.get(name))]
    return plain + [secret for address in addresses for secret in secrets_in(address)]


def _factory(name: str) -> Callable[[RunFacts, str | None], RunLogger]:
    if name == "wandb":
        from exgrpo_megatron.loggers.wandb_logger import WandbLogger  # noqa: PLC0415

        return WandbLogger
    from exgrpo_megatron.loggers.mlflow_logger import MlflowLogger  # noqa: PLC0415

    return MlflowLogger
