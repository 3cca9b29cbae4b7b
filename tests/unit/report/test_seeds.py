"""Means over seeds with their t-intervals, curves over a budget, and the table and picture made of them."""

import math

import numpy as np
import pytest

from exgrpo_megatron.report.bands import Panel, draw_bands, write_bands
from exgrpo_megatron.report.seeds import (
    Curve,
    band,
    markdown_table,
    mean_interval,
    paired_difference,
    run_curve,
    t_quantile,
)


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    # Printed tables of Student's t, two-sided.
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 5, 2.571), (0.95, 9, 2.262), (0.95, 30, 2.042), (0.99, 4, 4.604),
     (0.90, 7, 1.895), (0.95, 1000, 1.962)],
)  # fmt: skip
def test_quantiles_are_those_of_printed_tables(level, degrees, expected):
    assert round(t_quantile(level, degrees), 3) == expected


def test_a_quantile_needs_a_level_and_a_degree_of_freedom():
    for level, degrees in ((1.0, 3), (0.0, 3), (0.95, 0)):
        with pytest.raises(ValueError, match="level must be between 0 and 1"):
            t_quantile(level, degrees)


def test_the_interval_of_three_seeds_by_hand():
    # Mean 2, deviation 1, 4.3027 / sqrt(3) = 2.4841.
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, round(interval.half_width, 4), interval.num_seeds) == (2.0, 2.4841, 3)
    assert interval.describe(2) == "2.00 ± 2.48"


def test_one_seed_has_a_mean_and_no_interval():
    interval = mean_interval([0.25])
    assert interval.mean == 0.25
    assert math.isnan(interval.half_width)
    assert interval.describe() == "0.250"


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_an_interval_of_nothing_or_of_what_is_not_finite_is_refused(values):
    with pytest.raises(ValueError, match="needs finite values"):
        mean_interval(values)


def test_a_paired_difference_takes_out_what_a_seed_does_to_both():
    # Differences 0.5, 0.5: no spread, though the seeds are far apart. Seed 3 has one side only.
    difference = paired_difference({1: 1.0, 2: 5.0, 3: 9.0}, {2: 4.5, 1: 0.5})
    assert difference is not None
    assert (difference.mean, difference.half_width, difference.num_seeds) == (0.5, 0.0, 2)
    assert paired_difference({1: 1.0}, {2: 1.0}) is None


def curve(*points):
    budget, values = zip(*points, strict=True)
    return Curve(np.array(budget, dtype=float), np.array(values, dtype=float))


def test_values_between_points_lie_on_the_line_and_beyond_them_are_unknown():
    line = curve((0, 0.0), (100, 0.5), (200, 0.3))
    assert [line.at(x) for x in (0, 50, 100, 150)] == pytest.approx([0.0, 0.25, 0.5, 0.4])
    assert math.isnan(line.at(201))
    assert math.isnan(curve((50, 1.0)).at(49))


def test_the_mean_height_is_the_area_over_its_width():
    # 0 to 100: 25; 100 to 200: 40; to 150: 25 + 50 * 0.45 = 47.5.
    line = curve((0, 0.0), (100, 0.5), (200, 0.3))
    assert line.mean_until(200) == pytest.approx(65 / 200)
    assert line.mean_until(150) == pytest.approx(47.5 / 150)
    assert line.mean_until(0) == 0.0
    assert math.isnan(line.mean_until(201))


def test_the_budget_at_which_a_level_is_first_reached():
    line = curve((0, 0.1), (100, 0.5), (200, 0.3), (300, 0.9))
    assert line.first_at_least(0.1) == 0
    assert line.first_at_least(0.2) == pytest.approx(25)
    assert line.first_at_least(0.6) == pytest.approx(250)
    assert line.first_at_least(0.95) is None


def test_a_curve_is_finite_and_its_budget_grows():
    for points in ([(0, 1.0), (0, 2.0)], [(1, 1.0), (0, 2.0)], [(0, math.nan)]):
        with pytest.raises(ValueError, match="finite values at increasing budgets"):
            curve(*points)


def test_a_run_is_read_over_the_answers_it_generated():
    records = [
        {"step": 0, "validation/pass_rate_t1": 0.1},
        {"step": 1, "rollout/answers": 8},
        {"step": 2, "rollout/answers": 6, "validation/pass_rate_t1": 0.3},
        {"step": 3, "rollout/answers": 8, "validation/pass_rate_t1": math.nan},
        {"step": 4, "rollout/answers": 8, "validation/pass_rate_t1": 0.5},
    ]
    found = run_curve(records, "validation/pass_rate_t1")
    assert found.budget.tolist() == [0, 14, 30]
    assert found.values.tolist() == [0.1, 0.3, 0.5]
    assert len(run_curve(records, "policy/loss")) == 0


def test_a_band_lies_where_all_curves_are_known():
    # At 20 the curves have 0.2 and 0.4: mean 0.3, deviation sqrt(0.02), half width 12.7062 * 0.1 = 1.2706.
    found = band([curve((0, 0.0), (20, 0.2), (40, 0.2)), curve((10, 0.4), (20, 0.4))], num_points=3)
    assert found is not None
    assert found.budget.tolist() == [10, 15, 20]
    assert found.mean[-1] == pytest.approx(0.3)
    assert found.high[-1] - found.mean[-1] == pytest.approx(1.27062, abs=1e-5)
    assert found.mean[-1] - found.low[-1] == pytest.approx(1.27062, abs=1e-5)


def test_no_band_where_the_curves_do_not_meet():
    assert band([curve((0, 1.0), (10, 1.0)), curve((20, 1.0))]) is None
    assert band([]) is None


def test_the_table_keeps_bars_within_their_cell():
    assert markdown_table(["arm", "n"], [["a|b", "3"]]) == "| arm | n |\n| --- | --- |\n| a\\|b | 3 |\n"


def test_the_picture_names_every_setting_with_its_seeds(tmp_path):
    from matplotlib.figure import Figure

    settings = {"replay": [curve((0, 0.1), (10, 0.8)), curve((0, 0.2), (10, 0.6))], "grpo": []}
    ax = Figure().subplots()
    draw_bands(ax, Panel("held-out", settings))
    assert ax.get_legend_handles_labels()[1] == ["replay (n=2)", "grpo (n=0)"]
    assert ax.lines[2].get_ydata()[-1] == pytest.approx(0.7)
    path = write_bands(tmp_path / "bands.png", [Panel("held-out", settings)], "answers", "one")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.new"))
