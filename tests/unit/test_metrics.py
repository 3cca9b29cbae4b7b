"""Metric names, ratio statistics and sinks."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from exgrpo_megatron.errors import DataError, UserError
from exgrpo_megatron.metric_sinks import JsonlSink, MetricsLogger, TensorBoardSink, read_metrics
from exgrpo_megatron.metrics import METRICS, RATIO_STATS, find_metric, metrics_markdown
from exgrpo_megatron.ratio_metrics import mean_shaped, ratio_summary


def test_ratio_summary_of_three_ratios_equals_the_hand_calculation():
    # w = 1, 2, 4: sum 7, sum of squares 21, ess = 49 / (3 * 21) = 7/9. Linear quantiles: p01 lies 0.02 of the way
    # from 1 to 2 (position 0.01 * 2), p99 0.98 of the way from 2 to 4.
    summary = ratio_summary("ratio_fresh", np.log(np.array([4.0, 1.0, 2.0])))
    assert summary == pytest.approx(
        {
            "ratio_fresh/min": 1.0,
            "ratio_fresh/p01": 1.02,
            "ratio_fresh/p50": 2.0,
            "ratio_fresh/p99": 3.96,
            "ratio_fresh/max": 4.0,
            "ratio_fresh/ess": 7 / 9,
            "ratio_fresh/k1": -math.log(2),  # of log 1, log 2 and log 4, the mean is log 2
            "ratio_fresh/k3": 7 / 3 - 1 - math.log(2),
        }
    )


def test_equal_ratios_have_the_full_effective_sample_size():
    assert ratio_summary("ratio_fresh", np.full(5, 3.0))["ratio_fresh/ess"] == pytest.approx(1.0)


def test_effective_sample_size_survives_ratios_that_overflow():
    # e^800 overflows float64. Two equal giants and two negligible ones: ess = (2g)^2 / (4 * 2g^2) = 1/2.
    summary = ratio_summary("ratio_replayed", np.array([800.0, 800.0, 0.0, 0.0], dtype=np.float32))
    assert summary["ratio_replayed/ess"] == pytest.approx(0.5)
    assert summary["ratio_replayed/max"] == math.inf
    assert summary["ratio_replayed/min"] == 1.0


def test_the_mean_shaped_ratio_is_that_of_w_over_w_plus_beta():
    # f(1) = 1 / 1.1, f(0.1) = 0.5, and of what overflows f is 1.
    assert mean_shaped(np.log([1.0, 0.1]), 0.1) == pytest.approx((1 / 1.1 + 0.5) / 2)
    assert mean_shaped(np.array([2000.0]), 0.1) == 1.0
    assert mean_shaped(np.array([-2000.0]), 0.1) == 0.0


def test_no_tokens_give_no_ratio_metrics():
    assert ratio_summary("ratio_replayed", np.zeros(0, dtype=np.float32)) == {}


def test_every_name_a_ratio_summary_gives_is_a_metric():
    names = {name for prefix in ("ratio_fresh", "ratio_replayed") for name in ratio_summary(prefix, np.zeros(2))}
    assert names == {f"{prefix}/{stat}" for prefix in ("ratio_fresh", "ratio_replayed") for stat in RATIO_STATS}
    assert names <= METRICS.keys()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("reward/pass_rate", True),
        ("experience/bucket_7", True),
        ("experience/bucket_", False),
        ("experience/bucket_x", False),
        ("validation/pass_rate_greedy/6", True),
        ("validation/pass_rate_greedy/number theory", True),
        ("validation/pass_rate_t1/", False),
        ("validation/pass_rate_t1/<category>", False),
        ("reward/passrate", False),
    ],
)
def test_families_take_any_ending_and_nothing_else_is_known(name, known):
    assert (find_metric(name) is not None) == known


def test_a_written_step_reads_back(tmp_path: Path):
    log = MetricsLogger([JsonlSink(tmp_path / "run" / "metrics.jsonl")])
    log.write(3, {"reward/pass_rate": np.float32(0.5), "rollout/tokens": np.int64(7), "experience/replay_on": True})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text == '{"step": 3, "reward/pass_rate": 0.5, "rollout/tokens": 7, "experience/replay_on": 1}\n'


def test_values_that_are_not_finite_are_null_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = MetricsLogger([JsonlSink(tmp_path / "metrics.jsonl")])
    log.write(1, {"policy/loss": math.nan, "policy/grad_norm": math.inf, "policy/entropy": 0.1})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record == {"step": 1, "policy/loss": None, "policy/grad_norm": None, "policy/entropy": 0.1}
    assert log.nonfinite_values == 2
    assert "policy/grad_norm of step 1 is inf" in caplog.text
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["policy/loss"])


@pytest.mark.parametrize("metrics", [{"policy/los": 1.0}, {"policy/loss": "1.0"}, {"policy/loss": None}])
def test_unknown_names_and_non_numbers_are_bugs(tmp_path: Path, metrics):
    log = MetricsLogger([JsonlSink(tmp_path / "metrics.jsonl")])
    with pytest.raises(AssertionError, match=next(iter(metrics))):
        log.write(1, metrics)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_truncation_drops_later_steps_and_a_half_written_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (0, 1, 2, 2, 3):
        sink.write(step, {"policy/loss": float(step)})
    with path.open("a") as file:
        file.write('{"step": 4, "policy/lo')
    sink.truncate_after(2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 2]
    sink.write(3, {"policy/loss": 9.0})
    assert read_metrics(path)[-1] == {"step": 3, "policy/loss": 9.0}


def test_opening_after_a_kill_drops_the_half_written_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "policy/loss": 1.0}\n{"step": 2, "pol')
    JsonlSink(path).write(2, {"policy/loss": 2.0})
    assert [record["policy/loss"] for record in read_metrics(path)] == [1.0, 2.0]


def test_lines_of_one_step_are_joined(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "policy/loss": 1.0}\n{"step": 1, "policy/loss": 3.0}\n{"step": 2, "sft/loss": 5}\n')
    assert read_metrics(path) == [{"step": 1, "policy/loss": 3.0}, {"step": 2, "policy/loss": 1.0, "sft/loss": 5}]


@pytest.mark.parametrize("line", ["{oops}", "[1]", '{"policy/loss": 1}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_a_full_disk_is_the_users_error():
    # /dev/full refuses every write with "No space left on device".
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(UserError, match="No space left"):
        sink.write(1, {"policy/loss": 1.0})


def test_tensorboard_hides_the_steps_after_the_one_resumed_from(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(step, {"policy/loss": float(step)})
    sink.truncate_after(2)
    sink.write(3, {"policy/loss": 30.0})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("policy/loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_the_documentation_agrees_with_the_code():
    path = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert path.read_text() == metrics_markdown(), "docs/metrics.md is out of date: run `make docs`"
