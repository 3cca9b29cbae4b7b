"""The config.json of a model folder; without torch, so that commands which load no weights answer at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exgrpo_conversion.errors import ModelFolderError

CONFIG_FILE = "config.json"


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
    """The JSON object in a file; raises ModelFolderError where it is missing or none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing") from None
    except ValueError as error:
        raise ModelFolderError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content
