"""Checkpoints of a run: written aside and renamed when whole, the last n and the best kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import CheckpointConfig
from exgrpo_megatron.errors import CheckpointError

STATE_FILE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")


class CheckpointStore:
    """The folder of a run's checkpoints, `step_000020` and so on. Methods are collective over `comm`."""

    def __init__(self, folder: Path, config: CheckpointConfig, comm: Communicator) -> None:
        self.folder, self.config, self.comm = folder, config, comm

    def save(self, step: int, state: dict[str, Any], write_parts: Callable[[Path], None]) -> Path:
        """A checkpoint of `step`: `write_parts(folder)` on every rank, `state` as JSON by rank 0, then the rename.

        On any failure the folder is as it was before. `state["metrics"]` decides which checkpoint is the best.
        """
        final, aside = self.folder / f"step_{step:06d}", self.folder / f"step_{step:06d}.incomplete"
        if self.comm.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        self.comm.barrier()
        try:
            write_parts(aside)
            self.comm.barrier()
            if self.comm.rank == 0:
                _write_json(aside / STATE_FILE, state)
                _replace_folder(aside, final)
                self._prune()
        except BaseException:
            if self.comm.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        self.comm.barrier()
        return final

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The checkpoint best in `checkpointing.metric_name` (ties: the newest); None where none has the metric."""
        scored = [(value, path) for path in self._all() if (value := self._metric(path)) is not None]
        if not scored:
            return None
        sign = 1 if self.config.higher_is_better else -1
        return max(scored, key=lambda pair: (sign * pair[0], pair[1].name))[1]

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and (path / STATE_FILE).is_file()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def _metric(self, path: Path) -> float | None:
        value = read_state(path).get("metrics", {}).get(self.config.metric_name)
        return None if value is None else float(value)

    def _prune(self) -> None:
        keep = {*self._all()[-self.config.keep_last_n :], self.best()}
        for path in self._all():
            if path not in keep:
                shutil.rmtree(path)
        for path in self.folder.glob("*.incomplete"):
            shutil.rmtree(path, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint; raises CheckpointError."""
    try:
        return json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: not a checkpoint of a run (no {STATE_FILE} in it)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE}: damaged: {error}") from None


def _replace_folder(aside: Path, final: Path) -> None:
    """Rename, moving an older folder of the same name out of the way first."""
    old = final.with_suffix(".incomplete_old")
    if final.exists():
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
