"""Small text files, replaced whole or not at all, folders that can be written, and what a file's bytes are told by."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from exgrpo_megatron.errors import ConfigError, UserError


def replace_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, then rename: whatever goes wrong, the old file stays.

    Raises:
        UserError: it cannot be written.
    """
    aside = path.with_name(path.name + ".new")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; make room, then run again") from error


def sha256_of(path: Path) -> str:
    """In hexadecimal digits, however long the file is."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def writable_folder(path: Path, key: str) -> Path:
    """`path`, made if absent; raises ConfigError naming `key` where it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key} = {str(path)!r}: cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} = {str(path)!r}: not writable")
    return path
