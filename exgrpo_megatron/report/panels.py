"""The nine pictures of the dashboard; each draws one aspect of a run into one matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from exgrpo_megatron.report.run_data import FloatArray, RunData

ORANGE, BLUE, GREEN, AMBER = "#d9480f", "#1c7ed6", "#2b8a3e", "#f08c00"
VIOLET, TEAL, RED, INK, GREY = "#6741d9", "#0b7285", "#e03131", "#212529", "#868e96"

TIME_PARTS: dict[str, str] = {
    "draw": "#ced4da",
    "select": "#b197fc",
    "rollout": "#74c0fc",
    "reward": "#69db7c",
    "old_logprobs": "#ffe066",
    "record": "#868e96",
    "update": "#ffa94d",
    "replay_step": "#e8590c",
    "push": "#f783ac",
}
"""Parts of a step in their order, with their colour: `time/<part>_s`."""

SMOOTHING = 0.25
"""Weight of the newest value in the smoothed pass rate."""


def draw_pass_rate(ax: Axes, run: RunData) -> None:
    """New answers (smoothed), held-out at T=1 and greedy, and the rate above which replay starts."""
    ax.set(title="Pass rate", ylim=(0, 1))
    fresh = run.series("reward/pass_rate_fresh")
    _line(ax, fresh.steps, fresh.values, color=ORANGE, alpha=0.3, lw=0.8)
    _line(ax, fresh.steps, smoothed(fresh.values), color=ORANGE, label="new answers (smoothed)")
    temperature = run.config.eval.temperature
    for name, style, color, label in (
        ("validation/pass_rate_t1", "o-", INK, f"held-out, T={temperature:g}"),
        ("validation/pass_rate_greedy", "s--", GREY, "held-out, greedy"),
    ):
        held_out = run.series(name)
        if len(held_out):
            ax.plot(held_out.steps, held_out.values, style, color=color, ms=4, lw=1.4, label=label)
    experience = run.config.experience
    start = experience.start_pass_rate if experience.in_groups else None
    if experience.in_steps and start is None:
        start = experience.replay_step.start_pass_rate
    if start is not None:
        ax.axhline(start, color=GREEN, lw=0.9, ls="--", label=f"replay starts above {start:.0%}")
    stop = run.config.experience.stop_pass_rate
    if run.config.experience.enabled and stop is not None:
        ax.axhline(stop, color=RED, lw=0.9, ls="--", label=f"replay stops below {stop:.0%}")
    _legend(ax)


def draw_buckets(ax: Axes, run: RunData) -> None:
    """Heat map: questions in the buffer by the number correct in their latest group."""
    ax.set(title="Buffer: questions by latest number correct", ylabel="correct of K")
    counts = range(1, run.config.grpo.num_generations_per_prompt)
    steps, table = run.table([f"experience/bucket_{k}" for k in counts])
    if not table.any():
        _nothing(ax, _without_replay(run, "the buffer is empty"))
        return
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    mesh = ax.pcolormesh(
        edges, np.arange(len(counts) + 1) + 0.5, table, cmap="magma_r", vmin=0, vmax=max(1, table.max())
    )
    ax.grid(visible=False)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=30, ticks=MaxNLocator(integer=True, nbins=7))
    bar.outline.set_visible(False)


def draw_buffer(ax: Axes, run: RunData) -> None:
    """Questions in the buffer and retired (left), stored answers (right); steps in which an alarm rang."""
    ax.set_title("Experience")
    questions, retired = run.series("experience/buffer_questions"), run.series("experience/retired")
    answers = run.series("experience/stored_answers")
    if not len(questions) and not len(retired):
        _nothing(ax, _without_replay(run, "nothing recorded"))
        return
    _line(ax, questions.steps, questions.values, color=BLUE, label="questions in the buffer")
    _line(ax, retired.steps, retired.values, color=GREEN, label="questions retired")
    _shade(ax, _ringing(run), RED, "an alarm rings")
    right = ax.twinx()
    _line(right, answers.steps, answers.values, color=AMBER, ls="--", lw=1.3, label="answers stored (right)")
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.tick_params(axis="y", colors=AMBER)
    for side in (ax, right):
        side.set_ylim(0, 1.3 * max(side.get_ylim()[1], 1))
    handles = ax.get_legend_handles_labels()[0] + right.get_legend_handles_labels()[0]
    _legend(ax, handles=handles, loc="upper left")


def draw_ratios(ax: Axes, run: RunData) -> None:
    """Quantile band of the replayed tokens' ratio, those of groups if there are any, on a log scale; steps that a guard
    held."""
    ax.set_title("Ratio of replayed tokens (new / recorded)")
    name = "ratio_replayed" if len(run.series("ratio_replayed/p50")) else "ratio_replay_step"
    p01, p50, p99 = (run.series(f"{name}/{stat}") for stat in ("p01", "p50", "p99"))
    if not len(p50):
        _nothing(ax, _without_replay(run, "nothing replayed yet"))
        return
    _log_scale(ax)
    held = run.series("guards/held")
    _shade(ax, held.steps[held.values > 0], BLUE, "held by a guard")
    ax.axhline(1, color=INK, lw=0.6)
    if len(p50) > 1:
        ax.fill_between(p50.steps, p01.values, p99.values, color=ORANGE, alpha=0.25, lw=0, label="1% to 99%")
    else:
        ax.vlines(p50.steps, p01.values, p99.values, color=ORANGE, alpha=0.4, lw=6, label="1% to 99%")
    _line(ax, p50.steps, p50.values, color=ORANGE, label="median")
    for stat, color in (("max", INK), ("min", GREY)):
        extreme = run.series(f"{name}/{stat}")
        ax.plot(extreme.steps, extreme.values, ".", color=color, ms=4, label=stat)
    ax.set_ylim(bottom=ax.get_ylim()[0] / 4)
    _legend(ax, loc="lower right", ncols=4)


def draw_entropy(ax: Axes, run: RunData) -> None:
    """Mean token entropy."""
    entropy = run.series("policy/entropy")
    ax.set_title("Mean token entropy (nats)")
    _line(ax, entropy.steps, entropy.values, color=VIOLET)
    _from_zero(ax, entropy.values)


def draw_response_length(ax: Axes, run: RunData) -> None:
    """Mean length of the sampled responses, in training and held out."""
    ax.set_title("Response length (tokens)")
    sampled, held_out = run.series("rollout/response_length"), run.series("validation/response_length")
    _line(ax, sampled.steps, sampled.values, color=TEAL, label="new answers")
    if len(held_out):
        ax.plot(held_out.steps, held_out.values, "o-", color=INK, ms=4, lw=1.2, label="held-out")
    _from_zero(ax, np.append(sampled.values, held_out.values))
    _legend(ax)


def draw_groups(ax: Axes, run: RunData) -> None:
    """Share of groups that give a gradient."""
    ax.set_title("Groups of the step")
    names = {"none_correct": "none correct", "mixed": "mixed (gives a gradient)", "all_correct": "all correct"}
    steps, shares = run.table([f"groups/{name}" for name in names])
    if not shares.any():
        _nothing(ax, "nothing recorded")
        return
    _stack(ax, steps, shares, list(names.values()), ["#ffc9c9", "#ffe066", "#b2f2bb"])
    ax.set_ylim(0, 1)
    _legend(ax, loc="lower right")


def draw_time(ax: Axes, run: RunData) -> None:
    """Where the time of a step goes; parts that took no time are left out."""
    ax.set_title("Seconds of a step")
    steps, seconds = run.table([f"time/{part}_s" for part in TIME_PARTS])
    shown = [i for i, row in enumerate(seconds) if row.any()]
    if not shown:
        _nothing(ax, "nothing recorded")
        return
    parts = list(TIME_PARTS)
    _stack(
        ax, steps, seconds[shown], [parts[i].replace("_", " ") for i in shown], [TIME_PARTS[parts[i]] for i in shown]
    )
    ax.set_ylim(0, 1.35 * seconds.sum(axis=0).max())
    _legend(ax, loc="upper center", ncols=3)


def draw_health(ax: Axes, run: RunData) -> None:
    """Gradient norm, its bound, the largest ratios, and the updates that were skipped."""
    ax.set_title("Update: gradient norm and largest ratios")
    norm, skipped = run.series("policy/grad_norm"), run.series("policy/skipped_updates")
    if not len(norm):
        _nothing(ax, "nothing recorded")
        return
    _log_scale(ax)
    _line(ax, norm.steps, norm.values, color=INK, label="gradient norm")
    of_steps = run.series("replay_step/grad_norm")
    _line(ax, of_steps.steps, of_steps.values, color=GREEN, label="gradient norm, replay step")
    bound = run.config.policy.max_grad_norm
    ax.axhline(bound, color=INK, lw=0.8, ls="--", label=f"clipped to {bound:g}")
    for name, color, label in (
        ("ratio_fresh", BLUE, "new tokens"),
        ("ratio_replayed", ORANGE, "replayed tokens"),
        ("ratio_replay_step", AMBER, "replay step"),
    ):
        largest = run.series(f"{name}/max")
        _line(ax, largest.steps, largest.values, color=color, lw=1.0, label=f"max ratio, {label}")
    for i, step in enumerate(skipped.steps[skipped.values > 0]):
        ax.axvline(step, color=RED, lw=1.2, alpha=0.5, label=None if i else "update skipped")
    ax.set_ylim(top=12 * ax.get_ylim()[1])
    _legend(ax, loc="upper left", ncols=2)


PANELS = (
    draw_pass_rate,
    draw_buckets,
    draw_buffer,
    draw_ratios,
    draw_entropy,
    draw_response_length,
    draw_groups,
    draw_time,
    draw_health,
)
"""In reading order."""


def smoothed(values: FloatArray) -> FloatArray:
    """Exponential moving average from the first value on, shape [points]; what is not finite is passed over."""
    averages, average = np.full_like(values, np.nan), np.nan
    for i in np.flatnonzero(np.isfinite(values)):
        average = values[i] if np.isnan(average) else average + SMOOTHING * (values[i] - average)
        averages[i] = average
    return averages


def _line(ax: Axes, steps: FloatArray, values: FloatArray, **style: Any) -> None:
    """A line; a single point, of which a line shows nothing, as a dot; nothing, not even a label, for no points."""
    if len(steps):
        ax.plot(steps, values, marker="o" if len(steps) == 1 else "", **{"lw": 1.6, "ms": 5, **style})


def _stack(ax: Axes, steps: FloatArray, rows: FloatArray, labels: Sequence[str], colors: Sequence[str]) -> None:
    """Stacked areas; a single step, of which an area shows nothing, as a bar."""
    if len(steps) > 1:
        ax.stackplot(steps, rows, labels=labels, colors=colors, lw=0)
        return
    bottom = np.zeros(len(steps))
    for row, label, color in zip(rows, labels, colors, strict=True):
        ax.bar(steps, row, bottom=bottom, width=0.6, label=label, color=color)
        bottom = bottom + row


def _ringing(run: RunData) -> FloatArray:
    """Steps in which an alarm of `experience.alarms` rang."""
    ringing = [
        record["step"]
        for record in run.records
        if any(value == 1 for name, value in record.items() if name.startswith("alarm/"))
    ]
    return np.array(ringing, np.float64)


def _shade(ax: Axes, steps: FloatArray, color: str, label: str) -> None:
    """A band behind the steps, those that follow each other together."""
    stretches = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1) if len(steps) else []
    for i, stretch in enumerate(stretches):
        ax.axvspan(stretch[0] - 0.5, stretch[-1] + 0.5, color=color, alpha=0.12, lw=0, label=None if i else label)


def _from_zero(ax: Axes, values: FloatArray) -> None:
    finite = values[np.isfinite(values)]
    if len(finite):
        ax.set_ylim(0, 1.15 * max(finite.max(), 1e-6))
    else:
        _nothing(ax, "nothing recorded")


def _legend(ax: Axes, **options: Any) -> None:
    if ax.get_legend_handles_labels()[1]:
        ax.legend(**{"fontsize": 8, "loc": "best", "framealpha": 0.85, "borderpad": 0.4, **options})


def _log_scale(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _without_replay(run: RunData, otherwise: str) -> str:
    return otherwise if run.config.experience.enabled else "experience replay is off"


def _nothing(ax: Axes, reason: str) -> None:
    ax.text(0.5, 0.5, reason, ha="center", va="center", color=GREY, transform=ax.transAxes)
    ax.set_yticks([])
    ax.grid(visible=False)
