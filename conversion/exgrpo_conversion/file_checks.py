"""What is checked of any file or disk before it is used; without torch, so that it costs nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from exgrpo_conversion.errors import ModelFolderError


def file_inside(folder: Path, name: object, says: str = "") -> Path:
    """The regular file `name` of `folder`, which cannot lead out of it.

    A link may point elsewhere in the folder; to a file of the same name anywhere, as in a folder made of links to a
    model on another disk; or to the `blobs` of a model in the cache of the Hugging Face hub. Files that are worth
    stealing have other names. `says` begins messages about the name: who asks for the file.

    Raises:
        ModelFolderError: the name has a path in it, the file is missing, is none, or is a link out of the folder to
            something else.
    """
    said = f"{says} in {name!r:.200}: " if says else ""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ModelFolderError(f"{said}only files in the folder itself can be named")
    path = folder / name
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise ModelFolderError(f"{said}{path} is missing: the folder is incomplete") from None
    except (OSError, RuntimeError) as error:
        raise ModelFolderError(f"{said}{path} cannot be followed: {error}") from None
    if not (target.is_relative_to(folder.resolve()) or target.name == name or _is_blob(target)):
        raise ModelFolderError(
            f"{said}{path} is a link out of the folder, to {target}: copy the file, or link to one named {name}"
        )
    if not target.is_file():
        raise ModelFolderError(f"{said}{path} is no regular file")
    return path


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin writing `needed_bytes` below `folder` (or its nearest parent that exists) without room for them.

    Raises:
        ModelFolderError: with the bytes needed and those free.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise ModelFolderError(
            f"{folder} needs {needed_bytes:,} bytes, and {free:,} are free on its disk: make room or choose another"
        )


def _is_blob(target: Path) -> bool:
    """Whether this is a file of a model in a hub's cache, which are named by their digests."""
    return target.parent.name == "blobs" and (target.parent.parent / "snapshots").is_dir()
