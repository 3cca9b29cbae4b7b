"""`common.pt`: what is the same on every rank, read as plain values. Objects of other programs are not made."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from exgrpo_conversion._pickle_records import Record
from exgrpo_conversion._torch_archive import TorchArchive
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import file_inside


def read_common(path: Path) -> dict[str, Any]:
    """The dictionary in a common.pt; no code of the file runs, and objects of any class are left as records.

    Raises:
        ModelFolderError: it is missing or damaged.
    """
    content = TorchArchive(file_inside(path.parent, path.name)).content(admitted=None)
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds a {type(content).__name__}, not a dictionary")
    return {str(key): _namespace(value) for key, value in content.items()}


def _namespace(value: Any) -> Any:
    """Arguments of a program as such, all else as it is."""
    if not isinstance(value, Record) or value.name != "argparse.Namespace" or not isinstance(value.state, dict):
        return value
    return Namespace(**{str(key): entry for key, entry in value.state.items()})
