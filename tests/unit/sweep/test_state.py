"""What a sweep remembers, and the runs that it must not take for its own."""

import json

import pytest
import yaml
from test_arms import RECIPE

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.recipe import dump_recipe
from exgrpo_megatron.sweep.arms import make_arms, make_runs
from exgrpo_megatron.sweep.state import RunState, SweepState, is_whole


@pytest.fixture
def run(tmp_path):
    recipe = tmp_path / "plain.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    (made,) = make_runs(make_arms([str(recipe)], [], [], ["grpo.max_num_steps=3"]), [1], ["grpo.seed"], tmp_path / "o")
    made.folder.mkdir(parents=True)
    return made


def test_states_are_found_again_and_those_of_other_arms_stay(run, tmp_path):
    out = tmp_path / "o"
    other = {"other/seed-1": {"status": "finished", "exit_code": 0, "seconds": 2.0, "message": ""}}
    (out / "sweep.json").write_text(json.dumps({"runs": other}))
    state = SweepState(out, [run])
    assert state[run] == RunState()
    state.set(run, RunState("failed", 2, 1.5, "exit code 2"))
    assert SweepState(out, [run])[run] == RunState("failed", 2, 1.5, "exit code 2")
    assert json.loads((out / "sweep.json").read_text())["runs"]["other/seed-1"] == other["other/seed-1"]


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": {"a": {"colour": 1}}}', '{"runs": 3}'])
def test_a_file_that_is_none_of_a_sweep_is_refused(run, tmp_path, text):
    (tmp_path / "o" / "sweep.json").write_text(text)
    with pytest.raises(ConfigError, match=r"sweep.json: cannot be read .* choose another --out, or delete it"):
        SweepState(tmp_path / "o", [run])


def test_a_run_begun_with_another_recipe_is_refused_by_key(run, tmp_path):
    recipe = dump_recipe(run.config)
    (run.folder / "recipe.yaml").write_text(recipe.replace(str(run.folder), "elsewhere/seed-1"))
    SweepState(tmp_path / "o", [run])
    (run.folder / "recipe.yaml").write_text(recipe.replace("max_num_steps: 3", "max_num_steps: 2", 1))
    with pytest.raises(ConfigError, match=r"begun with another recipe \(grpo.max_num_steps: 2 -> 3\)"):
        SweepState(tmp_path / "o", [run])


def test_a_run_is_whole_when_its_last_step_is_done(run):
    metrics = run.folder / "metrics.jsonl"
    assert not is_whole(run)
    metrics.write_text('{"step": 2}\n')
    assert not is_whole(run)
    metrics.write_text('{"step": 2}\n{"step": 3}\n')
    assert is_whole(run)
