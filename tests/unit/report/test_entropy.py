"""The report of token entropy by band, held to numbers worked out by hand."""

import json
import math

import pytest

from exgrpo_megatron.data.pass_rates import PassRate
from exgrpo_megatron.report.entropy import draw_entropy, entropy_report


def rows(question, *answers):
    statuses = ("wrong", "correct")
    return [
        {"question_id": question, "status": statuses[int(reward)], "mean_entropy": entropy}
        for reward, entropy in answers
    ]


ANSWERS = [
    *rows("half", (1.0, 0.1), (0.0, 0.5)),
    *rows("other half", (1.0, 0.2), (1.0, 0.4), (0.0, 0.6), (0.0, 0.8)),
    *rows("never", (0.0, 2.0)),
    *rows("always", (1.0, 0.05)),
]
RATES = [PassRate("half", 1, 2), PassRate("other half", 2, 4), PassRate("never", 0, 1), PassRate("always", 1, 1)]


def test_entropies_are_means_over_questions_with_intervals_over_them():
    """Right: .1 and (.2 + .4) / 2 = .3, mean .2; wrong: .5 and .7, mean .6; within questions .4 and .4, mean .4.

    t(.975; 1) = 12.706; half widths 12.706 * s / sqrt(2) with s = .2 / sqrt(2), hence 12.706 * .1, and 0."""
    report = entropy_report(ANSWERS, RATES)
    by_name = {band.name: band for band in report.bands}
    medium = by_name["medium"]
    assert (medium.num_questions, medium.num_right, medium.num_wrong) == (2, 3, 3)
    assert medium.right.mean == pytest.approx(0.2)
    assert medium.wrong.mean == pytest.approx(0.6)
    assert medium.right.half_width == pytest.approx(1.2706, abs=1e-4)
    assert medium.wrong_minus_right.mean == pytest.approx(0.4)
    assert medium.wrong_minus_right.half_width == pytest.approx(0.0, abs=1e-12)
    assert by_name["never right"].right is None
    assert by_name["never right"].wrong.mean == 2.0
    assert by_name["always right"].wrong_minus_right is None
    assert by_name["easy"].num_questions == by_name["hard"].num_questions == 0


def test_the_report_is_json_and_a_picture(tmp_path):
    report = entropy_report(ANSWERS, RATES)
    never = json.loads(json.dumps(report.as_json(), allow_nan=False))[-1]
    assert never["wrong"] == {"mean": 2.0, "half_width": None, "num_seeds": 1}
    assert math.isnan(report.bands[-1].wrong.half_width)
    draw_entropy(report, tmp_path / "entropy.png")
    assert (tmp_path / "entropy.png").read_bytes().startswith(b"\x89PNG")
