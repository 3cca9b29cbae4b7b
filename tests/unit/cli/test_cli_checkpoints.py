"""Checkpoints and experience a command cannot use: refused by name, and what was there stays."""

import json
import shutil

import numpy as np
import pytest
from cli_project import assert_refused, contents, rows, write_lines

from exgrpo_megatron.experience.files import Row, write_answers
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.types import StoredAnswer


def test_a_prefill_of_another_group_size_is_refused(exgrpo, project):
    answer = StoredAnswer(np.array([3], np.int32), np.array([-0.5], np.float32), 0, 1)
    write_answers(project / "old.parquet", [Row("q1", 1, 0, 0, answer)], group_size=8)
    result = exgrpo("train", "recipe.yaml", "experience.prefill_path=old.parquet")
    assert_refused(
        result, contents(project), "experience.prefill_path", "groups of 8", "grpo.num_generations_per_prompt = 2"
    )
    assert_refused(
        exgrpo("train", "recipe.yaml", "experience.prefill_path=none.parquet"),
        contents(project),
        "experience.prefill_path = 'none.parquet': no such file or folder",
    )


def test_a_prefill_that_answers_none_of_the_questions_is_refused(exgrpo, project):
    answer = StoredAnswer(np.array([3], np.int32), np.array([-0.5], np.float32), 0, 1)
    write_answers(project / "old.parquet", [Row("other", 1, 0, 0, answer)], group_size=2)
    result = exgrpo("train", "recipe.yaml", "experience.prefill_path=old.parquet")
    assert_refused(result, contents(project), "none of its questions is in data.train")


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        ("nothing", "--checkpoint nothing: no such folder"),
        ("recipe.yaml", "--checkpoint recipe.yaml: no such folder"),
        ("run", "neither a run's checkpoint"),
        ("run/checkpoints/step_000009.incomplete", "neither a run's checkpoint"),
    ],
)
def test_eval_of_what_is_no_checkpoint_is_refused(exgrpo, trained, checkpoint, text):
    checkpoints = trained / "run" / "checkpoints"
    shutil.copytree(checkpoints / "step_000001" / "policy", checkpoints / "step_000009.incomplete" / "policy")
    assert_refused(exgrpo("eval", "recipe.yaml", "--checkpoint", checkpoint), contents(trained), text)
    assert not (trained / "run" / "eval").exists()


def test_eval_before_any_training_makes_nothing(exgrpo, project):
    before = contents(project)
    assert_refused(exgrpo("eval", "recipe.yaml"), before, "no checkpoint under run: train first")
    assert contents(project) == before
    assert_refused(exgrpo("eval", "recipe.yaml", "data.validation=null"), before, "data.validation")


FILES = [
    "state.json",
    "policy/.metadata",
    "policy/metadata.json",
    "policy/__0_0.distcp",
    "experience/experience.json",
    "experience/index-00000-of-00001.parquet",
    "experience/questions.parquet",
]


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_with_a_file_cut_off_emptied_or_lost_is_refused_by_name(exgrpo, trained, file):
    path = trained / "run" / "checkpoints" / "step_000002" / file
    whole = path.read_bytes()
    for left in (whole[: len(whole) // 2], b"", None):
        if left is None:
            path.unlink()
        else:
            path.write_bytes(left)
        if left is not None or file != "state.json":
            result = exgrpo("train", "recipe.yaml", "grpo.max_num_steps=3")
            assert_refused(result, contents(trained), "run/checkpoints/step_000002")


@pytest.mark.parametrize("moved_away", [True, False], ids=["moved away", "without its state"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(exgrpo, trained, moved_away):
    newest = trained / "run" / "checkpoints" / "step_000002"
    if moved_away:
        newest.rename(trained / "damaged")
    else:
        (newest / "state.json").unlink()
    result = exgrpo("train", "recipe.yaml", "grpo.max_num_steps=3", "checkpointing.export_hf=false")
    assert result.code == 0, result.err
    assert ("warning: run/checkpoints/step_000002 is no whole checkpoint" in result.out) is not moved_away
    assert "resuming from run/checkpoints/step_000001: 1 of 3 steps are done" in result.out


@pytest.mark.parametrize("text", ["[]", '{"step": 2}'])
def test_a_state_that_lacks_what_every_state_has_is_refused(exgrpo, trained, text):
    (trained / "run" / "checkpoints" / "step_000002" / "state.json").write_text(text)
    result = exgrpo("train", "recipe.yaml", "grpo.max_num_steps=3")
    assert_refused(result, contents(trained), "step_000002/state.json: damaged", "it lacks", "order")


def small_model(trained):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = json.loads((trained / "run" / "hf" / "config.json").read_text())
    model = trained / "smaller"
    shutil.copytree(trained / "run" / "hf", model)
    Qwen2ForCausalLM(Qwen2Config(**{**settings, "num_hidden_layers": 1, "layer_types": None})).save_pretrained(model)
    return model


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(exgrpo, trained):
    small_model(trained)
    before = contents(trained)
    result = exgrpo("eval", "recipe.yaml", "--checkpoint", "smaller")
    assert_refused(result, before, "smaller is another model than the recipe's", "num_layers: 1, recipe 2")
    result = exgrpo("train", "recipe.yaml", "policy.model_name=smaller", "grpo.max_num_steps=3")
    assert_refused(result, before, "step_000002/policy is a checkpoint of another model", "num_layers: checkpoint 2")


def test_a_refused_resume_leaves_the_run_as_it_was(exgrpo, trained):
    write_lines(trained / "train.jsonl", *rows(20, 4))
    before = contents(trained)
    result = exgrpo("train", "recipe.yaml", "grpo.max_num_steps=3", "grpo.seed=5")
    assert_refused(result, before, "was trained on other questions", "logger.log_dir")
    assert load_recipe("run/recipe.yaml").grpo.seed == 42
