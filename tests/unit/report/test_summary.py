"""The panel at the end of a run."""

import io
from pathlib import Path

from rich.console import Console

from exgrpo_megatron.report.summary import before_and_after, categories, health_lines, run_summary

BEFORE = {
    "validation/pass_rate_t1": 0.2,
    "validation/pass_rate_greedy": 0.21,
    "validation/pass_rate_greedy/10": 0.1,
    "validation/pass_rate_greedy/2": 0.4,
    "validation/response_length": 11.0,
}
AFTER = {
    "validation/pass_rate_t1": 0.704,
    "validation/pass_rate_greedy": 0.9167,
    "validation/pass_rate_greedy/10": 0.8,
    "validation/pass_rate_greedy/2": 1.0,
    "validation/pass_rate_t1/2": 0.99,
}


def summary(**changed: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    given = {"before": BEFORE, "after": AFTER, "paths": {}, "next_command": "exgrpo report runs/a", **changed}
    run_summary(**given, console=console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return [line.strip(" │") for line in console.file.getvalue().splitlines()]


def rows(lines: list[str]) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in lines if line.endswith(("%", "-"))}


def test_pass_rates_stand_before_and_after_over_all_and_by_category():
    lines = summary()
    assert "questions  T=1 before  after  greedy before   after" in lines
    assert rows(lines) == {
        "all": ["20.0%", "70.4%", "21.0%", "91.7%"],
        "2": ["-", "99.0%", "40.0%", "100.0%"],
        "10": ["-", "-", "10.0%", "80.0%"],
    }


def test_categories_with_numbers_stand_in_the_order_of_the_numbers():
    names = ["10 terms", "2 terms", "algebra", "geometry/plane"]
    assert categories({f"validation/pass_rate_t1/{name}": 0.0 for name in reversed(names)}) == [
        "2 terms",
        "10 terms",
        "algebra",
        "geometry/plane",
    ]


def test_what_was_spent_stands_before_the_paths():
    lines = summary(paths={"metrics": Path("m.jsonl")}, budget="16 answers")
    assert lines[-3:] == ["budget   16 answers", "metrics  m.jsonl", "next     exgrpo report runs/a"]


def test_where_other_tools_have_the_run_stands_behind_the_paths():
    lines = summary(paths={"metrics": Path("m.jsonl")}, tools={"MLflow": "run 1 of sqlite:///m.db; mlflow ui"})
    assert lines[-3:] == [
        "metrics  m.jsonl",
        "MLflow   run 1 of sqlite:///m.db; mlflow ui",
        "next     exgrpo report runs/a",
    ]


def test_paths_and_the_next_command_are_whole_lines_to_copy():
    path = Path("runs") / ("long" * 30) / "dashboard.png"
    lines = summary(paths={"dashboard": path, "HF export": None}, elapsed_s=187.0)
    assert lines[-3:] == [f"dashboard  {path}", "HF export  not written", "next       exgrpo report runs/a"]
    assert "finished in 3m07s" in lines[0]


def test_a_run_without_held_out_questions_says_how_to_get_a_pass_rate():
    assert any("no held-out questions: set data.validation" in line for line in summary(before={}, after={}))


def test_sets_in_training_have_a_table_of_their_own():
    before, after = {"validation/avg/aime24": 0.125}, {"validation/avg/aime24": 0.5, "validation/avg/amc": 1.0}
    lines = summary(before=before, after=after)
    rows = [line.strip("│ ").split() for line in lines]
    assert ["aime24", "12.5%", "50.0%"] in rows
    assert ["amc", "-", "100.0%"] in rows
    assert not any("held-out" in line for line in lines)
    lines = summary(before={**BEFORE, **before}, after={**AFTER, **after})
    assert any("held-out pass rate" in line for line in lines)
    assert ["aime24", "12.5%", "50.0%"] in [line.strip("│ ").split() for line in lines]


def test_an_evaluation_after_training_alone_is_not_shown_as_the_one_before():
    trained, last = {"step": 1, "reward/pass_rate": 0.5}, {"step": 2, **AFTER}
    assert before_and_after([trained, last]) == ({}, last)
    first, middle = {"step": 0, **BEFORE}, {"step": 1, **BEFORE}
    assert before_and_after([first, middle, last]) == (first, last)
    assert before_and_after([first, trained]) == (first, {})
    assert before_and_after([trained]) == ({}, {})


def test_alarms_and_guards_of_the_run_are_told_at_its_end():
    records = [
        {"step": 1, "alarm/min_data_left": 0, "alarm/max_repeated": 0, "guards/crossings": 1, "guards/held": 0},
        {"step": 2, "alarm/min_data_left": 1, "alarm/max_repeated": 1, "guards/crossings": 1, "guards/held": 1},
        {"step": 3, "alarm/min_data_left": 1, "alarm/max_repeated": 0, "guards/crossings": 2, "guards/held": 1},
        {"step": 3, **AFTER},
    ]
    health = health_lines(records)
    assert health == [
        "alarm: experience.alarms.max_repeated rang in 1 steps, first in step 2, over by the end",
        "alarm: experience.alarms.min_data_left rang in 2 steps, first in step 2, still ringing at the end",
        "guards: 2 steps crossed a limit of experience.guards, 2 steps were held",
    ]
    assert set(health) <= set(summary(health=health))
    assert health_lines([{"step": 1, "alarm/min_data_left": 0, "guards/crossings": 0, "guards/held": 0}]) == []


def test_a_run_in_which_replay_never_began_says_how_near_it_came():
    on_policy = {"experience/replay_on": 0, "reward/pass_rate_fresh": 0.9}
    waiting = [{**on_policy, "step": step, "freshness/data_left": 1.0} for step in (1, 2)]
    waiting[0]["reward/pass_rate_fresh"] = 0.25
    assert health_lines([on_policy]) == []  # experience.enabled = false
    assert health_lines(waiting) == [
        "replay: in none of 2 steps; the pass rate of new questions was 0.900 at most (docs/troubleshooting.md, Replay)"
    ]
    assert health_lines([*waiting, {**waiting[1], "experience/replay_on": 1}]) == []
