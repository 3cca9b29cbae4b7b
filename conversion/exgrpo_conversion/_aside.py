"""Folders that appear whole or not at all: built beside their place, then renamed."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exgrpo_conversion._shards import sync


@contextmanager
def temporary_sibling(dst: Path) -> Iterator[Path]:
    """An empty folder beside `dst`, on the same file system; removed at the end unless it was renamed.

    Those of processes that were killed are removed too: a living one keeps a lock on its own.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in dst.parent.glob(f".{glob.escape(dst.name)}.{'[0-9a-f]' * 8}.partial"):
        with suppress(OSError), _locked(abandoned):
            shutil.rmtree(abandoned, ignore_errors=True)
    folder = _hidden_sibling(dst, "partial")
    folder.mkdir()
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def swap_in(folder: Path, dst: Path) -> None:
    """Rename the finished folder to `dst`; what stood there is moved aside first and deleted last."""
    old = _hidden_sibling(dst, "replaced") if dst.exists() else None
    if old is not None:
        os.rename(dst, old)
    try:
        os.rename(folder, dst)
    except OSError:
        if old is not None:
            os.rename(old, dst)
        raise
    sync(dst.parent)
    if old is not None:
        shutil.rmtree(old)


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
