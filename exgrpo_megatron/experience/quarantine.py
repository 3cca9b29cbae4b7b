"""Segments in which a record is not what was written: what is sound is saved, the file is set aside."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from exgrpo_megatron.experience.answers import AnswerStore, DamagedAnswer
from exgrpo_megatron.experience.ids import IdTable

logger = logging.getLogger(__name__)

QUARANTINE_FOLDER = "quarantine"


def set_aside(store: AnswerStore, number: int, ids: IdTable) -> Counter[str]:
    """Write the sound answers of a segment anew, forget the others, and move the file into `QUARANTINE_FOLDER`.

    Returns how many answers each question lost.
    """
    lost: Counter[str] = Counter()
    live = store.live()
    for slot in live[store.column("segment")[live] == number].tolist():
        try:
            store.rewrite(slot, store.record(slot))
        except DamagedAnswer:
            lost[ids.name(int(store.column("question")[slot]))] += 1
            store.remove(slot)
    segment = store.segments.pop(number)
    where = keep_aside(segment.path, store.folder.path)
    logger.warning(
        "%s is damaged: %d stored answers are lost, the sound ones are written anew; it is kept as %s",
        segment.path, lost.total(), where,
    )  # fmt: skip
    if where is None:
        segment.drop()
    return lost


def keep_aside(path: Path | None, folder: Path | None) -> Path | None:
    """Move a damaged file of a store to its quarantine; None where there is no file to be moved."""
    if path is None or folder is None or not path.exists():
        return None
    target = folder / QUARANTINE_FOLDER / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    return path.rename(target)
