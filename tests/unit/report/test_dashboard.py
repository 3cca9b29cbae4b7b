"""The dashboard: what its nine pictures show, and the runs it must cope with."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from run_folder import RECIPE, REPLAY_START, write_run

from exgrpo_megatron.errors import UserError
from exgrpo_megatron.report.dashboard import draw_dashboard, write_dashboard
from exgrpo_megatron.report.panels import smoothed
from exgrpo_megatron.report.run_data import load_run


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from the PNG header (bytes 16 to 24, big-endian)."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def axes_by_title(run_dir: Path):
    return {ax.get_title(loc="left"): ax for ax in draw_dashboard(load_run(run_dir)).axes if ax.get_title(loc="left")}


def line(ax, label: str):
    return next(drawn for drawn in ax.lines if drawn.get_label() == label)


def test_the_dashboard_is_a_png_of_1400_by_1000(tmp_path: Path):
    path = write_dashboard(write_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "dashboard.png"
    assert png_size(path) == (1400, 1000)
    assert [entry.name for entry in (tmp_path / "run").iterdir() if "dashboard" in entry.name] == ["dashboard.png"]


def test_the_nine_pictures_show_the_metrics(tmp_path: Path):
    run_dir = write_run(tmp_path / "run")
    run, axes = load_run(run_dir), axes_by_title(run_dir)
    assert len(axes) == 9
    greedy = line(axes["Pass rate"], "held-out, greedy")
    assert greedy.get_xdata().tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert greedy.get_ydata().tolist() == run.series("validation/pass_rate_greedy").values.tolist()
    assert line(axes["Pass rate"], "replay starts above 35%").get_ydata() == [0.35, 0.35]
    heat_map = axes["Buffer: questions by latest number correct"].collections[0].get_array()
    assert heat_map.shape == (7, 60)  # K = 8: k = 1 to 7
    assert heat_map[2].tolist() == run.series("experience/bucket_3").values.tolist()


def test_a_run_with_replay_steps_shows_their_ratios_norm_time_and_what_was_spent(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", recipe=RECIPE + "experience: {strategy: replay_step}\n")
    text = (run_dir / "metrics.jsonl").read_text().replace("ratio_replayed/", "ratio_replay_step/")
    more = ', "replay_step/grad_norm": 0.5, "time/replay_step_s": 0.3, "budget/answers": 1024}\n'
    (run_dir / "metrics.jsonl").write_text(text.replace("}\n", more))
    run = load_run(run_dir)
    figure = draw_dashboard(run)
    axes = {ax.get_title(loc="left"): ax for ax in figure.axes}
    ratios = line(axes["Ratio of replayed tokens (new / recorded)"], "median")
    assert ratios.get_ydata().tolist() == run.series("ratio_replay_step/p50").values.tolist()
    norm = line(axes["Update: gradient norm and largest ratios"], "gradient norm, replay step")
    assert set(norm.get_ydata().tolist()) == {0.5}
    assert "replay step" in [entry.get_text() for entry in axes["Seconds of a step"].get_legend().get_texts()]
    title = figure._suptitle.get_text()
    assert "variant corrected, replay step" in title
    assert "1,024 answers generated" in title
    # The literal method's start is not in force.
    assert not [drawn for drawn in axes["Pass rate"].lines if "replay starts" in str(drawn.get_label())]


def test_a_dotted_line_marks_where_replay_starts_in_every_picture(tmp_path: Path):
    for ax in axes_by_title(write_run(tmp_path / "run")).values():
        dotted = [drawn for drawn in ax.lines if drawn.get_linestyle() == ":"]
        assert [drawn.get_xdata() for drawn in dotted] == [[REPLAY_START, REPLAY_START]]


def test_bands_stand_behind_steps_that_a_guard_held_and_in_which_an_alarm_rang(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", num_steps=12)
    added = [
        {"step": step, "guards/held": float(step in (9, 10)), "alarm/min_data_left": float(step in (4, 5, 6, 11))}
        for step in range(1, 13)
    ]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in added))
    axes = axes_by_title(run_dir)

    def bands(title: str) -> list[tuple[str, float, float]]:
        found = [patch for patch in axes[title].patches if isinstance(patch, Rectangle)]
        return [(str(patch.get_label()), patch.get_x(), patch.get_x() + patch.get_width()) for patch in found]

    assert bands("Ratio of replayed tokens (new / recorded)") == [("held by a guard", 8.5, 10.5)]
    spans = [(first, last) for _, first, last in bands("Experience")]
    assert spans == [(3.5, 6.5), (10.5, 11.5)]
    assert bands("Experience")[0][0] == "an alarm rings"


@pytest.mark.parametrize(
    "case",
    [{"replay": False}, {"num_steps": 1}, {"num_steps": 8, "validation": False}, {"num_steps": 0}],
    ids=["without replay", "one step", "without validation", "only the first evaluation"],
)
def test_unusual_runs_are_drawn_without_a_warning(tmp_path: Path, case, recwarn: pytest.WarningsRecorder):
    assert png_size(write_dashboard(write_run(tmp_path / "run", **case))) == (1400, 1000)
    assert [str(warning.message) for warning in recwarn] == []


def test_a_run_still_writing_is_drawn_without_its_half_written_line(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", num_steps=5)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward/pa')
    assert load_run(run_dir).training_steps.tolist() == [1, 2, 3, 4, 5]
    write_dashboard(run_dir)


def test_values_that_were_not_finite_leave_gaps(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", num_steps=3, validation=False)
    text = (run_dir / "metrics.jsonl").read_text()
    head, tail = text.split('"policy/entropy": ', 1)
    (run_dir / "metrics.jsonl").write_text(head + '"policy/entropy": null' + tail[tail.index(",") :])
    entropy = load_run(run_dir).series("policy/entropy").values
    assert np.isnan(entropy).tolist() == [True, False, False]
    write_dashboard(run_dir)


def test_smoothing_equals_the_hand_calculation():
    # 0, then 0 + (1 - 0) / 4 = 0.25, then 0.25 + (1 - 0.25) / 4 = 0.4375.
    assert smoothed(np.array([0.0, 1.0, 1.0])).tolist() == [0.0, 0.25, 0.4375]
    np.testing.assert_equal(smoothed(np.array([0.0, np.nan, 1.0])), [0.0, np.nan, 0.25])


def test_a_folder_without_metrics_says_what_to_run(tmp_path: Path):
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist.*run `exgrpo train RECIPE logger\.log_dir="):
        write_dashboard(tmp_path)


def test_metrics_without_a_step_say_so(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n')
    with pytest.raises(UserError, match="holds no training step"):
        write_dashboard(tmp_path)


@pytest.mark.parametrize("recipe", [None, "grpo: {num_prompts_per_step: 0}", "a: ["])
def test_a_missing_or_damaged_recipe_is_named(tmp_path: Path, recipe: str | None):
    run_dir = write_run(tmp_path / "run", num_steps=1)
    (run_dir / "recipe.yaml").unlink()
    if recipe is not None:
        (run_dir / "recipe.yaml").write_text(recipe)
    with pytest.raises(UserError, match=r"recipe\.yaml"):
        write_dashboard(run_dir)
