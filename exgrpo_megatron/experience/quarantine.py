"""Segments in which a record is not what was written: what is sound is saved, the file is set aside."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from exgrpo_megatron.experience.answers import AnswerStore, DamagedAnswer
from exgrpo_megatron.experience.ids import IdTable
from exgrpo_megatron.experience.segments import link_or_copy

logger = logging.getLogger(__name__)

QUARANTINE_FOLDER = "quarantine"


def set_aside(store: AnswerStore, number: int, ids: IdTable) -> Counter[str]:
    """Write the sound answers of a segment anew, forget the others, and move the file into `QUARANTINE_FOLDER`. A
    checkpoint on its way that needs the file still finds it.

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
    segment.drop()
    return lost


def keep_aside(path: Path | None, folder: Path | None) -> Path | None:
    """A second name, or a copy, of a damaged file in its store's quarantine; None where there is no file."""
    if path is None or folder is None or not path.exists():
        return None
    target = folder / QUARANTINE_FOLDER / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(path, target)
    return target
