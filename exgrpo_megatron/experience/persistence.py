"""A buffer to and from files: checkpoints, Parquet for other tools, and the answers of other runs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from exgrpo_megatron.comm import all_gather_union, together
from exgrpo_megatron.experience.files import SUMMARY_FILE, Summary, answers_file, write_answers, write_summary
from exgrpo_megatron.experience.question_stats import QuestionStats
from exgrpo_megatron.experience.reports import MergeReport
from exgrpo_megatron.experience.restore import Restored, check_agreement, restore
from exgrpo_megatron.experience.snapshot import AnswersSnapshot, CheckpointSnapshot
from exgrpo_megatron.experience.state import BufferState
from exgrpo_megatron.experience.stats_file import STATS_FILE, StatsSnapshot, read_stats
from exgrpo_megatron.types import StoredAnswer

logger = logging.getLogger(__name__)


def save(state: BufferState, folder: Path) -> None:
    """Write this process's answers as Parquet into `folder`, which is made if need be, and the summary once: for
    other runs and other tools. Collective.

    Raises:
        OSError, CheckpointError: on every process, where one cannot write, or read what is stored.
    """
    with together(state.comm):
        folder.mkdir(parents=True, exist_ok=True)
        if state.owner.keeps:
            write_answers(folder / answers_file(state.comm.rank, state.comm.size), state.rows(), state.group_size)
        if state.comm.is_main:
            write_summary(folder / SUMMARY_FILE, state.summary())


def snapshot(state: BufferState) -> CheckpointSnapshot:
    """This process's part of the buffer as it is now, to be saved while the buffer changes; collective.

    Answers whose segment is gone are dropped first.

    Raises:
        CheckpointError: there are such, and `experience.on_corruption` is `refuse`; on every process.
    """
    with together(state.comm):
        lost = state.keeper.missing(state.index.ids)
    state.lose(all_gather_union(state.comm, dict(lost)))
    return CheckpointSnapshot(
        group_size=state.group_size,
        rank=state.comm.rank,
        num_ranks=state.comm.size,
        summary=state.summary() if state.comm.is_main else None,
        answers=AnswersSnapshot(state.keeper.store, state.index) if state.owner.keeps else None,
        stats=StatsSnapshot(state.stats) if state.comm.is_main else None,
    )


def load(state: BufferState, folder: Path) -> None:
    """Become the buffer that was saved, on whatever number of ranks, with the same future draws; collective.

    Raises:
        CheckpointError: a file is missing, damaged or disagrees with another; names the file and the row. It is
            raised on every process, and nothing is changed.
    """
    restored, saved = _restored(state, folder, whole=True)
    assert saved is not None
    summary, stats = saved
    state.keeper.become(restored.store)
    state.index, state.stats = restored.index, stats
    state.next_serial = max(restored.next_serial, summary.next_serial)
    state.num_damaged = summary.num_damaged
    state.refresh_entropies([name for name, _ in restored.index.items()])
    state.lose(all_gather_union(state.comm, dict(restored.lost)))
    moved = state.rebucket()
    evicted = state.hold_question_cap()
    state.count_bytes()
    if moved and state.comm.is_main:
        logger.warning(
            "%s: %d questions are in another bucket now: they were saved under another experience.difficulty",
            folder, moved,
        )  # fmt: skip
    if evicted and state.comm.is_main:
        logger.warning("%s: %d answers beyond experience.max_answers_per_question are evicted", folder, evicted)


def merge_file(state: BufferState, path: Path) -> MergeReport:
    """Add the answers of another run (its experience folder, or the one Parquet file that has them); collective.

    A question stored here keeps its bucket, one retired here stays away, and the other run's retired questions
    are not taken over. Answers count as stored at step 0: the other run's steps say nothing about their age here.

    Raises:
        CheckpointError: a file is missing, damaged or for another group size; names the file and the row. It is
            raised on every process, and nothing is changed.
    """
    theirs, _ = _restored(state, path, whole=False)
    lost = all_gather_union(state.comm, dict(theirs.lost))
    questions = list(theirs.index.items())
    serials = state.take_serials([theirs.index.num_answers(name) for name, _ in questions])
    try:
        with together(state.comm):
            mine = {
                name: state.keep(name, _at_step_0(theirs, name), serial)
                for (name, _), serial in zip(questions, serials, strict=True)
                if state.owner.owns(name) and not state.index.is_retired(name)
            }
            state.keeper.tidy()
    finally:
        theirs.store.close()
    kept = all_gather_union(state.comm, mine)
    report = MergeReport(damaged=sum(lost.values()))
    for name, bucket in questions:
        num_answers = theirs.index.num_answers(name) - lost.get(name, 0)
        state.enter(name, bucket, num_answers, kept.get(name), report)
    evicted = [event for events in state.hold_caps() for event in events]
    report.evicted += len(evicted)
    state.events += evicted
    state.refresh_entropies(name for name, _ in questions)
    return report


def _restored(state: BufferState, path: Path, *, whole: bool) -> tuple[Restored, tuple[Summary, QuestionStats] | None]:
    """What was saved, in a store of its own; `whole`: with its summary, checked against that, and statistics."""
    store = state.keeper.another()
    try:
        with together(state.comm):
            restored = restore(path, state.new_index(), state.owner, store, state.config.on_corruption)
            saved = _summary_and_stats(state, path, restored) if whole else None
    except Exception:
        store.close()
        raise
    return restored, saved


def _summary_and_stats(state: BufferState, folder: Path, restored: Restored) -> tuple[Summary, QuestionStats]:
    summary = check_agreement(folder, restored)
    say = state.comm.is_main
    return summary, read_stats(folder / STATS_FILE, state.stats.kept, restored.index, say=say)


def _at_step_0(restored: Restored, question_id: str) -> list[StoredAnswer]:
    answers = restored.store.get(restored.index.row(question_id))
    return [replace(answer, step=0) for answer in answers]
