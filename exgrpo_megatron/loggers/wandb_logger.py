"""A run in Weights & Biases. The only module that imports wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path

import wandb

from exgrpo_megatron.addresses import without_credentials
from exgrpo_megatron.config import WandbConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.loggers.protocol import Ended, RunFacts
from exgrpo_megatron.metric_sinks import AnswerRow

_EXIT_CODES = {Ended.finished: 0, Ended.stopped: 0, Ended.failed: 1}


class WandbLogger:
    """One run of W&B; metrics have the trainer's step as W&B's own."""

    def __init__(self, facts: RunFacts, run_id: str | None) -> None:
        """Begin a run, or go on with that of `run_id`; raises anything of W&B's where it cannot."""
        chosen = facts.logger.wandb
        # For the whole process too: else what wandb says of its own use is sent, though the run is offline.
        given = {"mode": chosen.mode} if chosen.mode else {}
        wandb.setup(wandb.Settings(silent=True, **given))
        self._run = wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            name=(chosen.name or facts.name) + facts.suffix,
            id=run_id,
            resume="allow" if run_id else None,
            mode=chosen.mode,
            dir=str(facts.folder),
            config={**facts.recipe, "made_with": dict(facts.made_with)},
            reinit="create_new",
            # The terminal is the run's own: no copies of its lines, and no lines of wandb's.
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run_id = str(self._run.id)
        self.where = str(Path(self._run.dir).parent if self._run.offline else without_credentials(str(self._run.url)))
        # A run that was resumed has several folders, of one id.
        parts = facts.folder / "wandb" / f"offline-run-*-{self.run_id}"
        self.look = f"{self.where}; to send it: wandb sync {parts}" if self._run.offline else self.where
        self._save(facts.files)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        table = wandb.Table(
            columns=[field.name for field in fields(AnswerRow)], data=[list(astuple(row)) for row in rows]
        )
        self._run.log({"answers": table}, step=step, commit=False)

    def finish(self, summary: Mapping[str, float | str], files: Sequence[Path]) -> None:
        self._run.summary.update(dict(summary))
        self._save(files)

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=_EXIT_CODES[ended])

    def _save(self, files: Sequence[Path]) -> None:
        for path in files:
            self._run.save(str(path), base_path=str(path.parent), policy="now")


def check(config: WandbConfig) -> None:
    """Raise ConfigError where a run could not be sent to W&B for want of a key; nothing is sent."""
    mode = config.mode or os.environ.get("WANDB_MODE", "online")
    try:
        missing = mode == "online" and not wandb.login(prompt=False, verify=False)
    except Exception as error:  # noqa: BLE001  # a key of a wrong form, another setting that W&B does not take
        words = without_credentials(" ".join(str(error).split()))
        raise ConfigError(
            f"logger.wandb_enabled = true, but W&B refuses its settings: {words}; mend them, or set "
            "logger.wandb_enabled=false"
        ) from None
    if missing:
        raise ConfigError(
            "logger.wandb_enabled = true, but W&B has no API key: set WANDB_API_KEY or run `wandb login`; or set "
            "logger.wandb.mode=offline, and send the run later with `wandb sync`"
        )
