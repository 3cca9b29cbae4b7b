"""A simulated run in a few numbers, a table, a picture and files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.table import Table

from exgrpo_megatron.config import whole_share
from exgrpo_megatron.experience.history import HISTORY_FILE, HistoryWriter
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.metric_sinks import JsonlSink
from exgrpo_megatron.recipe import dump_recipe
from exgrpo_megatron.report.dashboard import STYLE
from exgrpo_megatron.report.panels import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    draw_buckets,
    draw_buffer,
    draw_groups,
    draw_pass_rate,
)
from exgrpo_megatron.report.run_data import RunData
from exgrpo_megatron.simulation.run import Assumptions, Simulated

_ROWS = 12
"""Steps that a table shows."""


def summary(run: Simulated) -> dict[str, Any]:
    """What became of replay, of the questions and of the buffer; null for what did not happen."""
    steps, last = run.records, run.records[-1]
    batch = run.config.grpo.num_prompts_per_step
    experience = run.config.experience
    in_groups = experience.enabled and experience.strategy != "replay_step"
    full = whole_share(experience.replay_ratio, batch) if in_groups else 0
    replayed = [step["experience/replayed_questions"] for step in steps]
    return {
        "steps": len(steps),
        "questions": run.num_questions,
        "replay_starts_at_step": _first(steps, "experience/replay_on", 1),
        "full_share_from_step": _first(steps, "experience/replayed_questions", full) if full else None,
        "mean_replay_share": sum(replayed) / (batch * len(steps)),
        "answers_of_replay_steps": sum(_replay_steps(step) for step in steps),
        "buffer_questions": last["experience/buffer_questions"],
        "stored_answers": last["experience/stored_answers"],
        "stored_bytes": last["experience/stored_bytes"],
        "most_stored_answers": max(step["experience/stored_answers"] for step in steps),
        "retired_questions": last["experience/retired"],
        "retired_share": last["experience/retired"] / run.num_questions,
        "epochs_of_new_questions": sum(_taken(run)) / run.num_questions,
        "new_questions_left": last["data/questions_left"],
        "steps_until_all_are_retired": last.get("freshness/steps_left"),
        "mean_true_pass_rate": run.true_rates[-1],
    }


def steps_table(run: Simulated) -> Table:
    """A dozen steps of the run."""
    table = _table("Simulated run")
    for title in ("step", "new pass", "replayed", "buffer", "retired", "answers", "MB", "epoch", "questions left"):
        table.add_column(title, justify="right")
    extra = run.config.experience.strategy != "exgrpo"
    if extra:
        table.add_column("replay step", justify="right")
    batch = run.config.grpo.num_prompts_per_step
    for step in _shown(run.records):
        table.add_row(
            f"{step['step']:.0f}",
            f"{step['reward/pass_rate_fresh']:.1%}",
            f"{step['experience/replayed_questions'] / batch:.0%}",
            *(f"{step[f'experience/{name}']:.0f}" for name in ("buffer_questions", "retired", "stored_answers")),
            f"{step['experience/stored_bytes'] / 1e6:.1f}",
            f"{step['data/epoch']:.0f}",
            f"{step['data/questions_left']:.0f}",
            *([f"{_replay_steps(step):.0f}"] if extra else []),
        )
    return table


def buckets_table(run: Simulated) -> Table:
    """Questions in the buffer by their latest number correct, at the same steps."""
    buckets = range(1, run.config.grpo.num_generations_per_prompt)
    table = _table("Questions with k correct")
    for title in ("step", *(f"k = {k}" for k in buckets)):
        table.add_column(title, justify="right")
    for step in _shown(run.records):
        table.add_row(f"{step['step']:.0f}", *(f"{step[f'experience/bucket_{k}']:.0f}" for k in buckets))
    return table


def summary_table(found: dict[str, Any]) -> Table:
    """The summary, a line a number."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), _shown_value(name, value))
    return table


def write_outcome(folder: Path, run: Simulated, found: dict[str, Any], assumptions: Assumptions, rates: str) -> None:
    """`simulation.json`, `.csv` and `.png`, and recipe, metrics and history as a run has them, for `exgrpo report`.

    The recipe comes last: without it a folder is nobody's run, and what was killed half-way can be written again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").unlink(missing_ok=True)
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.truncate_after(-1)
    for step in run.records:
        sink.write(int(step["step"]), {name: value for name, value in step.items() if name != "step"})
    history = HistoryWriter(folder / HISTORY_FILE)
    history.truncate_after(-1)
    for number, events in run.events:
        history.write(number, events)
    content = {"rates": rates, "assumptions": asdict(assumptions), "summary": found}
    replace_text(folder / "simulation.json", json.dumps(content, indent=1) + "\n")
    replace_text(folder / "simulation.csv", _csv(run))
    figure = draw_outcome(run, folder.resolve().name)
    figure.savefig(folder / "simulation.png", dpi=100, format="png")
    replace_text(folder / "recipe.yaml", dump_recipe(run.config))


def draw_outcome(run: Simulated, name: str) -> Figure:
    """Six pictures: pass rate, buckets, buffer, groups, share of replay, use of new questions."""
    data = RunData(name, run.config, run.records)
    with rc_context(STYLE):
        figure = Figure(figsize=(14.0, 7.0), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        FigureCanvasAgg(figure)
        panels: list[Axes] = list(figure.subplots(2, 3).flat)
        draws = (draw_pass_rate, draw_buckets, draw_buffer, draw_groups, _draw_share)
        for ax, draw in zip(panels[:-1], draws, strict=True):
            draw(ax, data)
        _draw_use(panels[-1], run)
        for ax in panels:
            ax.set_xlim(0.5, len(run.records) + 0.5)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
        for ax in panels[3:]:
            ax.set_xlabel("step")
        figure.suptitle(f"{name}   |   simulated, no model", fontsize=12, x=0.01, ha="left")
    return figure


def _draw_share(ax: Axes, run: RunData) -> None:
    ax.set(title="Share of the batch that is replayed", ylim=(0, 1))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    replayed, batch = run.series("experience/replayed_questions"), run.config.grpo.num_prompts_per_step
    ax.axhline(run.config.experience.replay_ratio, color=GREY, ls="--", lw=1, label="experience.replay_ratio")
    ax.plot(replayed.steps, replayed.values / batch, color=BLUE, lw=1.6, label="achieved")
    ax.legend(fontsize=8)


def _draw_use(ax: Axes, run: Simulated) -> None:
    ax.set_title("New questions")
    steps = [step["step"] for step in run.records]
    ax.plot(
        steps, [step["data/questions_left"] for step in run.records], color=GREEN, lw=1.6, label="left for an epoch"
    )
    ax.set_ylim(bottom=0)
    right = ax.twinx()
    used = list(accumulate(taken / run.num_questions for taken in _taken(run)))
    right.plot(steps, used, color=AMBER, lw=1.3, ls="--", label="used up so far, in data sets (right)")
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.tick_params(axis="y", colors=AMBER)
    right.set_ylim(bottom=0)
    handles = ax.get_legend_handles_labels()[0] + right.get_legend_handles_labels()[0]
    ax.legend(handles=handles, fontsize=8, loc="lower right")


def _taken(run: Simulated) -> list[float]:
    """New questions that each step used up, those thrown away included."""
    batch = run.config.grpo.num_prompts_per_step
    return [batch - step["experience/replayed_questions"] + step["data/discarded"] for step in run.records]


def _replay_steps(step: dict[str, float]) -> float:
    """Stored answers that a step's replay steps train on."""
    return step.get("replay_step/answers", 0.0)


def _first(steps: Sequence[dict[str, float]], name: str, least: float) -> int | None:
    return next((int(step["step"]) for step in steps if step[name] >= least), None)


def _shown(steps: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [steps[i] for i in sorted({round(i * (len(steps) - 1) / (_ROWS - 1)) for i in range(_ROWS)})]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def _shown_value(name: str, value: Any) -> str:
    if value is None:
        return "never"
    if name.endswith(("share", "rate")):
        return f"{value:.1%}"
    if name == "stored_bytes":
        return f"{value / 1e6:.1f} MB"
    return f"{value:,.2f}" if name.startswith("epochs") else f"{value:,.0f}"


def _csv(run: Simulated) -> str:
    text = io.StringIO()
    names = list(dict.fromkeys(name for step in run.records for name in step))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "true_pass_rate"])
    for step, rate in zip(run.records, run.true_rates, strict=True):
        writer.writerow([*(step.get(name, "") for name in names), rate])
    return text.getvalue()
