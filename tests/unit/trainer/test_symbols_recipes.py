"""What the recipes of unknown symbols share."""

from pathlib import Path

import pytest

from exgrpo_megatron import run_inputs, warm_starts
from exgrpo_megatron.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.fixture
def warm_start_of(tmp_path, data_parallel):
    """The name of a recipe's kept warm start."""

    def name_of(recipe, *overrides):
        config = load_recipe(RECIPES / recipe, [f"logger.log_dir={tmp_path / recipe}", *overrides])
        return warm_starts.warm_start_dir(config, run_inputs.load_inputs(config, data_parallel)).name

    return name_of


def test_they_have_one_warm_start(warm_start_of):
    names = {warm_start_of(path.name) for path in RECIPES.glob("symbols_*.yaml")}
    assert len(names) == 1


def test_meanings_seeds_and_sizes_of_generated_questions_leave_it_but_its_own_keys_do_not(warm_start_of):
    first = warm_start_of("symbols_grpo.yaml")
    seeds = [
        *(f"data.{part}.generator_meaning_seed=3" for part in ("train", "validation")),
        "data.train.generator_seed=7",
        "data.train.generator_size=50",
        "sft.data.generator_size=5",
        "grpo.seed=9",
    ]
    assert warm_start_of("symbols_grpo.yaml", *seeds) == first
    assert warm_start_of("symbols_grpo.yaml", "sft.data.generator_difficulties=[2]") != first
    assert warm_start_of("symbols_grpo.yaml", "sft.generator_worked_share=0.9") != first
