"""Where an export is built, and how it takes the place of an older one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exgrpo_conversion.aside import swap_in, temporary_sibling
from exgrpo_conversion.hf_folder import CONFIG_FILE, strange_entries, sync
from exgrpo_megatron.errors import CheckpointError


@contextmanager
def unverified(dst: Path, source_dir: Path) -> Iterator[Path]:
    """A name for the new folder beside `dst`, in a hidden one that is removed at the end; what killed exports left of
    theirs is removed too."""
    if source_dir.resolve().is_relative_to(dst.resolve()):
        raise CheckpointError(f"it would replace the source model {source_dir}: choose another folder")
    if dst.exists() and (not dst.is_dir() or (any(dst.iterdir()) and not (dst / CONFIG_FILE).exists())):
        raise CheckpointError(f"something is there already that is no model folder ({CONFIG_FILE} is missing)")
    with temporary_sibling(dst, "unverified") as aside:
        yield aside / dst.name


def refuse_other_folders(dst: Path) -> None:
    """Raise CheckpointError where `dst`, which will be deleted, has more in it than an export: it may be anybody's."""
    strange = strange_entries(dst) if dst.exists() and any(dst.iterdir()) else []
    if strange:
        raise CheckpointError(
            f"what is there has more than an export ({', '.join(strange[:3])}) and is never replaced: choose another"
        )


def put_in_place(candidate: Path, dst: Path) -> None:
    """Rename the folder that `unverified` gave to `dst`; what stood there goes when that is done.

    Raises:
        OSError: it cannot be renamed; `dst` is then as it was.
    """
    for path in candidate.iterdir():
        sync(path)
    sync(candidate)
    swap_in(candidate, dst, replace=True)
