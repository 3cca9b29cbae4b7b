"""SHA-256 of the files of an exported folder, in the form that `sha256sum -c SHA256SUMS` checks."""

from __future__ import annotations

import re
from pathlib import Path

from exgrpo_megatron.errors import DataError
from exgrpo_megatron.files import sha256_of

SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")


def write_sums(folder: Path) -> None:
    """Of every file that is in the folder now."""
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def read_sums(path: Path) -> dict[str, str]:
    """Name -> SHA-256; raises DataError where a line is none of them."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    matches = [_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or None in matches:
        raise DataError(f"{path}: a line is no SHA-256 with the name of a file")
    return {match[2]: match[1] for match in matches if match}
