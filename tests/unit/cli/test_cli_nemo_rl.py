"""`exgrpo show` and `exgrpo train` with a file of NeMo-RL in place of a recipe."""

from pathlib import Path

from cli_project import assert_refused, contents

from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.recipe import load_recipe

FILE = Path(__file__).parents[1] / "nemo_rl" / "files" / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
OVERRIDES = [
    "loss_fn.reference_policy_kl_penalty=0",
    "grpo.max_num_epochs=null",
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "grpo.max_num_steps=1",
    "data.train.path=train.jsonl",
    "data.train.split_validation_size=0",
    "data.max_input_seq_length=16",
    'data.prompt_template="{question}"',
    "policy.model_name=embedded:chain-qwen2",
    "policy.train_global_batch_size=4",
    "policy.max_total_sequence_length=24",
    "policy.precision=float32",
    "policy.generation.backend=embedded",
    "policy.generation.max_new_tokens=8",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    "checkpointing.export_hf=false",
    "env.math.num_workers=1",
    "env.math.check_gold=false",
    "logger.log_dir=run",
]


def test_it_is_trained_and_what_became_of_its_keys_is_kept_beside_the_recipe(exgrpo, project):
    result = exgrpo("train", FILE, *OVERRIDES)
    assert result.code == 0, result.err
    kept = (project / "run" / "nemo_rl.txt").read_text()
    assert kept in result.out
    assert "policy.generation.val_temperature = 1.0 -> eval.temperature = 1.0" in kept
    # checkpointing.enabled is false in the file, and its learning rate is 5e-6.
    assert list((project / "results").rglob("step_*")) == []
    assert [record["policy/learning_rate"] for record in read_metrics(project / "run" / "metrics.jsonl")] == [5e-6]
    assert load_recipe(project / "run" / "recipe.yaml") == load_recipe(FILE, OVERRIDES)


def test_show_prints_the_recipe_and_what_was_left_out(exgrpo, project):
    result = exgrpo("show", FILE, *OVERRIDES)
    assert result.code == 0, result.err
    assert "normalizer: global_tokens" in result.out
    assert "of another optimiser: policy.megatron_cfg.optimizer.sgd_momentum" in result.out


def test_what_would_change_the_result_stops_before_anything_is_written(exgrpo, project):
    before = contents(project)
    result = exgrpo("train", FILE, *OVERRIDES[1:])
    assert_refused(
        result, before, "loss_fn.reference_policy_kl_penalty = 0.01", "give loss_fn.reference_policy_kl_penalty=0"
    )
