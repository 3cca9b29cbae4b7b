"""JSON files of a model folder; without torch, so that commands which load no weights answer at once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import file_inside

CONFIG_FILE = "config.json"

MAX_JSON_BYTES = 16 * 2**20
"""Refused above: an index of 100,000 tensors has 10 MB, and what is read takes up to 20 times the memory."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The dictionary in the folder's config.json.

    Raises:
        ModelFolderError: no such folder or file, or not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is not a folder: give the path of a Hugging Face model folder")
    return read_json(folder / CONFIG_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder.

    Raises:
        ModelFolderError: it is missing, a link to something else, larger than `MAX_JSON_BYTES`, or no JSON object.
    """
    try:
        path = file_inside(path.parent, path.name)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelFolderError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from error


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`, in which no key is repeated and every number is finite; `where` names it in messages.

    Raises:
        ModelFolderError: it is none.
    """
    try:
        content = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_repeats, parse_float=_finite, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise ModelFolderError(f"{where} is no valid JSON: {reason}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{where} holds a {type(content).__name__}, not a JSON object")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:80]!r} is there twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} is too large for a number")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number")
