"""What the answers to several question sets come to: numbers with intervals, as JSON and as a Markdown table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exgrpo_megatron.algorithm.estimates import (
    Estimate,
    Values,
    bootstrap_means,
    bootstrap_seed,
    estimate,
    macro_average,
    question_values,
)
from exgrpo_megatron.config import EVAL_GROUPS, EvalConfig
from exgrpo_megatron.set_answers import AnswerRow


@dataclass(frozen=True)
class SetResult:
    """The numbers of one set."""

    name: str
    group: str | None
    num_questions: int
    num_samples: int
    temperature: float
    estimates: dict[str, Estimate]
    """avg@k first, then pass@k by k, then maj@k."""
    by_category: dict[str, float]
    """avg@k of the questions of a category."""
    mean_tokens: float
    truncated: float
    """Share of answers cut off at the longest length."""
    no_answer: float
    """Share of answers in which none was found: they are wrong, and have no vote."""
    resampled_avg: Values | None = field(repr=False)
    """avg@k of the bootstrap's draws; None for a single question."""

    @property
    def avg(self) -> Estimate:
        return self.estimates[f"avg@{self.num_samples}"]

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "num_questions": self.num_questions,
            "num_samples": self.num_samples,
            "temperature": self.temperature,
            "metrics": {name: found.as_json() for name, found in self.estimates.items()},
            "avg_by_category": self.by_category,
            "mean_tokens": self.mean_tokens,
            "truncated": self.truncated,
            "no_answer": self.no_answer,
        }


def set_result(name: str, config: EvalConfig, answers: Sequence[Sequence[AnswerRow]]) -> SetResult:
    """`answers`: of each question all samples, in order."""
    chosen = config.sets[name]
    n = chosen.num_samples
    values = question_values(chosen, answers)
    resampled = bootstrap_means(values, config.bootstrap_samples, bootstrap_seed(config.seed, name))
    rows = [row for group in answers for row in group]
    return SetResult(
        name=name,
        group=chosen.group,
        num_questions=len(answers),
        num_samples=n,
        temperature=config.temperature_of(name),
        estimates={metric: estimate(found, resampled[metric]) for metric, found in values.items()},
        by_category=_by_category(answers, values[f"avg@{n}"]),
        mean_tokens=float(np.mean([row["num_tokens"] for row in rows])),
        truncated=float(np.mean([row["stop_reason"] == "length" for row in rows])),
        no_answer=float(np.mean([row["extracted"] is None for row in rows])),
        resampled_avg=resampled[f"avg@{n}"] if len(answers) > 1 else None,
    )


def group_averages(config: EvalConfig, results: Sequence[SetResult]) -> dict[str, Estimate]:
    """Macro average of avg@k of each group that sets name, and all of whose sets are there."""
    averages: dict[str, Estimate] = {}
    for group in EVAL_GROUPS:
        wanted = [name for name, chosen in config.sets.items() if chosen.group == group]
        found = [result for result in results if result.group == group]
        if wanted and len(found) == len(wanted):
            averages[group] = macro_average(
                [result.avg.value for result in found], [result.resampled_avg for result in found]
            )
    return averages


def markdown(title: str, results: Sequence[SetResult], averages: dict[str, Estimate], footer: str) -> str:
    """A table a human reads: percent, with 95% intervals in brackets."""
    lines = [
        f"# {title}\n",
        "| set | group | questions | k | T | avg@k | pass@k | maj@k |",
        "|---|---|--:|--:|--:|---|---|---|",
    ]
    for result in results:
        n = result.num_samples
        passes = [(k, found) for k, found in result.estimates.items() if k.startswith("pass@")]
        most = (
            f"{_percent(passes[-1][1])}{'' if passes[-1][0] == f'pass@{n}' else f' ({passes[-1][0]})'}"
            if passes
            else "-"
        )
        majority = _percent(result.estimates[f"maj@{n}"]) if n > 1 else "-"
        lines.append(
            f"| {result.name} | {result.group or '-'} | {result.num_questions} | {n} | {result.temperature:g} | "
            f"{_percent(result.avg)} | {most} | {majority} |"
        )
    for group, found in averages.items():
        lines.append(f"| **{group} average** | {group} | | | | **{_percent(found)}** | | |")
    return "\n".join([*lines, "", footer]) + "\n"


def _percent(found: Estimate) -> str:
    interval = "" if found.low is None or found.high is None else f" [{found.low:.1%}, {found.high:.1%}]"
    return f"{found.value:.1%}{interval}"


def _by_category(answers: Sequence[Sequence[AnswerRow]], averages: Values) -> dict[str, float]:
    groups: dict[str, list[float]] = defaultdict(list)
    for group, average in zip(answers, averages.tolist(), strict=True):
        if group[0]["category"] is not None:
            groups[group[0]["category"]].append(average)
    return {name: float(np.mean(values)) for name, values in sorted(groups.items())}
