"""What another tool is told of a run, and what it must be able to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from exgrpo_megatron.config import LoggerConfig
from exgrpo_megatron.metric_sinks import AnswerRow


class LoggerError(Exception):
    """A tool could not begin or find its run."""


class Ended(Enum):
    """How a run ended."""

    finished = "its last step is done"
    stopped = "a signal stopped it, and it may go on"
    failed = "an error ended it"


@dataclass(frozen=True)
class RunFacts:
    """What is known before the first step."""

    logger: LoggerConfig
    folder: Path
    """Of the run, or of its supervised fine-tuning."""
    name: str
    """Of the run, where the recipe gives none."""
    suffix: str
    """Behind either name, where it is another run of the same folder."""
    recipe: Mapping[str, Any]
    """Resolved; JSON-able."""
    made_with: Mapping[str, str]
    """Versions, and the revision of the checkout."""
    files: tuple[Path, ...] = ()
    """To be kept from the start."""


class RunLogger(Protocol):
    """One run in another tool. Whatever it raises ends nothing, see `guarded`."""

    run_id: str
    """By which a resumed run finds it again."""
    where: str
    """To be shown: an address or a folder."""
    look: str
    """The same for the end of a run, with the command that shows or sends it."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of a step, under their names; each step comes once, in rising order."""

    def answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        """Keep answers of a step; comes before its metrics."""

    def finish(self, summary: Mapping[str, float | str], files: Sequence[Path]) -> None:
        """Keep what came of the run."""

    def close(self, ended: Ended) -> None:
        """The last call."""
