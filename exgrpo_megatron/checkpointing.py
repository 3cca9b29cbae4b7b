"""Checkpoints of a run: written aside and renamed when whole, the last n and the best kept."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from exgrpo_megatron.background import completed, in_background
from exgrpo_megatron.comm import Communicator, gather_everyone, together
from exgrpo_megatron.config import CheckpointConfig
from exgrpo_megatron.errors import CheckpointError, UserError
from exgrpo_megatron.files import replace_text, sha256_of

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


class Part(Protocol):
    """A part of a checkpoint that knows what to write."""

    def write(self) -> list[Path]:
        """Write this process's files and return them; in any thread, and without waiting for another process."""

    def finish(self) -> None:
        """Called on every process, in the main thread, when all have written; may be collective."""


@dataclass(frozen=True)
class FilesPart:
    """A part that is whole as soon as its files are written."""

    write_files: Callable[[], list[Path]]

    def write(self) -> list[Path]:
        return self.write_files()

    def finish(self) -> None:
        return None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has become whole."""

    path: Path
    write_s: float
    """Time that writing took, on the slowest process."""


@dataclass(frozen=True)
class _Saving:
    """A checkpoint on its way."""

    step: int
    aside: Path
    state: dict[str, Any]
    parts: list[Part]
    written: Future[_Written]


@dataclass(frozen=True)
class _Written:
    digests: dict[str, str]
    """Of this process's files."""
    seconds: float


class CheckpointStore:
    """The folder of a run's checkpoints, `step_000020` and so on. Methods are collective over all processes.

    `begin` takes a checkpoint and `finish` makes it whole. With `checkpointing.async_save` a thread of each process
    writes in between; collectives stay in the main thread. Until it is whole, the folder has another name.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, comm: Communicator, state_keys: frozenset[str] = STATE_KEYS
    ) -> None:
        """`state_keys`: what every state has, `step` and `metrics` among it."""
        self._state_keys = state_keys
        self.folder, self.config, self.comm = folder, config, comm
        self._saving: _Saving | None = None

    def save(self, step: int, state: dict[str, Any], prepare: Callable[[Path], list[Part]]) -> Path:
        """`begin` and `finish` at once."""
        self.begin(step, state, prepare)
        saved = self.finish(wait=True)
        assert saved is not None
        return saved.path

    def begin(self, step: int, state: dict[str, Any], prepare: Callable[[Path], list[Part]]) -> None:
        """Take a checkpoint of `step`: what `prepare(folder)` returns on each process, and `state` as JSON.

        `prepare` may be collective, and must copy what may change while it is written. `state["metrics"]` decides which
        checkpoint is the best. The checkpoint before must be finished.

        Raises:
            CheckpointError: the folder cannot be made.
        """
        assert self._saving is None, "an earlier checkpoint is not finished"
        aside = self.folder / f"step_{step:06d}.incomplete"
        with self.comm.places.inside(f"checkpoint of step {step}: begin"), self._all_or_nothing(step, aside):
            with together(self.comm):
                if self.comm.is_main:
                    _make_empty(aside)
            parts = prepare(aside)
        write = partial(_write, aside, parts, self.comm.places.advance)
        written = in_background(write) if self.config.async_save else completed(write)
        self._saving = _Saving(step, aside, state, parts, written)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is begun and not finished; the same on every process."""
        return self._saving is not None

    def finish(self, *, wait: bool) -> Saved | None:
        """Make the checkpoint whole that was begun, if it is written everywhere; `wait` for that if it is not.

        On any failure the folder is as it was before.

        Raises:
            CheckpointError: the disk is full, or something else could not be written.
        """
        saving = self._saving
        if saving is None or (not wait and self.comm.anywhere(not saving.written.done())):
            return None
        self._saving = None
        final = self.folder / f"step_{saving.step:06d}"
        with self.comm.places.inside(f"checkpoint of step {saving.step}: finish"):
            with self._all_or_nothing(saving.step, saving.aside):
                with together(self.comm):
                    mine = saving.written.result()
                for part in saving.parts:
                    part.finish()
                everyones = gather_everyone(self.comm, mine)
                with together(self.comm):
                    if self.comm.is_main:
                        _make_whole(saving, final, [written.digests for written in everyones])
            if self.comm.is_main:
                self._prune()
            self.comm.barrier()
        return Saved(final, max(written.seconds for written in everyones))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around training: an error in a step does not cost the checkpoint that is on its way.

        With other processes, which may be gone or go on, nothing collective is begun then, and it is lost.
        """
        try:
            yield
        except Exception:
            if self.comm.world_size == 1:
                with suppress(CheckpointError):  # the error of the step is the one to report
                    self.finish(wait=True)
            raise

    @contextmanager
    def _all_or_nothing(self, step: int, aside: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, UserError) as error:
            if self.comm.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise self._not_saved(step, error) from error

    def verify(self, checkpoint: Path, excuse: Callable[[str], bool] = lambda _: False) -> None:
        """Raise CheckpointError, on every rank, where a file of the checkpoint is missing, unreadable, or not as it was
        saved, unless `excuse` says of its name that whoever reads it sees to that."""
        with self.comm.places.inside(f"checking {checkpoint.name}"):
            self._verify(checkpoint, excuse)

    def _verify(self, checkpoint: Path, excuse: Callable[[str], bool]) -> None:
        path = checkpoint / DIGESTS_FILE
        with together(self.comm):
            try:
                saved = dict(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise CheckpointError(f"{path}: {_damaged(checkpoint)} ({error})") from None
        found = self._digests(checkpoint, excuse)
        differ = sorted(name for name, digest in saved.items() if found.get(name) != digest)
        changed = [name for name in differ if not excuse(name)]
        if changed:
            what = "is not as it was saved" if (checkpoint / changed[0]).is_file() else "is missing"
            raise CheckpointError(f"{checkpoint / changed[0]} {what}: {_damaged(checkpoint)}")

    def _digests(self, folder: Path, excuse: Callable[[str], bool]) -> dict[str, str]:
        """SHA-256 by file, without those excused, the same on every process; each reads its share."""
        comm = self.comm
        with together(self.comm):
            try:
                files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
                read = [name for name in files if name != DIGESTS_FILE and not excuse(name)]
                own = read[comm.rank * comm.members + comm.member :: comm.world_size]
                mine = {}
                for name in own:
                    mine[name] = sha256_of(folder / name)
                    comm.places.advance()
            except OSError as error:
                raise CheckpointError(f"{error.filename or folder}: {_damaged(folder)} ({error})") from None
        return {name: digest for share in gather_everyone(comm, mine) for name, digest in share.items()}

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        before = self.latest()
        again = f"go on from {before.name}" if before else "begin again"
        return CheckpointError(
            f"step {step} could not be saved in {self.folder}: {error}. Nothing saved before was lost: make room or "
            f"mend what stands in the way, and run the same command to {again}"
        )

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self.whole()
        return found[-1] if found else None

    def at(self, step: int) -> Path | None:
        """The whole checkpoint of a step."""
        path = self.folder / f"step_{step:06d}"
        return path if path in self.whole() else None

    def not_whole(self) -> list[Path]:
        """Folders with the name of a checkpoint that are none: nothing is resumed from them."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and not _is_whole(path))

    def best(self) -> Path | None:
        """The checkpoint best in `checkpointing.metric_name` (ties: the newest); None where none has the metric."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def whole(self) -> list[Path]:
        """Every whole checkpoint, by step."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and _is_whole(path)]
        return sorted(found, key=_step)

    def _ranked(self) -> list[Path]:
        """Every whole checkpoint that has the metric, the best first; of equal ones the newer."""
        scored = [(value, path) for path in self.whole() if (value := self._metric(path)) is not None]
        sign = 1 if self.config.higher_is_better else -1
        return [path for _, path in sorted(scored, key=lambda pair: (-sign * pair[0], -_step(pair[1])))]

    def _metric(self, path: Path) -> float | None:
        try:
            value = read_state(path, self._state_keys)["metrics"].get(self.config.metric_name)
            number = None if value is None else float(value)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.config.metric_name} = {number}, which counts as not measured")
            return number
        except (CheckpointError, TypeError, ValueError, AttributeError) as error:
            logger.warning("%s is left out when the best checkpoint is looked for: %s", path, error)
            return None

    def _prune(self) -> None:
        """Delete what is no longer kept; what cannot be deleted costs room, not the run."""
        whole, best = self.whole(), self.config.keep_top_k
        keep = whole if best is None else {*whole[-self.config.keep_last_n :], *self._ranked()[:best]}
        left_over = [path for path in self.folder.iterdir() if _LEFT_OVER.fullmatch(path.name)]
        for path in [*left_over, *(path for path in whole if path not in keep)]:
            try:
                if path.is_symlink():
                    path.unlink()
                else:
                    shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s is no longer kept but cannot be deleted: %s", path, error)


def read_state(checkpoint: Path, keys: frozenset[str] = STATE_KEYS) -> dict[str, Any]:
    """The JSON state of a checkpoint, which has these keys; raises CheckpointError."""
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
    missing = keys - state.keys() if isinstance(state, dict) else keys
    if missing:
        raise CheckpointError(f"{path}: {_damaged(checkpoint)} (it lacks {', '.join(sorted(missing))})")
    if not isinstance(state["step"], int):
        raise CheckpointError(f"{path}: {_damaged(checkpoint)} (step = {state['step']!r} is no number)")
    return state


def _write(aside: Path, parts: list[Part], on_progress: Callable[[], None]) -> _Written:
    """Every part of this process, and the digests of what it wrote, while that is still in memory."""
    started = time.perf_counter()
    files, digests = [], {}
    for part in parts:
        files += part.write()
        on_progress()
    for path in files:
        digests[str(path.relative_to(aside))] = sha256_of(path)
        on_progress()
    return _Written(digests, time.perf_counter() - started)


def _make_whole(saving: _Saving, final: Path, digests: list[dict[str, str]]) -> None:
    """State and digests, then the name of a checkpoint."""
    replace_text(saving.aside / STATE_FILE, json.dumps(saving.state, indent=1))
    known = {name: digest for own in digests for name, digest in own.items()}
    files = sorted(path for path in saving.aside.rglob("*") if path.is_file())
    names = {str(path.relative_to(saving.aside)): path for path in files}
    all_digests = {name: known.get(name) or sha256_of(path) for name, path in names.items()}
    replace_text(saving.aside / DIGESTS_FILE, json.dumps(all_digests, indent=1))
    _replace_folder(saving.aside, final)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


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
