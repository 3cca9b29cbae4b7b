"""Pictures on disk, replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.figure import Figure

from exgrpo_megatron.errors import UserError


def save_picture(figure: Figure, path: Path, dots_per_inch: int) -> None:
    """Write a PNG beside `path`, then rename: whatever goes wrong, the old picture stays.

    Raises:
        UserError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.new")
    try:
        figure.savefig(aside, dpi=dots_per_inch, format="png")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; make room or mend the permissions") from error
