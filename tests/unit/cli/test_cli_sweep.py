"""What `exgrpo sweep` refuses before it starts anything."""

import pytest
from cli_project import assert_refused, contents


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["recipe.yaml", "--metric", "validation/pass"], ["--metric validation/pass", "docs/metrics.md"]),
        (["recipe.yaml", "--baseline", "other"], ["--baseline 'other': no arm has this name; they are recipe"]),
        (["recipe.yaml", "--seeds", "1,1"], ["--seeds '1,1': 1 stands there twice"]),
        (["recipe.yaml", "--set", "cluster.gpus_per_node=2"], ["one process a run, but the recipe is for 2"]),
        (["recipe.yaml", "--vary", "grpo.max_num_steps=1,x"], ["arm 'max_num_steps=x'", "grpo.max_num_steps = 'x'"]),
        (["nowhere.yaml"], ["nowhere.yaml: no such recipe file"]),
    ],
)
def test_nothing_is_started_where_something_is_refused(exgrpo, project, args, texts):
    before = contents(project)
    assert_refused(exgrpo("sweep", *args, "--out", "sweep"), before, *texts)
    assert not (project / "sweep").exists()


def test_a_launcher_is_refused(exgrpo, project, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(exgrpo("sweep", "recipe.yaml"), contents(project), "run it without torchrun")
