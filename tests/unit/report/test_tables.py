"""Tables of the command line: what they leave out, and what is said of it."""

import io

import pytest
from rich.console import Console

from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.report.tables import idle_experience, variant_table

SMALL = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
    "data": {"train": {"generator": "chain_arithmetic"}, "max_input_seq_length": 32},
    "policy": {
        "model_name": "embedded:chain-qwen2",
        "train_global_batch_size": 4,
        "max_total_sequence_length": 40,
        "generation": {"max_new_tokens": 8},
    },
}


def shown(config):
    console = Console(file=io.StringIO(), width=160)
    console.print(variant_table(config))
    return console.file.getvalue()


def test_where_experience_is_off_its_switches_are_not_in_the_table_and_the_others_are():
    on, off = (shown(load_recipe(SMALL, {"experience.enabled": enabled})) for enabled in (True, False))
    assert "experience.bucket_weight" in on
    assert "experience." not in off
    assert "loss_fn.normalizer" in off


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({}, None),
        ({"variant": "paper"}, None),  # its switches differ from the default variant's, and nobody set them
        ({"experience.replay_ratio": 0.5}, None),  # as by default
        (
            {"experience.replay_ratio": 0.25, "experience.guards.max_kl_replayed": 0.5},
            "experience.replay_ratio, experience.guards.max_kl_replayed",
        ),
        (
            {"experience.strategy": "both", "experience.replay_step.size": 0.25},
            "experience.strategy, experience.replay_step.size",
        ),
    ],
)
def test_keys_of_experience_that_do_nothing_because_it_is_off_are_named(changed, keys):
    said = idle_experience(load_recipe(SMALL, {"experience.enabled": False, **changed}))
    assert said == (keys and f"experience.enabled = false, so these keys of the recipe have no effect: {keys}")
    assert idle_experience(load_recipe(SMALL, changed)) is None
