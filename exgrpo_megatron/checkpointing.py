"""Checkpoints of a run: written aside and renamed when whole, the last n and the best kept."""

from __future__ import annotations

import hashlib
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
DIGESTS_FILE = "files.json"
"""SHA-256 of every other file of a checkpoint: a reader of tensors would take changed bytes for weights."""
STATE_KEYS = frozenset(
    {"step", "data_fingerprint", "recipe", "schedule", "alarm", "order", "skipped_updates", "metrics"}
)
"""What the state of a run always holds."""
_NAME = re.compile(r"step_(\d{6,})")
_LEFT_OVER = re.compile(r"step_\d{6,}\.incomplete(_old)?")


class CheckpointStore:
    """The folder of a run's checkpoints, `step_000020` and so on. Methods are collective over all processes."""

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
            if self.comm.is_main:
                _make_empty(aside)
            self.comm.barrier()
            write_parts(aside)
            if self.comm.is_main:
                replace_text(aside / STATE_FILE, json.dumps(state, indent=1))
            self.comm.barrier()
            digests = self._digests(aside)
            if self.comm.is_main:
                replace_text(aside / DIGESTS_FILE, json.dumps(digests, indent=1))
                _replace_folder(aside, final)
        except (OSError, UserError) as error:
            raise self._not_saved(step, error) from error
        finally:
            if self.comm.is_main:
                shutil.rmtree(aside, ignore_errors=True)
        if self.comm.is_main:
            self._prune()
        self.comm.barrier()
        return final

    def verify(self, checkpoint: Path) -> None:
        """Raise CheckpointError, on every rank, where a file of the checkpoint is missing or not as it was saved."""
        path = checkpoint / DIGESTS_FILE
        try:
            saved = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: {_damaged(checkpoint)} ({error})") from None
        found = self._digests(checkpoint)
        changed = sorted(name for name, digest in saved.items() if found.get(name) != digest)
        if changed:
            what = "is not as it was saved" if (checkpoint / changed[0]).is_file() else "is missing"
            raise CheckpointError(f"{checkpoint / changed[0]} {what}: {_damaged(checkpoint)}")

    def _digests(self, folder: Path) -> dict[str, str]:
        """SHA-256 by file, the same on every rank; each rank reads its share."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS_FILE)
        mine = {str(path.relative_to(folder)): _digest(path) for path in files[self.comm.rank :: self.comm.size]}
        return {name: digest for share in self.comm.all_gather(mine) for name, digest in share.items()}

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
            value = read_state(path)["metrics"].get(self.config.metric_name)
            return None if value is None else float(value)
        except (CheckpointError, TypeError, ValueError, AttributeError) as error:
            logger.warning("%s is left out when the best checkpoint is looked for: %s", path, error)
            return None

    def _prune(self) -> None:
        """Delete what is no longer kept; what cannot be deleted costs room, not the run."""
        keep = {*self._all()[-self.config.keep_last_n :], self.best()}
        left_over = [path for path in self.folder.iterdir() if _LEFT_OVER.fullmatch(path.name)]
        for path in [*left_over, *(path for path in self._all() if path not in keep)]:
            try:
                if path.is_symlink():
                    path.unlink()
                else:
                    shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s is no longer kept but cannot be deleted: %s", path, error)


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
    if not isinstance(state["step"], int):
        raise CheckpointError(f"{path}: {_damaged(checkpoint)} (step = {state['step']!r} is no number)")
    return state


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        if not (_is_whole(final) or (final / "policy").is_dir()):
            raise CheckpointError(f"{final} is in the way and is no checkpoint; move it")
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _what_is_inside(folder: Path) -> str:
    """Where the folder is a whole run: the checkpoints and the export one may have meant."""
    found = [*sorted(folder.glob("checkpoints/step_*/" + STATE_FILE)), *folder.glob("hf/config.json")]
    return f"; it is a run's folder, which has {', '.join(str(path.parent) for path in found)}" if found else ""
