"""What stored experience amounts to: counts, spreads, and what a run's metrics say of it."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from exgrpo_megatron.checkpointing import read_state
from exgrpo_megatron.experience.files import Summary
from exgrpo_megatron.experience_tools.readers import Facts
from exgrpo_megatron.experience_tools.sources import Source
from exgrpo_megatron.metric_sinks import read_metrics

QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}
TOTALS = {
    "experience/evicted_of_question": "evicted by experience.max_answers_per_question",
    "experience/evicted_of_answers": "evicted by experience.max_answers",
    "experience/evicted_of_bytes": "evicted by experience.max_bytes",
    "experience/already_stored": "duplicates, not stored again",
    "experience/truncated": "cut off, not stored",
    "experience/refused": "refused: not one finite log-prob a token",
}
"""Metrics of a run that are summed over its steps."""


@dataclass(frozen=True)
class ExperienceStats:
    """All of it; what is not known is absent or None."""

    source: str
    step: int | None
    group_size: int | None
    questions: int
    answers: int
    tokens: int
    record_bytes: int | None
    """Of the records that are needed."""
    segment_bytes: int | None
    """Of the segments they lie in."""
    questions_by_bucket: dict[int, int]
    answers_by_bucket: dict[int, int]
    spreads: dict[str, dict[str, float]]
    """length (tokens), entropy (nats), age (steps), answers (of a question): mean and `QUANTILES`."""
    retired: int | None
    damaged: int | None
    """Answers lost to damaged files."""
    totals: dict[str, int]
    """By metric, over the run's steps."""
    data_questions: int | None
    """Questions of data.train."""
    data_left: int | None
    """Questions that the next epoch will have."""

    def as_json(self) -> dict[str, Any]:
        share = None if not self.data_questions or self.data_left is None else self.data_left / self.data_questions
        return {**self.__dict__, "data_left_share": share}


def measure(source: Source) -> ExperienceStats:
    """Read every answer's facts, and the run's metrics up to the same step; raises CheckpointError, DataError."""
    reader, summary, step = source.reader(), source.summary(), source.step
    tally = _Tally()
    for facts in reader.facts():
        tally.add(facts)
    totals, left = _of_metrics(source.metrics, step)
    state = read_state(source.checkpoint) if source.checkpoint else {}
    train = state.get("data", {}).get("train") or {}
    segments = source.path / "segments"
    return ExperienceStats(
        source=f"{source.path} ({reader.kind})",
        step=step,
        group_size=reader.group_size,
        questions=len(tally.of_question),
        answers=len(tally.lengths),
        tokens=sum(tally.lengths),
        record_bytes=tally.num_bytes or None,
        segment_bytes=sum(path.stat().st_size for path in segments.iterdir()) if segments.is_dir() else None,
        questions_by_bucket=dict(sorted(Counter(bucket for bucket, _ in tally.of_question.values()).items())),
        answers_by_bucket=dict(sorted(tally.answers.items())),
        spreads=tally.spreads(step),
        retired=_known(summary, "retired"),
        damaged=_known(summary, "num_damaged"),
        totals=totals,
        data_questions=train.get("questions"),
        data_left=left,
    )


def print_stats(stats: ExperienceStats, console: Console) -> None:
    """For people."""
    lines = [
        f"{stats.source}" + (f", step {stats.step}" if stats.step is not None else ""),
        f"{stats.questions} questions, {stats.answers} answers, {stats.tokens} tokens{_bytes(stats)}",
        *_state_lines(stats),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if stats.answers:
        console.print(_bucket_table(stats), _spread_table(stats), sep="\n")
    for name, count in stats.totals.items():
        if count:
            console.print(f"{count} answers {TOTALS[name]}", markup=False, highlight=False, soft_wrap=True)


class _Tally:
    """A few numbers an answer."""

    def __init__(self) -> None:
        self.lengths, self.steps, self.entropies = array("i"), array("i"), array("f")
        self.num_bytes = 0
        self.answers: Counter[int] = Counter()
        self.of_question: dict[str, tuple[int, int]] = {}
        """Question -> (bucket, answers)."""

    def add(self, facts: Facts) -> None:
        self.lengths.append(facts.num_tokens)
        self.steps.append(facts.step)
        self.entropies.append(facts.entropy)
        self.num_bytes += facts.num_bytes
        self.answers[facts.bucket] += 1
        _, known = self.of_question.get(facts.question_id, (0, 0))
        self.of_question[facts.question_id] = (facts.bucket, known + 1)

    def spreads(self, step: int | None) -> dict[str, dict[str, float]]:
        columns = {
            "length": np.array(self.lengths),
            "entropy": np.array(self.entropies),
            "answers": np.array([count for _, count in self.of_question.values()]),
            **({} if step is None else {"age": step - np.array(self.steps)}),
        }
        return {name: _spread(values) for name, values in columns.items() if len(values)}


def _spread(values: np.ndarray) -> dict[str, float]:
    found = np.quantile(values, list(QUANTILES.values()))
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, found.tolist(), strict=True))}


def _of_metrics(path: Path | None, step: int | None) -> tuple[dict[str, int], int | None]:
    """Sums over the steps up to `step`, and the questions left then."""
    if path is None:
        return {}, None
    records = [record for record in read_metrics(path) if step is None or record["step"] <= step]
    totals = {name: int(sum(record.get(name, 0) for record in records)) for name in TOTALS}
    left = [record["data/questions_left"] for record in records if "data/questions_left" in record]
    return totals, int(left[-1]) if left else None


def _known(summary: Summary | None, name: str) -> int | None:
    if summary is None:
        return None
    found = getattr(summary, name)
    return len(found) if isinstance(found, tuple) else found


def _bytes(stats: ExperienceStats) -> str:
    if stats.record_bytes is None:
        return ""
    each = stats.record_bytes / max(1, stats.answers)
    return f"; {stats.record_bytes} bytes, {each:.0f} an answer, in segments of {stats.segment_bytes or 0} bytes"


def _state_lines(stats: ExperienceStats) -> list[str]:
    lines = []
    if stats.retired is not None:
        lines.append(f"{stats.retired} questions retired; {stats.damaged} answers lost to damaged files")
    if stats.data_questions and stats.data_left is not None:
        share = stats.data_left / stats.data_questions
        lines.append(f"{stats.data_left} of {stats.data_questions} training questions left ({share:.1%})")
    return lines


def _bucket_table(stats: ExperienceStats) -> Table:
    table = Table("bucket", "questions", "answers", box=None, pad_edge=False)
    for bucket, questions in stats.questions_by_bucket.items():
        of = f" of {stats.group_size}" if stats.group_size else ""
        table.add_row(f"{bucket}{of}", str(questions), str(stats.answers_by_bucket[bucket]))
    return table


def _spread_table(stats: ExperienceStats) -> Table:
    names = {
        "length": "tokens of an answer",
        "entropy": "mean -log-prob, nats",
        "age": "steps since stored",
        "answers": "answers of a question",
    }
    table = Table("", "mean", *QUANTILES, box=None, pad_edge=False)
    for name, spread in stats.spreads.items():
        table.add_row(names[name], *(f"{value:.4g}" for value in spread.values()))
    return table
