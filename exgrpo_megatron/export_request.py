"""What `exgrpo export` can be asked for; without torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ExportDtype(StrEnum):
    """Of the exported tensors."""

    bf16 = "bf16"
    fp32 = "fp32"


class ExportCheck(StrEnum):
    """How far an export is compared with its checkpoint."""

    logits = "logits"
    tensors = "tensors"


@dataclass(frozen=True)
class ExportRequest:
    """The options of the command."""

    run: Path
    step: int | None = None
    best: bool = False
    dtype: ExportDtype | None = None
    out: Path | None = None
    verify: ExportCheck = ExportCheck.logits
    model: Path | None = None
    overwrite: bool = False
    """Replace a model folder that stands at `out`."""
