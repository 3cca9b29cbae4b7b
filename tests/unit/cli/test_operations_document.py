"""What docs/operations.md says of operating a run: names, thresholds, bytes, what may change, and a run that moves."""

import re
import shutil
from functools import reduce
from pathlib import Path

import pytest
from cli_project import rows, write_lines

from exgrpo_megatron.metrics import find_metric
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.recipe_options import options
from exgrpo_megatron.rewards.alarm import MAX_FAILURE_SHARE

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
WATCHED = [
    line.split("|")[1:4] for line in PAGE.partition("### What to watch")[2].splitlines() if line.startswith("| `")
]
TO_STEP_3 = ("grpo.max_num_steps=3", "checkpointing.export_hf=false", "grpo.val_period=0", "data.validation=null")


def test_every_metric_and_key_is_there():
    metrics = [name for row in WATCHED for name in re.findall(r"`([a-z_]+/[a-z_0-9]+)`", row[0])]
    assert len(metrics) > 20
    assert [name for name in metrics if find_metric(name) is None] == []
    known = {option.name for option in options()}
    sections = "grpo|loss_fn|experience|policy|env|checkpointing|logger|sft|cluster"
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.0-9]+)", PAGE))
    assert len(named) > 20
    assert {name for name in named if not any(key == name or key.startswith(f"{name}.") for key in known)} == set()


def test_the_thresholds_are_the_defaults(project):
    config = load_recipe("recipe.yaml")
    said = {
        "env.math.all_zero_alarm_steps": r"every reward 0 for (\d+) steps",
        "env.math.format_alarm_share": r"more than ([\d.]+) of the answers \(`env",
        "experience.alarms.min_data_left": r"below ([\d.]+) \(`exp",
    }
    text = "\n".join(row[1] for row in WATCHED)
    for name, pattern in said.items():
        assert float(re.search(pattern, text)[1]) == reduce(getattr, name.split("."), config)
    assert f"more than {MAX_FAILURE_SHARE} of the answers" in text


def test_a_checkpoint_has_12_bytes_a_parameter_in_float32(trained):
    """4 of the weight and 4 of each moment; the names and places of 40 tensors are a twentieth of so small a model."""
    files = (trained / "run" / "checkpoints" / "step_000002" / "policy").iterdir()
    assert 12 <= sum(path.stat().st_size for path in files) / 397_056 < 12.8


def test_a_run_that_was_moved_goes_on_with_its_own_recipe(exgrpo, trained):
    shutil.copytree("run", "elsewhere/moved")
    shutil.rmtree("run")
    result = exgrpo("train", "elsewhere/moved/recipe.yaml", "logger.log_dir=elsewhere/moved", *TO_STEP_3)
    assert result.code == 0, result.err
    assert "resuming from elsewhere/moved/checkpoints/step_000002: 2 of 3 steps are done" in result.out
    assert "the recipe changed since then: logger.log_dir: run -> elsewhere/moved" in result.out
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ("policy.precision=bfloat16", "precision: checkpoint 'float32', recipe 'bfloat16'"),
        ("grpo.num_generations_per_prompt=4", "groups of 2, but grpo.num_generations_per_prompt = 4"),
        ("grpo.seed=7", "seed = 42, this run 7"),
        ("questions", "was trained on other questions"),
    ],
)
def test_what_a_checkpoint_is_made_of_cannot_change_on_the_way(exgrpo, trained, changed, refused):
    if changed == "questions":
        write_lines(trained / "train.jsonl", *rows(2, 4))
    result = exgrpo("train", "recipe.yaml", *TO_STEP_3, *([changed] if "=" in changed else []))
    assert result.code == 2
    assert refused in result.err
