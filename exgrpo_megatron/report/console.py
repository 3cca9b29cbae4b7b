"""What a run shows while it is running: a progress bar, and one line a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINES = 10
"""Lines `advance` writes over a whole run where there is no terminal."""

Metrics = Mapping[str, float]


class ProgressReporter:
    """A progress bar with lines above it; where the output is no terminal, the lines alone, without control codes.

    A context manager. Only rank 0 should have one.
    """

    def __init__(
        self,
        total_steps: int,
        label: str,
        *,
        done_steps: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done_steps` were done before (a resumed run); `clock` gives seconds."""
        self.total_steps = total_steps
        self.label = label
        self.step = done_steps
        self._console = console or Console()
        self._clock = clock
        self._started_at, self._started_step = clock(), done_steps
        self._bar = self._make_bar() if self._console.is_terminal else None

    def __enter__(self) -> ProgressReporter:
        self._started_at, self._started_step = self._clock(), self.step
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step_line(self, metrics: Metrics) -> None:
        """One training step is done: advance the bar and write its line, without the parts whose metric is absent."""
        self._advance_bar()
        parts = [f"step {self.step:>{len(str(self.total_steps))}}/{self.total_steps}", *step_parts(metrics)]
        if self.step < self.total_steps:
            parts.append(f"{format_duration(self.seconds_left)} left")
        self.note(" | ".join(parts))

    def advance(self, text: str = "") -> None:
        """One short step is done (as of a warm start): `text` stands by the bar; where there is none, some lines do."""
        self._advance_bar(text)
        period = max(1, self.total_steps // PLAIN_LINES)
        if self._bar is None and (self.step % period == 0 or self.step == self.total_steps):
            left = f" | {format_duration(self.seconds_left)} left" if self.step < self.total_steps else ""
            self.note(f"{self.label} {self.step}/{self.total_steps}{' | ' if text else ''}{text}{left}")

    def skip(self, steps: int) -> None:
        """So many short steps were done by an earlier run."""
        self.step += steps
        self._started_at, self._started_step = self._clock(), self.step

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(escape(text), soft_wrap=True, highlight=False)

    @property
    def seconds_left(self) -> float:
        """Remaining steps times the mean time of a step since this reporter began, evaluations included."""
        done = self.step - self._started_step
        elapsed = self._clock() - self._started_at
        return elapsed / done * (self.total_steps - self.step) if done else 0.0

    def _make_bar(self) -> Progress:
        bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
        )
        self._task = bar.add_task(self.label, total=self.total_steps, completed=self.step, text="")
        return bar

    def _advance_bar(self, text: str = "") -> None:
        self.step += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.step, text=escape(text))


def step_parts(metrics: Metrics) -> list[str]:
    """The figures of a step's line, each with its word; first how well, then experience, then health, then speed."""
    formats: list[tuple[str, Callable[[float], str]]] = [
        ("reward/pass_rate_fresh", lambda value: f"new pass {value:.1%}"),
        ("reward/mean", lambda value: f"reward {value:.3f}"),
        ("experience/replayed_questions", lambda value: f"replayed {value:.0f}"),
        ("replay_step/answers", lambda value: f"replay step {value:.0f} a"),
        ("experience/retired", lambda value: f"retired {value:.0f}"),
        ("experience/buffer_questions", lambda value: _buffer(value, metrics)),
        ("policy/entropy", lambda value: f"entropy {value:.3f}"),
        ("ratio_replayed/p50", lambda value: _ratio("ratio_replayed", value, metrics)),
        ("ratio_replay_step/p50", lambda value: _ratio("ratio_replay_step", value, metrics)),
        ("guards/held", lambda value: "GUARDED" if value else ""),
        ("guards/crossed", lambda value: f"LIMITS CROSSED {value:.0f}" if value else ""),
        ("freshness/data_left", lambda _: _alarms(metrics)),
        ("policy/skipped_updates", lambda value: f"SKIPPED updates {value:.0f}" if value else ""),
        ("replay_step/skipped_updates", lambda value: f"SKIPPED replay steps {value:.0f}" if value else ""),
        ("reward/timeout", lambda value: f"reward time-outs {value:.0f}" if value else ""),
        ("reward/error", lambda value: f"reward ERRORS {value:.0f}" if value else ""),
        ("budget/answers", lambda value: f"spent {format_count(value)} a"),
        ("rollout/tokens_per_s", lambda value: f"{format_count(value)} tok/s"),
        ("time/step_s", lambda value: f"{value:.2f} s/step"),
    ]
    return [text for name, form in formats if name in metrics and (text := form(metrics[name]))]


def budget_text(metrics: Metrics) -> str:
    """What a run has spent up to a step; empty where the step says nothing of it."""
    if "budget/answers" not in metrics:
        return ""
    answers, tokens, stored, steps = (
        f"{metrics[f'budget/{name}']:,.0f}" for name in ("answers", "tokens", "stored_answers", "optimizer_steps")
    )
    return f"{answers} answers ({tokens} tokens) generated, {stored} stored ones trained on, {steps} optimiser steps"


def evaluation_line(step: int, metrics: Metrics, temperature: float) -> str:
    """The held-out pass rates after a step (0: before the first)."""
    words = {"validation/pass_rate_t1": f"T={temperature:g}", "validation/pass_rate_greedy": "greedy"}
    rates = [f"{word} {metrics[name]:.1%}" for name, word in words.items() if name in metrics]
    rewards = {"validation/reward_t1": f"T={temperature:g}", "validation/reward_greedy": "greedy"}
    rates += [f"reward {word} {metrics[name]:.3f}" for name, word in rewards.items() if name in metrics]
    rates += [
        f"{name.rpartition('/')[2]} {value:.1%}"
        for name, value in metrics.items()
        if name.startswith("validation/avg/")
    ]
    return f"held out, {f'after step {step}' if step else 'before the first step'}: {', '.join(rates)}"


def format_duration(seconds: float) -> str:
    """`48s`, `3m07s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_count(value: float) -> str:
    """`950`, `28.4k`, `1.2M`."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def _alarms(metrics: Metrics) -> str:
    ringing = [name.removeprefix("alarm/") for name, value in metrics.items() if name.startswith("alarm/") and value]
    return f"ALARM {', '.join(ringing)}" if ringing else ""


def _buffer(questions: float, metrics: Metrics) -> str:
    answers = metrics.get("experience/stored_answers")
    return f"buffer {questions:.0f} q" + ("" if answers is None else f" {answers:.0f} a")


def _ratio(name: str, median: float, metrics: Metrics) -> str:
    low, high = (metrics.get(f"{name}/{stat}", float("nan")) for stat in ("p01", "p99"))
    return f"ratio {median:.2f} ({low:.2f}-{high:.2f})"
