"""What tools of others get beside metrics: some answers of a step, and what came of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from exgrpo_megatron.metric_sinks import AnswerRow
from exgrpo_megatron.types import Group, TokenIds


def answer_rows(groups: Sequence[Group], number: int, text_of: Callable[[TokenIds], str]) -> list[AnswerRow]:
    """`number` answers: of every group its last one, which is the stored one where it replays, then the one before, and
    so on."""
    size = max((group.size for group in groups), default=0)
    chosen = [
        (group.question, group.trajectories[-place])
        for place in range(1, size + 1)
        for group in groups
        if place <= group.size
    ][:number]
    return [
        AnswerRow(
            question_id=question.id,
            question=question.text,
            answer=text_of(member.token_ids),
            gold=question.answer,
            reward=float(member.reward),
            correct=bool(member.correct),
            replayed=member.replayed,
            tokens=len(member.token_ids),
        )
        for question, member in chosen
    ]


def run_outcome(records: Sequence[Mapping[str, float]], last_step: int, export: str) -> dict[str, float | str]:
    """`before/` and `after/` with the held-out metrics of the first evaluation and of the last, if it was evaluated."""
    evaluated = [record for record in records if any(name.startswith("validation/") for name in record)]
    named = {"before": evaluated[:1], "after": evaluated[1:][-1:]}
    return {
        "last_step": last_step,
        "export": export,
        **{
            f"{when}/{name}": value
            for when, found in named.items()
            for record in found
            for name, value in record.items()
            if name.startswith("validation/")
        },
    }
