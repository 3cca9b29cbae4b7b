"""Tables and pictures of benchmarks/learning.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from learning_run import Measured
from learning_settings import EVALUATE_EVERY, TASKS, Setting, Task

from exgrpo_megatron.report.bands import Panel, write_bands
from exgrpo_megatron.report.seeds import Curve, markdown_table, mean_interval, paired_difference

BySeed = Mapping[int, Measured]


def tables(settings: Sequence[Setting], measured: Sequence[Measured]) -> str:
    """A Markdown table a task and group; a setting without a finished run is left out."""
    parts = []
    for task, group in dict.fromkeys((setting.task, setting.group) for setting in settings):
        runs = _runs([setting for setting in settings if (setting.task, setting.group) == (task, group)], measured)
        if runs:
            parts.append(
                f"### {TASKS[task].title}: {group}\n\n{_table(TASKS[task], runs, _first(settings, measured, task))}"
            )
    return "\n".join(parts)


def draw_pictures(settings: Sequence[Setting], measured: Sequence[Measured], out: Path) -> list[Path]:
    """A picture a task and group: pass rates over answers, and over CPU seconds; returns the paths."""
    paths = []
    for task, group in dict.fromkeys((setting.task, setting.group) for setting in settings):
        runs = _runs([setting for setting in settings if (setting.task, setting.group) == (task, group)], measured)
        for name, label, budget in (
            ("answers", "answers generated", lambda run: run.answers),
            ("cpu", "CPU seconds of training", lambda run: run.cpu_s),
        ):
            if runs:
                path = out / f"{task}_{group}_{name}.png"
                paths.append(write_bands(path, _panels(runs, budget), label, TASKS[task].title))
    return paths


def curve(run: Measured, values: Sequence[float], budget: Sequence[float] | None = None) -> Curve:
    """A metric of a run over answers, or over another budget."""
    return Curve(np.asarray(budget or run.answers, np.float64), np.asarray(values, np.float64))


def _runs(settings: Sequence[Setting], measured: Sequence[Measured]) -> dict[str, BySeed]:
    """Setting -> seed -> run, in the order of the settings."""
    by_setting = {
        setting.name: {run.seed: run for run in measured if (run.task, run.setting) == (setting.task, setting.name)}
        for setting in settings
    }
    return {name: runs for name, runs in by_setting.items() if runs}


def _first(settings: Sequence[Setting], measured: Sequence[Measured], task: str) -> BySeed:
    """The runs that others are compared with: those of the task's first setting."""
    return next(iter(_runs([setting for setting in settings if setting.task == task], measured).values()))


def _table(task: Task, runs: Mapping[str, BySeed], first: BySeed) -> str:
    # Where runs are of different lengths, all are compared where the shortest ends, and the longer ones at their end.
    marks = sorted({_whole(run.answers[-1]) for by_seed in runs.values() for run in by_seed.values()})
    end = marks[0]
    levels = (task.level / 2, task.level)
    columns = [
        "setting", "n", *(f"T=1 at {mark}" for mark in marks), *(f"greedy at {mark}" for mark in marks),
        f"area to {end}", f"less the first's T=1 at {end}", *(f"answers to T=1 {level}" for level in levels),
        *(f"T=1 at {mark:.0f} CPU s" for mark in task.cpu_marks_s), "CPU s per 1000 answers", "informative groups",
    ]  # fmt: skip
    rows = []
    for name, by_seed in runs.items():
        listed = list(by_seed.values())
        curves = [curve(run, run.t1) for run in listed]
        rows.append([
            name, str(len(listed)),
            *(_interval([one.at(mark) for one in curves]) for mark in marks),
            *(_interval([curve(run, run.greedy).at(mark) for run in listed]) for mark in marks),
            _interval([one.mean_until(end) for one in curves]),
            _difference(by_seed, first, end),
            *(_reached([one.first_at_least(level) for one in curves]) for level in levels),
            *(_interval([curve(run, run.t1, run.cpu_s).at(mark) for run in listed]) for mark in task.cpu_marks_s),
            _interval([1000 * run.cpu_s[-1] / run.answers[-1] for run in listed], 2),
            _interval([float(np.mean(run.informative[1:])) for run in listed], 2),
        ])  # fmt: skip
    return markdown_table(columns, rows)


def _whole(answers: int) -> int:
    """Without what the last step went beyond the setting's length."""
    return answers // EVALUATE_EVERY * EVALUATE_EVERY


def _interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and interval; nothing where a run ended before."""
    return mean_interval(values).describe(digits) if all(map(np.isfinite, values)) else "-"


def _difference(one: BySeed, first: BySeed, end: int) -> str:
    if one is first or (one.keys() == first.keys() and all(one[seed] is first[seed] for seed in one)):
        return "-"
    values = [{seed: curve(run, run.t1).at(end) for seed, run in runs.items()} for runs in (one, first)]
    if any(not np.isfinite(value) for of_seed in values for value in of_seed.values()):
        return "-"
    difference = paired_difference(*values)
    return "-" if difference is None else difference.describe()


def _reached(values: Sequence[float | None]) -> str:
    """The mean where every run got there, else how many did and when."""
    there = [value for value in values if value is not None]
    if len(there) == len(values):
        return mean_interval(there).describe(0)
    return f"{len(there)}/{len(values)}" + (
        f" ({', '.join(f'{value:.0f}' for value in sorted(there))})" if there else ""
    )


def _panels(runs: Mapping[str, BySeed], budget: Callable[[Measured], Sequence[float]]) -> list[Panel]:
    return [
        Panel(
            title,
            {
                name: [curve(run, values(run), budget(run)) for run in by_seed.values()]
                for name, by_seed in runs.items()
            },
        )
        for title, values in (
            ("held-out pass rate at T=1", lambda run: run.t1),
            ("held-out pass rate, greedy", lambda run: run.greedy),
        )
    ]
