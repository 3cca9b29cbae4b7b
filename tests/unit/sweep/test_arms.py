"""Arms and runs from what the command line says."""

from pathlib import Path

import pytest
import yaml

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.sweep.arms import Axis, make_arms, make_runs, parse_axis, parse_seeds

RECIPE = {
    "data": {"train": {"generator": "chain_arithmetic"}, "max_input_seq_length": 32},
    "policy": {"model_name": "embedded:chain-qwen2", "train_global_batch_size": 256, "max_total_sequence_length": 128,
               "generation": {"max_new_tokens": 96}},
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def named(*args, **kwargs):
    return [(arm.name, arm.overrides) for arm in make_arms(*args, **kwargs)]


def test_seeds_are_listed_and_ranged_in_their_order():
    assert parse_seeds("3,1") == [3, 1]
    assert parse_seeds("1,5-7, 9") == [1, 5, 6, 7, 9]


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1,2,1", "3-1", "-1", "1.5"])
def test_what_is_no_list_of_seeds_is_refused(text):
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)


def test_commas_in_brackets_and_quotes_do_not_part_values():
    assert parse_axis("a.b=1,2e-4") == Axis("a.b", ("1", "2e-4"))
    assert parse_axis("a.b=[1, 2],{x: 1, y: 2},'c,d'").values == ("[1, 2]", "{x: 1, y: 2}", "'c,d'")


@pytest.mark.parametrize("text", ["a.b", "=1,2", "a.b=", "a.b=1,1"])
def test_what_is_no_key_with_values_is_refused(text):
    with pytest.raises(ConfigError, match="--vary"):
        parse_axis(text)


def test_recipes_are_called_by_their_file_or_by_the_name_given():
    assert named(["a/grpo.yaml", "replay=b/x.yaml"], [], []) == [("grpo", ()), ("replay", ())]
    assert make_arms(["replay=b/x.yaml"], [], [])[0].recipe == Path("b/x.yaml")


def test_an_arm_is_called_by_what_tells_it_from_the_others():
    lr, weight = Axis("policy.lr", ("1e-4", "2e-4")), Axis("experience.bucket_weight", ("counts",))
    assert [name for name, _ in named(["a.yaml"], [], [lr])] == ["lr=1e-4", "lr=2e-4"]
    assert [name for name, _ in named(["a.yaml", "b.yaml"], [], [lr])] == [
        "a lr=1e-4", "a lr=2e-4", "b lr=1e-4", "b lr=2e-4",
    ]  # fmt: skip
    assert named(["a.yaml"], ["off: experience.enabled=false"], [lr, weight], ["grpo.max_num_steps=3"])[1] == (
        "off lr=2e-4 bucket_weight=counts",
        ("grpo.max_num_steps=3", "experience.enabled=false", "policy.lr=2e-4", "experience.bucket_weight=counts"),
    )
    assert named(["a.yaml"], ["plain:"], []) == [("plain", ())]


def test_keys_of_one_ending_are_written_out():
    axes = [Axis("sft.optimizer.lr", ("1",)), Axis("policy.lr", ("2",))]
    assert named(["a.yaml"], [], axes)[0][0] == "sft.optimizer.lr=1 policy.lr=2"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((["a.yaml", "b/a.yaml"], [], []), "2 arms would be called a"),
        ((["=a.yaml"], [], []), "NAME=FILE"),
        ((["a.yaml"], ["x y=1"], []), "--arm"),
        ((["a.yaml"], ["x: y"], []), "--arm"),
        ((["a.yaml"], ["x: 'y=1"], []), "No closing quotation"),
        ((["a.yaml"], ["x: k=1"], [Axis("k", ("2",))]), "k is set twice for one arm"),
        ((["a.yaml"], [], [], ["k=1", "k=2"]), "k is set twice for one arm"),
    ],
)
def test_arms_that_cannot_be_told_apart_or_read_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        make_arms(*args)


def test_a_run_has_its_seed_and_its_folder(recipe, tmp_path):
    arms = make_arms([str(recipe)], [], [Axis("experience.enabled", ("true", "false"))])
    runs = make_runs(arms, [7, 8], ["grpo.seed", "data.train.generator_seed"], tmp_path / "out")
    assert [run.name for run in runs] == [
        "enabled=true, seed 7", "enabled=false, seed 7", "enabled=true, seed 8", "enabled=false, seed 8",
    ]  # fmt: skip
    last = runs[-1]
    assert (last.config.grpo.seed, last.config.data.train.generator_seed, last.config.experience.enabled) == (8, 8, 0)
    assert last.folder == tmp_path / "out" / "enabled=false" / "seed-8" == Path(last.config.logger.log_dir)
    assert last.log == tmp_path / "out" / "enabled=false" / "seed-8.log"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.seed=3", "grpo.seed is set by the sweep itself"),
        ("logger.log_dir=x", "logger.log_dir is set by the sweep itself"),
        ("checkpointing.checkpoint_dir=x", "checkpoint_dir = 'x' would be one folder for all runs"),
        ("experience.store_dir=x", "store_dir = 'x' would be one folder for all runs"),
        ("grpo.nonsense=1", "arm 'plain': .*grpo.nonsense: unknown key"),
    ],
)
def test_what_a_sweep_sets_itself_and_what_no_recipe_has_is_refused(recipe, tmp_path, override, message):
    arms = make_arms([str(recipe)], [], [], [override])
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make_runs(arms, [1], ["grpo.seed"], tmp_path)


@pytest.mark.parametrize("name", ["..", ".", "x" * 300])
def test_an_arm_that_cannot_be_a_folder_of_the_sweep_is_refused(name):
    with pytest.raises(ConfigError, match="no name for a folder"):
        make_arms(["recipes/quickstart.yaml"], [f"{name}: experience.replay_ratio=0.1"], [])


def test_a_range_of_seeds_beyond_all_measure_is_refused():
    with pytest.raises(ConfigError, match="more than 10000 seeds"):
        parse_seeds("1-99999999999")
