"""Folders that appear whole or not at all: built beside their place, then renamed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exgrpo_conversion._shards import sync


@contextmanager
def temporary_sibling(dst: Path) -> Iterator[Path]:
    """An empty folder beside `dst`, on the same file system; removed at the end unless it was renamed."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    folder = _hidden_sibling(dst, "partial")
    folder.mkdir()
    try:
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


def _hidden_sibling(dst: Path, kind: str) -> Path:
    return dst.parent / f".{dst.name}.{uuid.uuid4().hex[:8]}.{kind}"
