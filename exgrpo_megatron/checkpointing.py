"""Checkpoints of a run: written aside and renamed when whole, the last n and the best kept."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import CheckpointConfig
from exgrpo_megatron.errors import CheckpointError, UserError
from exgrpo_megatron.files import replace_text

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
STATE_KEYS = frozenset({"step", "data_fingerprint", "recipe", "schedule", "alarm", "order", "skipped_updates"})
"""What the state of a run always holds."""
_NAME = re.compile(r"step_(\d{6,})")


class CheckpointStore:
    """The folder of a run's checkpoints, `step_000020` and so on. Methods are collective over `comm`."""

    def __init__(self, folder: Path, config: CheckpointConfig, comm: Communicator) -> None:
        self.folder, self.config, self.comm = folder, config, comm

    def save(self, step: int, state: dict[str, Any], write_parts: Callable[[Path], None]) -> Path:
        """A checkpoint of `step`: `write_parts(folder)` on every rank, `state` as JSON by rank 0, then the rename.

        On any failure the folder is as it was before. `state["metrics"]` decides which checkpoint is the best.

        Raises:
            CheckpointError: the disk is full, or something else cannot be written.
        """
        final, aside = self.folder / f"step_{step:06d}", self.folder / f"step_{step:06d}.incomplete"
        try:
            if self.comm.rank == 0:
                _make_empty(aside)
            self.comm.barrier()
            write_parts(aside)
            self.comm.barrier()
            if self.comm.rank == 0:
                replace_text(aside / STATE_FILE, json.dumps(state, indent=1))
                _replace_folder(aside, final)
                self._prune()
        except (OSError, UserError) as error:
            raise self._not_saved(step, error) from error
        finally:
            if self.comm.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
        self.comm.barrier()
        return final

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        before = self.latest()
        again = f"go on from {before.name}" if before else "begin again"
        return CheckpointError(
            f"step {step} could not be saved in {self.folder}: {error}. Nothing saved before was lost: make room or "
            f"mend what stands in the way, and run the same command to {again}"
        )

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def not_whole(self) -> list[Path]:
        """Folders with the name of a checkpoint that are none: nothing is resumed from them."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and not _is_whole(path))

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
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and _is_whole(path)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def _metric(self, path: Path) -> float | None:
        try:
            value = read_state(path).get("metrics", {}).get(self.config.metric_name)
        except CheckpointError as error:
            logger.warning("left out when the best checkpoint was looked for: %s", error)
            return None
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
    path = checkpoint / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{checkpoint}: neither a run's checkpoint (it has no {STATE_FILE}) nor a Hugging Face folder (no config)"
            f"{_what_is_inside(checkpoint)}"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {_damaged(checkpoint)} ({error})") from None
    missing = STATE_KEYS - state.keys() if isinstance(state, dict) else STATE_KEYS
    if missing:
        raise CheckpointError(f"{path}: {_damaged(checkpoint)} (it lacks {', '.join(sorted(missing))})")
    return state


def _is_whole(checkpoint: Path) -> bool:
    return (checkpoint / STATE_FILE).is_file()


def _damaged(checkpoint: Path) -> str:
    return f"damaged; move {checkpoint.name} away to go on from the checkpoint before it"


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _replace_folder(aside: Path, final: Path) -> None:
    """Rename, moving an older folder of the same name out of the way first."""
    old = final.with_suffix(".incomplete_old")
    if final.exists():
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _what_is_inside(folder: Path) -> str:
    """Where the folder is a whole run: the checkpoints and the export one may have meant."""
    found = [*sorted(folder.glob("checkpoints/step_*/" + STATE_FILE)), *folder.glob("hf/config.json")]
    return f"; it is a run's folder, which has {', '.join(str(path.parent) for path in found)}" if found else ""
