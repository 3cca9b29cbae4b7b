"""What the groups of a step change, worked out from the groups and the retired questions alone: alike everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exgrpo_megatron.experience.history import Event
from exgrpo_megatron.experience.reports import RecordReport, RefusedAnswer
from exgrpo_megatron.experience.soundness import all_sound, answer_fault
from exgrpo_megatron.types import Group, StoredAnswer


@dataclass(frozen=True)
class Change:
    """What one group means for its question."""

    question_id: str
    bucket: int
    """k of K, at most K - 1; meaningless where the question is solved."""
    solved: bool
    """Retire the question and forget its answers."""
    answers: tuple[StoredAnswer, ...]
    """Sound new answers; some may be stored already, which only their owner knows."""


class Kept(NamedTuple):
    """What the owner of a question did about a change."""

    stored: tuple[int, ...]
    """Serials of the answers stored."""
    duplicates: int
    num_answers: int
    """Answers of the question afterwards."""
    num_bytes: int
    """What its records take more than before; below 0: less."""
    evicted: tuple[int, ...] = ()
    """Serials of the answers that went because the question has a cap."""


def changes_of(
    groups: Sequence[Group],
    is_retired: Callable[[str], bool],
    *,
    step: int,
    collect: bool,
    truncated: bool,
    retire: bool = True,
    solved_above: float | None = None,
) -> tuple[list[Change], RecordReport]:
    """The changes, in the order of the groups, and the part of the report that needs no stored answers."""
    report, changes = RecordReport(), []
    solved: set[str] = set()
    sound = collect and all_sound([
        member for group in groups for member in group.trajectories if member.correct and not member.replayed
    ])  # fmt: skip
    for group in groups:
        question_id, num_correct = group.question.id, group.num_correct
        if question_id in solved or is_retired(question_id):
            report.already_retired += 1
        elif num_correct == 0:
            report.unsolved += 1
        elif retire and group.solved(solved_above):
            solved.add(question_id)
            report.retired.append(question_id)
            report.events.append(Event(question_id, "retired"))
            changes.append(Change(question_id, num_correct, True, ()))
        else:
            answers = _sound_answers(group, step, collect, truncated, sound, report)
            changes.append(Change(question_id, min(num_correct, group.size - 1), False, answers))
    return changes, report


def _sound_answers(
    group: Group, step: int, collect: bool, truncated: bool, known_sound: bool, report: RecordReport
) -> tuple[StoredAnswer, ...]:
    """The group's new correct answers that can be replayed; counts the others."""
    question_id = group.question.id
    correct = [member for member in group.trajectories if member.correct and not member.replayed]
    if not collect:
        report.not_collected += len(correct)
        report.events += left_out(question_id, len(correct), "not_collected")
        return ()
    sound: list[StoredAnswer] = []
    before = report.truncated
    for member in correct:
        if member.stop_reason == "length" and not truncated:
            report.truncated += 1
            continue
        fault = None if known_sound else answer_fault(member.token_ids, member.logprobs)
        if fault is None:
            sound.append(StoredAnswer(member.token_ids, member.logprobs, member.policy_version, step))
        else:
            report.refused.append(RefusedAnswer(question_id, fault))
            report.events += left_out(question_id, 1, fault)
    report.events += left_out(question_id, report.truncated - before, "truncated")
    return tuple(sound)


def left_out(question_id: str, count: int, reason: str) -> list[Event]:
    """Correct answers that were not stored, if there are any."""
    return [Event(question_id, "left_out", count=count, reason=reason)] if count else []
