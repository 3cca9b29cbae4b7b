"""What a run shows at its end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from exgrpo_megatron.report.console import format_duration

HEADLINES = {"pass_rate_t1": "sampled", "pass_rate_greedy": "greedy"}
"""Held-out pass rates shown, by their name under `validation/`."""
SETS = "validation/avg/"
"""Before the name of a set in training."""


def run_summary(
    *,
    before: Mapping[str, float],
    after: Mapping[str, float],
    paths: Mapping[str, Path | None],
    next_command: str,
    budget: str = "",
    elapsed_s: float | None = None,
    temperature: float = 1.0,
    health: Sequence[str] = (),
    tools: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> None:
    """Print how the held-out pass rate moved, where everything lies, and what to try next.

    `before` and `after` are `validation/...` metrics, empty where there was no evaluation; `paths` by what they hold,
    such as {"dashboard": Path(...)}, None for what was not written; `budget` says what was spent, if anything was;
    `health`: see `health_lines`; `tools`: where the loggers of others have the run, by their title.
    """
    console = console or Console()
    title = "finished" if elapsed_s is None else f"finished in {format_duration(elapsed_s)}"
    console.print(Panel(pass_rate_table(before, after, temperature), title=title, expand=False, padding=(1, 2)))
    for line in health:
        console.print(escape(line), soft_wrap=True, highlight=False)
    # Outside the panel, which would break long paths: these lines are there to be copied.
    lines = {
        **({"budget": budget} if budget else {}),
        **{what: "not written" if path is None else str(path) for what, path in paths.items()},
        **(tools or {}),
        "next": next_command,
    }
    width = max(map(len, lines))
    for what, text in lines.items():
        console.print(f"{what:<{width}}  [bold]{escape(text)}[/]", soft_wrap=True, highlight=False)


def health_lines(records: Sequence[Mapping[str, float]]) -> list[str]:
    """A line for each alarm that rang in the run, one for the guards, where they had something to do, and one where
    replay never began."""
    lines = []
    for name in sorted({name for record in records for name in record if name.startswith("alarm/")}):
        rang = [int(record["step"]) for record in records if record.get(name)]
        if rang:
            still = "still ringing at the end" if _last(records, name) else "over by the end"
            key = f"experience.alarms.{name.removeprefix('alarm/')}"
            lines.append(f"alarm: {key} rang in {len(rang)} steps, first in step {rang[0]}, {still}")
    crossings, held = int(_last(records, "guards/crossings")), sum(record.get("guards/held", 0) for record in records)
    if crossings:
        lines.append(f"guards: {crossings} steps crossed a limit of experience.guards, {held:.0f} steps were held")
    without = never_replayed(records)
    return lines if without is None else [*lines, f"replay: {without} (docs/troubleshooting.md, Replay)"]


def never_replayed(records: Sequence[Mapping[str, float]]) -> str | None:
    """That replay began in none of a run's steps, and how near it came; None where it did, or experience was off (its
    steps have no freshness)."""
    steps = [record for record in records if "freshness/data_left" in record]
    if not steps or any(record["experience/replay_on"] for record in steps):
        return None
    rates = [record["reward/pass_rate_fresh"] for record in steps if "reward/pass_rate_fresh" in record]
    best = f"the pass rate of new questions was {max(rates):.3f} at most" if rates else "no question was new"
    return f"in none of {len(steps)} steps; {best}"


def before_and_after(records: Sequence[Mapping[str, float]]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The records of a run with its evaluation before the first step, and with its last one after that; else empty."""
    evaluated = [record for record in records if any(name.startswith("validation/") for name in record)]
    before = [record for record in evaluated if record["step"] == 0]
    after = [record for record in evaluated if record["step"] > 0]
    return (before[0] if before else {}), (after[-1] if after else {})


def pass_rate_table(before: Mapping[str, float], after: Mapping[str, float], temperature: float) -> RenderableType:
    """Held-out pass rates before and after, over all questions and by category, and avg@k of sets in training."""
    if not after and not before:
        return Text("no held-out questions: set data.validation and grpo.val_period to see a pass rate here")
    sets = _sets_table(before, after)
    if not any(f"validation/{name}" in {**before, **after} for name in HEADLINES):
        return sets
    held_out = _held_out_table(before, after, temperature)
    return Group(held_out, "", sets) if sets.row_count else held_out


def _held_out_table(before: Mapping[str, float], after: Mapping[str, float], temperature: float) -> Table:
    table = Table(title="held-out pass rate", title_justify="left", box=None, pad_edge=False)
    table.add_column("questions")
    for word in headline_words(temperature).values():
        table.add_column(f"{word} before", justify="right")
        table.add_column("after", justify="right", style="bold")
    table.add_row("all", *_cells(before, after, ""))
    for category in categories({**before, **after}):
        table.add_row(escape(category), *_cells(before, after, f"/{category}"))
    return table


def _sets_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    table = Table(title="avg@k of the sets in training", title_justify="left", box=None, pad_edge=False)
    table.add_column("set")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    for name in [name for name in {**before, **after} if name.startswith(SETS)]:
        values = (side.get(name) for side in (before, after))
        cells = ["-" if value is None else f"{value:.1%}" for value in values]
        table.add_row(escape(name.removeprefix(SETS)), *cells)
    return table


def headline_words(temperature: float) -> dict[str, str]:
    """A word for each of `HEADLINES`, for people who know at which temperature was sampled."""
    return {name: f"T={temperature:g}" if name == "pass_rate_t1" else word for name, word in HEADLINES.items()}


def categories(metrics: Mapping[str, float]) -> list[str]:
    """The categories pass rates are given for; numbers in their order (2 before 10)."""
    prefixes = tuple(f"validation/{name}/" for name in HEADLINES)
    found = {name.removeprefix(prefix) for name in metrics for prefix in prefixes if name.startswith(prefix)}
    return sorted(found, key=lambda name: [(not part.isdecimal(), part.zfill(20)) for part in re.split(r"(\d+)", name)])


def _last(records: Sequence[Mapping[str, float]], name: str) -> float:
    """The value of the last record that has one; 0 where none has."""
    return next((record[name] for record in reversed(records) if name in record), 0.0)


def _cells(before: Mapping[str, float], after: Mapping[str, float], ending: str) -> list[str]:
    values = [side.get(f"validation/{name}{ending}") for name in HEADLINES for side in (before, after)]
    return ["-" if value is None else f"{value:.1%}" for value in values]
