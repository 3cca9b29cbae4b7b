"""Runs at the same number of answers, and the files that say so."""

import csv
import io
import json

import numpy as np
import pytest

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.report.seeds import Curve
from exgrpo_megatron.sweep.comparison import Level, columns_of, known_metric, parse_level
from exgrpo_megatron.sweep.tables import Findings, Missing, NeverReplayed, as_csv, as_json, markdown, write_findings

T1 = "validation/pass_rate_t1"


def curve(*points):
    budget, values = zip(*points, strict=True)
    return Curve(np.array(budget, dtype=float), np.array(values, dtype=float))


CURVES = {
    T1: {
        # At 100 answers .5 and .7: mean .6, deviation .1 sqrt(2), half width 12.7062 * .1 = 1.27062.
        "replay": {1: curve((0, 0.0), (100, 0.5)), 2: curve((0, 0.0), (200, 1.4))},
        "grpo": {1: curve((0, 0.0), (100, 0.1)), 2: curve((0, 0.0), (100, 0.3))},
    }
}
ARMS = ["grpo", "replay"]


def columns(at=(), levels=(), curves=CURVES):
    return columns_of(curves, curves, ARMS, at, levels, "grpo")


def test_runs_are_compared_at_the_most_answers_that_all_have():
    (column,) = columns()
    assert column.answers == 100
    assert column.cells["replay"].by_seed == pytest.approx({1: 0.5, 2: 0.7})
    interval = column.cells["replay"].interval
    assert (interval.mean, interval.half_width) == pytest.approx((0.6, 1.270620), abs=1e-6)


def test_differences_are_paired_by_seed():
    # .5 - .1 and .7 - .3: .4 twice, without spread.
    (column,) = columns()
    difference = column.cells["replay"].difference
    assert (difference.mean, difference.half_width) == pytest.approx((0.4, 0.0), abs=1e-12)
    assert column.cells["grpo"].difference is None


def test_where_a_run_ended_before_there_is_no_mean_of_the_others():
    column = columns(at=[50, 150])[1]
    assert column.cells["replay"].by_seed == pytest.approx({2: 1.05})
    assert column.cells["replay"].interval is None
    assert column.cells["replay"].difference is None


def test_answers_to_a_level_have_a_mean_only_where_every_run_gets_there():
    # .2 is reached by replay after 40 and 28.57 answers, by one of two runs of grpo after 66.7.
    column = columns(levels=[Level(T1, 0.2)])[1]
    assert column.cells["replay"].interval.mean == pytest.approx((40 + 200 / 7) / 2)
    assert column.cells["grpo"].by_seed == pytest.approx({2: 200 / 3})
    assert column.cells["grpo"].interval is None


def test_an_arm_without_a_finished_run_has_no_numbers():
    curves = {T1: {"grpo": {}, "replay": CURVES[T1]["replay"]}}
    (column,) = columns(curves=curves)
    assert column.cells["grpo"].interval is None
    assert column.cells["replay"].interval is not None
    assert column.cells["replay"].difference is None
    assert columns(curves={T1: {"grpo": {}, "replay": {}}}) == []


def test_metrics_and_levels_are_those_that_runs_write():
    assert known_metric(T1, "--metric") == T1
    assert parse_level(f"{T1}=0.5") == Level(T1, 0.5)
    for text in (T1, f"{T1}=half", "validation/nonsense=0.5"):
        with pytest.raises(ConfigError, match="--reach"):
            parse_level(text)


def findings(**changes):
    given = {
        "arms": ARMS,
        "baseline": "grpo",
        "num_planned": 2,
        "columns": columns(levels=[Level(T1, 0.2)]),
        "missing": [Missing("replay", 3, "failed", "exit code 2: error: x", "out/replay/seed-3.log")],
        "seconds": {"grpo": [3.0, 5.0], "replay": [8.0, 9.4]},
    }
    return Findings(**{**given, **changes})


def test_the_table_has_one_row_an_arm_and_names_what_is_in_no_number():
    lines = markdown(findings()).splitlines()
    assert lines[0] == (
        f"| arm | runs | {T1} at 100 answers | difference | answers to {T1} 0.2 | difference | s a run |"
    )
    assert lines[2] == "| grpo | 2 of 2 | 0.200 ± 1.271 | - | 1 of 2 (67) | - | 4 |"
    assert lines[3] == "| replay | 2 of 2 | 0.600 ± 1.271 | +0.400 ± 0.000 | 34 ± 73 | - | 9 |"
    assert lines[-1] == "- replay, seed 3: failed: exit code 2: error: x (out/replay/seed-3.log)"


def test_runs_with_experience_in_which_replay_never_began_are_named_below_the_table_and_in_the_json():
    told = findings(never_replayed=[NeverReplayed("replay", 2, "in none of 9 steps")], missing=[])
    assert markdown(told).splitlines()[-3:] == [
        "With experience, but without replay:", "", "- replay, seed 2: in none of 9 steps",
    ]  # fmt: skip
    assert json.loads(as_json(told))["never_replayed"] == [{"arm": "replay", "seed": 2, "told": "in none of 9 steps"}]


def test_the_csv_has_a_line_an_arm_and_column_with_full_digits():
    rows = list(csv.DictReader(io.StringIO(as_csv(findings()))))
    assert [(row["arm"], row["answers"], row["level"]) for row in rows] == [
        ("grpo", "100.0", ""), ("replay", "100.0", ""), ("grpo", "", "0.2"), ("replay", "", "0.2"),
    ]  # fmt: skip
    assert float(rows[1]["mean"]) == pytest.approx(0.6)
    assert rows[1]["by_seed"].startswith("1=0.5 2=0.7")
    assert (rows[2]["known"], rows[2]["runs"], rows[2]["mean"]) == ("1", "2", "")


def test_the_json_has_null_where_one_seed_has_no_spread():
    one = {T1: {"grpo": {1: CURVES[T1]["grpo"][1]}, "replay": {1: CURVES[T1]["replay"][1]}}}
    content = json.loads(as_json(findings(columns=columns(curves=one), missing=[])))
    cell = content["columns"][0]["cells"]["replay"]
    assert cell["interval"] == {"mean": 0.5, "half_width": None, "num_seeds": 1}
    assert cell["by_seed"] == {"1": 0.5}
    assert content["missing"] == []


def test_all_files_are_written_and_no_picture_of_nothing(tmp_path):
    written = write_findings(tmp_path, findings(), CURVES)
    assert [path.name for path in written] == ["table.md", "table.csv", "table.json", "bands.png"]
    assert all(path.stat().st_size for path in written)
    empty = {T1: {"grpo": {}, "replay": {}}}
    written = write_findings(tmp_path, findings(columns=[], seconds={"grpo": [], "replay": []}), empty)
    assert "bands.png" not in [path.name for path in written]
