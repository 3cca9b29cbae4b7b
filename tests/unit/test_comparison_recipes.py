"""The recipes of ablations and baselines differ from the quickstart by what they are about, and by nothing else."""

from pathlib import Path

import pytest

from exgrpo_megatron.config import VARIANTS
from exgrpo_megatron.data.embedded_tasks import task_of
from exgrpo_megatron.recipe import changed_keys, load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OFF = "experience.enabled: true -> false"

GRPO = [
    "grpo.normalize_rewards: false -> true",
    "loss_fn.normalizer: global_width -> per_answer_length",
    OFF,
]
REPO = "repo.enabled: false -> true"

DIFFERENCES = {
    "ablations/without_question_selection": ["experience.bucket_weight: counts -> uniform"],
    "ablations/random_answer": ["experience.answer_choice: lowest_mean_entropy -> random"],
    "ablations/lowest_perplexity": ["experience.answer_choice: lowest_mean_entropy -> lowest_perplexity"],
    "ablations/without_shaping": ["experience.shaping: ratio -> none"],
    "ablations/without_correction": ["experience.shaping: ratio -> log_prob"],
    "ablations/without_delayed_start": ["experience.start_pass_rate: 0.35 -> null"],
    "ablations/replay_ratio_25": ["experience.replay_ratio: 0.5 -> 0.25"],
    "ablations/replay_ratio_75": ["experience.replay_ratio: 0.5 -> 0.75"],
    "ablations/return_retired": ['experience.return_retired: null -> {"share": 0.1, "period": 25}'],
    "ablations/accuracy_sigma_0.5": [
        "experience.bucket_weight: counts -> accuracy",
        "experience.bucket_sigma: 1.0 -> 0.5",
    ],
    "ablations/accuracy_sigma_1": ["experience.bucket_weight: counts -> accuracy"],
    "ablations/accuracy_sigma_1.5": [
        "experience.bucket_weight: counts -> accuracy",
        "experience.bucket_sigma: 1.0 -> 1.5",
    ],
    "baselines/grpo": GRPO,
    "baselines/repo_best_reward": [*GRPO, REPO],
    **{
        f"baselines/repo_{name}": [*GRPO, REPO, f"repo.choice: best_reward -> {name}"]
        for name in ("recent", "variance", "full_scope", "symmetric")
    },
    "baselines/dr_grpo": [OFF],
    "baselines/gpg": [
        "grpo.scale_by_informative_groups: false -> true",
        "loss_fn.disable_ppo_ratio: false -> true",
        "loss_fn.normalizer: global_width -> global_tokens",
        OFF,
    ],
    "baselines/continual": [
        "grpo.max_num_steps: 80 -> 40",
        "grpo.seed: 1 -> 2",
        "experience.start_pass_rate: 0.35 -> null",
        "experience.prefill_path: null -> runs/quickstart/checkpoints/step_000080/experience",
        "data.train.generator_size: 450 -> 480",
        "policy.init_from: null -> runs/quickstart/checkpoints/step_000080",
        "sft.warm_start: true -> false",
    ],
    "baselines/demonstrations": [OFF, "demonstrations.enabled: false -> true"],
    "baselines/partial_credit": [
        "experience.solved_above: null -> 0.99",
        "env.math.require_literal: true -> false",
        "env.reward_function: null -> exgrpo_megatron.data.chain_arithmetic:partial_credit",
        "env.correct_above: 0.0 -> 0.5",
    ],
    "baselines/sft": ["sft.warm_start: true -> false", "sft.generator_worked_share: 0.3 -> 1.0"],
    "baselines/sft_then_rl": [OFF, "sft.generator_worked_share: 0.3 -> 1.0"],
}


def differences(name: str) -> list[str]:
    base = load_recipe(RECIPES / "quickstart.yaml").model_dump(mode="json")
    found = changed_keys(base, load_recipe(RECIPES / f"{name}.yaml").model_dump(mode="json"))
    assert f"logger.log_dir: runs/quickstart -> runs/{name}" in found
    return [line for line in found if not line.startswith("logger.log_dir")]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_recipe_differs_from_the_quickstart_by_what_it_compares_alone(name: str):
    assert differences(name) == DIFFERENCES[name]


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_the_recipe_of_a_variant_changes_every_switch_of_it(variant: str):
    switches = {name for name, values in VARIANTS.items() if values[variant] != values["corrected"]}
    changed = {line.split(":")[0] for line in differences(f"ablations/variant_{variant}")}
    assert changed == {"variant", *switches}


def test_every_recipe_of_comparisons_is_here():
    files = {f"{name}/{path.stem}" for name in ("ablations", "baselines") for path in (RECIPES / name).iterdir()}
    assert files == {*DIFFERENCES, "ablations/variant_paper", "ablations/variant_code"}


# A part that is put above the recipe of a model is no recipe by itself.
WHOLE = sorted({*RECIPES.rglob("*.yaml")} - {*RECIPES.glob("evaluation/*.yaml")})


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: str(path.relative_to(RECIPES)))
def test_a_generator_has_as_many_questions_as_its_recipe_asks_for(path):
    data = load_recipe(path).data
    for source, held_out in ((data.train, False), (data.validation, True)):
        if source is not None and source.generator is not None:
            assert len(task_of(source).questions(source, held_out)) == source.generator_size
