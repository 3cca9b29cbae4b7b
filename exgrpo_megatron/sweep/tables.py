"""The files in which a sweep says what it found: a table as Markdown, CSV and JSON, and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exgrpo_megatron.files import replace_text
from exgrpo_megatron.report.bands import Panel, write_bands
from exgrpo_megatron.report.seeds import Interval, markdown_table
from exgrpo_megatron.sweep.comparison import Cell, Column, Curves

_CSV_COLUMNS = (
    "arm", "metric", "answers", "level", "runs", "known", "mean", "half_width_95", "difference",
    "difference_half_width_95", "by_seed",
)  # fmt: skip


@dataclass(frozen=True)
class Missing:
    """A run that is in no number, and why."""

    arm: str
    seed: int
    status: str
    message: str
    log: str


@dataclass(frozen=True)
class NeverReplayed:
    """A finished run with experience in which replay never began: its numbers are those of training without."""

    arm: str
    seed: int
    told: str


@dataclass(frozen=True)
class Findings:
    """All that is written."""

    arms: Sequence[str]
    baseline: str
    num_planned: int
    """Seeds of each arm."""
    columns: Sequence[Column]
    missing: Sequence[Missing]
    seconds: dict[str, list[float]]
    """Of each arm, those of its finished runs."""
    never_replayed: Sequence[NeverReplayed] = ()


def write_findings(out: Path, findings: Findings, curves: Curves) -> list[Path]:
    """Write `table.md`, `table.csv`, `table.json` and, where there is anything to draw, `bands.png`; their paths.

    Raises:
        UserError: one cannot be written.
    """
    texts = {"table.md": markdown(findings), "table.csv": as_csv(findings), "table.json": as_json(findings)}
    for name, text in texts.items():
        replace_text(out / name, text)
    drawn = {metric: by_arm for metric, by_arm in curves.items() if any(map(len, by_arm.values()))}
    if not drawn:
        return [out / name for name in texts]
    panels = [
        Panel(metric, {arm: list(by_arm[arm].values()) for arm in findings.arms}) for metric, by_arm in drawn.items()
    ]
    title = "Mean over seeds with its 95% interval; thin: each seed"
    return [*(out / name for name in texts), write_bands(out / "bands.png", panels, "answers generated", title)]


def markdown(findings: Findings) -> str:
    """One row an arm; below it what is in no number."""
    several = len(findings.arms) > 1
    header = ["arm", "runs"]
    for column in findings.columns:
        header += [_heading(column), *(["difference"] if several else [])]
    rows = []
    for arm in findings.arms:
        row = [arm, f"{len(findings.seconds[arm])} of {findings.num_planned}"]
        for column in findings.columns:
            cell = column.cells[arm]
            row += [_shown(cell, column), *([_difference(cell, column)] if several else [])]
        rows.append([*row, _seconds(findings.seconds[arm])])
    table = markdown_table([*header, "s a run"], rows)
    paired = f", differences to {findings.baseline} paired by seed" if several else ""
    note = f"Means over seeds, ± half of their 95% t-interval{paired}. Answers are those generated.\n"
    lines = [
        f"- {run.arm}, seed {run.seed}: {run.status}{f': {run.message}' if run.message else ''} ({run.log})\n"
        for run in findings.missing
    ]
    without = [f"- {run.arm}, seed {run.seed}: {run.told}\n" for run in findings.never_replayed]
    parts = {"In no number": lines, "With experience, but without replay": without}
    return f"{table}\n{note}" + "".join(f"\n{what}:\n\n{''.join(some)}" for what, some in parts.items() if some)


def as_csv(findings: Findings) -> str:
    """One line an arm and column, with full digits; a value that is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for column in findings.columns:
        for arm in findings.arms:
            cell = column.cells[arm]
            mean, difference = cell.interval, cell.difference
            writer.writerow(
                {
                    "arm": arm,
                    "metric": column.metric,
                    "answers": column.answers,
                    "level": column.level,
                    "runs": cell.num_runs,
                    "known": len(cell.by_seed),
                    **_spread("mean", "half_width_95", mean),
                    **_spread("difference", "difference_half_width_95", difference),
                    "by_seed": " ".join(f"{seed}={value!r}" for seed, value in cell.by_seed.items()),
                }
            )
    return text.getvalue()


def as_json(findings: Findings) -> str:
    """Everything, NaN as null."""
    content = {
        "arms": list(findings.arms),
        "baseline": findings.baseline,
        "runs_planned": findings.num_planned,
        "columns": [asdict(column) for column in findings.columns],
        "seconds": findings.seconds,
        "missing": [asdict(run) for run in findings.missing],
        "never_replayed": [asdict(run) for run in findings.never_replayed],
    }
    return json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n"


def _heading(column: Column) -> str:
    if column.answers is None:
        return f"answers to {column.metric} {column.level:g}"
    return f"{column.metric} at {column.answers:g} answers"


def _shown(cell: Cell, column: Column) -> str:
    if cell.interval is not None:
        return cell.interval.describe(0 if column.answers is None else 3)
    if not cell.num_runs:
        return "-"
    if column.answers is not None:
        return f"known of {len(cell.by_seed)} of {cell.num_runs}"
    # A mean over those that got there would be one of the fast ones.
    found = ", ".join(f"{value:.0f}" for value in sorted(cell.by_seed.values()))
    return f"{len(cell.by_seed)} of {cell.num_runs}" + (f" ({found})" if found else "")


def _difference(cell: Cell, column: Column) -> str:
    if cell.difference is None:
        return "-"
    text = cell.difference.describe(0 if column.answers is None else 3)
    return text if cell.difference.mean < 0 else f"+{text}"


def _seconds(seconds: Sequence[float]) -> str:
    return f"{sum(seconds) / len(seconds):.0f}" if seconds else "-"


def _spread(mean: str, half_width: str, interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {mean: None, half_width: None}
    return {mean: interval.mean, half_width: interval.half_width if interval.num_seeds > 1 else None}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and value != value else value
