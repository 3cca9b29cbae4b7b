"""Folders that appear whole or not at all: built beside their place, then renamed."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exgrpo_conversion._shards import sync
from exgrpo_conversion.errors import ModelFolderError


@contextmanager
def temporary_sibling(dst: Path, kind: str = "partial") -> Iterator[Path]:
    """An empty folder `.NAME.xxxxxxxx.KIND` beside `dst`, on the same file system; removed at the end unless it was
    renamed.

    Those of processes that were killed are removed too: a living one keeps a lock on its own.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in dst.parent.glob(f".{glob.escape(dst.name)}.{'[0-9a-f]' * 8}.{kind}"):
        with suppress(OSError), _locked(abandoned):
            shutil.rmtree(abandoned, ignore_errors=True)
    folder = _hidden_sibling(dst, kind)
    folder.mkdir()
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def swap_in(folder: Path, dst: Path, *, replace: bool) -> None:
    """Rename the finished folder to `dst`; with `replace`, what stood there is moved aside first and deleted last.

    Raises:
        ModelFolderError: without `replace`, there is something by now: another process was faster.
    """
    replaced: list[Path] = []
    try:
        while not _renamed(folder, dst):
            if not replace:
                raise ModelFolderError(f"{dst} was made meanwhile by another process, and is left as it is")
            old = _hidden_sibling(dst, "replaced")
            with suppress(FileNotFoundError):  # taken away by another process that replaces it
                os.rename(dst, old)
                replaced.append(old)
    except OSError:
        if replaced and not dst.exists():
            os.rename(replaced[-1], dst)
        raise
    sync(dst.parent)
    for old in replaced:
        shutil.rmtree(old)


def _renamed(folder: Path, dst: Path) -> bool:
    """False: there is a folder already, that is not empty."""
    try:
        os.rename(folder, dst)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raises OSError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _hidden_sibling(dst: Path, kind: str) -> Path:
    return dst.parent / f".{dst.name}.{uuid.uuid4().hex[:8]}.{kind}"
