"""Progress lines and bars."""

import io
import math

import pytest
from rich.console import Console

from exgrpo_megatron.report.console import ProgressReporter, budget_text, format_count, format_duration, step_parts

METRICS = {
    "reward/pass_rate_fresh": 0.4123,
    "experience/replayed_questions": 16,
    "experience/retired": 23,
    "experience/buffer_questions": 102,
    "experience/stored_answers": 310,
    "policy/entropy": 0.2134,
    "ratio_replayed/p01": 0.708,
    "ratio_replayed/p50": 1.0,
    "ratio_replayed/p99": 2.31,
    "policy/skipped_updates": 0,
    "reward/timeout": 0,
    "rollout/tokens_per_s": 28_400.0,
    "time/step_s": 0.834,
}


class Clock:
    """Seconds that pass only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    """As standard output redirected to a file: no terminal, 80 columns."""
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_a_step_is_one_whole_line_without_control_codes():
    console, clock = plain_console(), Clock()
    with ProgressReporter(100, "ExGRPO", done_steps=10, console=console, clock=clock) as progress:
        clock.now = 2.0
        progress.step_line(METRICS)
        clock.now = 3.0
        progress.step_line({})
    # Two steps in 3 s, 88 to go: 132 s = 2m12s; after the first, 2 s times 89 = 178 s = 2m58s.
    assert written(console) == (
        "step  11/100 | new pass 41.2% | replayed 16 | retired 23 | buffer 102 q 310 a | entropy 0.213 | "
        "ratio 1.00 (0.71-2.31) | 28.4k tok/s | 0.83 s/step | 2m58s left\n"
        "step  12/100 | 2m12s left\n"
    )


def test_the_last_step_has_no_time_left():
    console = plain_console()
    with ProgressReporter(1, "ExGRPO", console=console) as progress:
        progress.step_line({})
    assert written(console) == "step 1/1\n"


def test_guards_and_alarms_are_in_the_line_while_they_have_something_to_say():
    quiet = {"guards/held": 0.0, "guards/crossed": 0, "freshness/data_left": 0.1, "alarm/max_repeated": 0.0}
    assert step_parts(quiet) == []
    loud = {**quiet, "guards/held": 1.0, "guards/crossed": 2, "alarm/min_data_left": 1.0}
    assert step_parts(loud) == ["GUARDED", "LIMITS CROSSED 2", "ALARM min_data_left"]


def test_what_went_wrong_is_in_the_line():
    parts = step_parts(
        {"policy/skipped_updates": 1, "reward/timeout": 3, "reward/error": 2, "policy/entropy": math.nan}
    )
    assert parts == ["entropy nan", "SKIPPED updates 1", "reward time-outs 3", "reward ERRORS 2"]


def test_a_replay_step_and_what_was_spent_are_in_the_line():
    ratios = {"ratio_replay_step/p50": 1.02, "ratio_replay_step/p01": 0.5, "ratio_replay_step/p99": 2.0}
    parts = step_parts({"replay_step/answers": 32, **ratios, "replay_step/skipped_updates": 1, "budget/answers": 1520})
    assert parts == ["replay step 32 a", "ratio 1.02 (0.50-2.00)", "SKIPPED replay steps 1", "spent 1.5k a"]


def test_the_budget_is_one_line_of_whole_numbers():
    spent = {"answers": 3072, "tokens": 46080, "stored_answers": 5810, "optimizer_steps": 381}
    assert budget_text({f"budget/{name}": value for name, value in spent.items()}) == (
        "3,072 answers (46,080 tokens) generated, 5,810 stored ones trained on, 381 optimiser steps"
    )
    assert budget_text({"policy/loss": 0.0}) == ""


def test_short_steps_write_ten_lines_where_there_is_no_terminal():
    console, clock = plain_console(), Clock()
    with ProgressReporter(40, "warm start", console=console, clock=clock) as progress:
        for step in range(40):
            clock.now += 0.5
            progress.advance(f"loss {step}")
    lines = written(console).splitlines()
    assert len(lines) == 10
    assert lines[0] == "warm start 4/40 | loss 3 | 18s left"
    assert lines[-1] == "warm start 40/40 | loss 39"


def test_on_a_terminal_a_bar_stands_below_the_lines():
    console = Console(file=io.StringIO(), force_terminal=True, width=160, color_system=None)
    with ProgressReporter(2, "ExGRPO", console=console) as progress:
        progress.step_line(METRICS)
        progress.advance("loss 1.0")
    text = written(console)
    assert "step 1/2 | new pass 41.2%" in text
    assert "2/2" in text[text.rindex("ExGRPO") :]
    assert "loss 1.0" in text


def test_text_that_looks_like_markup_is_shown_as_it_is():
    console = plain_console()
    ProgressReporter(1, "ExGRPO", console=console).note("[bold] \\boxed{9} [/x]")
    assert written(console) == "[bold] \\boxed{9} [/x]\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m"), (90000, "25h00m")],
)
def test_durations(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(950.4, "950"), (28_400, "28.4k"), (1_234_567, "1.2M")])
def test_counts(value: float, text: str):
    assert format_count(value) == text
