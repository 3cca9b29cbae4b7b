"""Recipes: what is accepted, what is refused, and that every refusal names its key, value and rule."""

from pathlib import Path

import pytest
import yaml

from exgrpo_megatron.config import VARIANTS
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.recipe import changed_keys, dump_recipe, load_recipe, parse_recipe
from exgrpo_megatron.recipe_options import options
from exgrpo_megatron.recipe_table import derived_table

RECIPES = Path(__file__).parents[2] / "recipes"
MINIMAL = {"data": {"train": {"generator": "chain_arithmetic"}}, "policy": {"model_name": "embedded:chain-qwen2"}}

SEEDS = ["grpo.seed", "data.train.generator_seed", "sft.seed", "eval.seed"]
NAMES = [
    "policy.model_name", "policy.tokenizer.name", "logger.log_dir", "checkpointing.checkpoint_dir",
    "sft.warm_start_dir", "experience.prefill_path", "data.train.path", "data.train.question_key",
    "data.train.answer_key", "data.train.answer_marker", "data.train.id_key", "data.train.category_key",
    "data.train.solution_key",
]  # fmt: skip


def recipe_with(**sections):
    return {**{name: dict(value) for name, value in MINIMAL.items()}, **sections}


def refusal(raw_or_overrides, tmp_path):
    if isinstance(raw_or_overrides, dict):
        with pytest.raises(ConfigError) as caught:
            parse_recipe(raw_or_overrides)
    else:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(MINIMAL))
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, raw_or_overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_recipe_loads_and_survives_a_dump(path):
    config = load_recipe(path)
    assert parse_recipe(yaml.safe_load(dump_recipe(config))) == config


@pytest.mark.parametrize("variant", ["paper", "code", "corrected"])
def test_a_variant_sets_every_switch_and_a_given_switch_wins(variant):
    config = parse_recipe(recipe_with(variant=variant))
    assert config.variant_table() == {name: values[variant] for name, values in VARIANTS.items()}
    one = parse_recipe(recipe_with(variant=variant, experience={"bucket_weight": "linear"}))
    assert one.experience.bucket_weight == "linear"
    assert one.loss_fn == config.loss_fn


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["experience.replay_ration=0.5"], ["experience.replay_ration", "nearest: experience.replay_ratio"]),
        (["policy.lr=1"], ["policy.lr", "policy.megatron_cfg.optimizer.lr"]),
        (["grpo.num_prompts_per_step=0"], ["grpo.num_prompts_per_step = 0", "greater than or equal to 1"]),
        (["policy.train_global_batch_size=100"], ["= 100", "grpo.num_generations_per_prompt = 8"]),
        (["policy.train_global_batch_size=96"], ["32 * 8", "policy.train_global_batch_size = 96"]),
        (["data.max_input_seq_length=600"], ["600 + 96", "policy.max_total_sequence_length = 608"]),
        (["policy.megatron_cfg.context_parallel_size=0"], ["context_parallel_size = 0", "greater than or equal to 1"]),
        (
            ["policy.megatron_cfg.expert_model_parallel_size=2"],
            ["policy.megatron_cfg: expert_model_parallel_size = 2", "models with experts are not supported"],
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=true"],
            ["policy: dynamic_batching.enabled = true and sequence_packing.enabled = true"],
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.train_micro_batch_size=4"],
            ["policy: train_micro_batch_size = 4", "sequence_packing.enabled = true", "null"],
        ),
        (
            ["policy.dynamic_batching.enabled=true", "policy.logprob_batch_size=4"],
            ["policy: logprob_batch_size = 4", "dynamic_batching.enabled = true", "null"],
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=600"],
            ["policy: sequence_packing.train_mb_tokens = 600", "max_total_sequence_length = 608", "(608 positions)"],
        ),
        (
            [
                "policy.dynamic_batching={enabled: true, logprob_mb_tokens: 608, sequence_length_round: 64}",
                "policy.megatron_cfg.context_parallel_size=2",
            ],
            ["policy: dynamic_batching.logprob_mb_tokens = 608", "(640 positions, padded to a multiple of 64)"],
        ),
        (
            ["policy.megatron_cfg.distributed_data_parallel_config.bucket_size=1000"],
            ["bucket_size = 1000", "overlap_grad_reduce = false"],
        ),
        (["policy.make_sequence_length_divisible_by=8"], ["make_sequence_length_divisible_by", "leave it out"]),
        (
            ["policy.megatron_cfg.sequence_parallel=true"],
            ["policy.megatron_cfg", "sequence_parallel = true", "tensor_model_parallel_size = 1"],
        ),
        (
            ["policy.megatron_cfg.virtual_pipeline_model_parallel_size=2"],
            ["virtual_pipeline_model_parallel_size = 2", "pipeline_model_parallel_size = 1"],
        ),
        (
            ["policy.megatron_cfg.num_layers_in_last_pipeline_stage=3"],
            ["num_layers_in_last_pipeline_stage = 3", "pipeline_model_parallel_size = 1"],
        ),
        (
            ["policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather=true"],
            ["overlap_param_gather = true", "overlap_grad_reduce = true", "use_distributed_optimizer = true"],
        ),
        (
            ["policy.generation.vllm_cfg.async_engine=false"],
            ["policy.generation.vllm_cfg.async_engine", "take turns"],
        ),
        (["policy.generation.top_p=0.9"], ["policy.generation.top_p", "recorded log-probs"]),
        (["grpo.max_num_epochs=2"], ["grpo.max_num_epochs", "use grpo.max_num_steps"]),
        (["experience.replay_ratio=.nan"], ["experience.replay_ratio", "finite number"]),
        (["experience.difficulty=window"], ["difficulty = 'window' with difficulty_window = None"]),
        (["experience.difficulty_window=8"], ["difficulty = 'last_group' with difficulty_window = 8"]),
        (["experience={difficulty: window, difficulty_window: 129}"], ["difficulty_window = 129", "equal to 128"]),
        (["experience.difficulty_reward_range=[0, 2]"], ["difficulty_reward_range = [0.0, 2.0] has no effect"]),
        (
            ["experience={difficulty: reward_variance, difficulty_reward_range: [1, 1]}"],
            ["difficulty_reward_range = [1.0, 1.0]: the first must be below"],
        ),
        (["experience.difficulty_range_unit=quantile"], ["= 'quantile' has no effect while difficulty_range is null"]),
        (["experience.difficulty_range=[0.7, 0.3]"], ["difficulty_range = [0.7, 0.3]: the first must be below"]),
        (
            ["experience={difficulty: reward_variance, bucket_weight: uniform}"],
            ["difficulty = 'reward_variance' has no effect with bucket_weight = 'uniform'"],
        ),
        (
            ["experience={difficulty_per_category: true, bucket_weight: uniform, difficulty_range: [0, 0.5]}"],
            ["difficulty_per_category = true has no effect with bucket_weight = 'uniform'"],
        ),
        (
            ["experience.difficulty_per_category=true", "data.train={generator: null, path: x.jsonl}"],
            ["experience.difficulty_per_category = true", "data.train.category_key is null"],
        ),
        (["experience.entropy_percentile=100"], ["experience.entropy_percentile = 100", "less than 100"]),
        (["data.prompt_template=solve"], ["prompt_template", "{question}", "'solve'"]),
        (["data.train.path=x.jsonl"], ["data.train", "x.jsonl", "chain_arithmetic"]),
        (["data.train.path=x.jsonl"], ["generator: null"]),
        (
            ["data.train.path=x.jsonl", "data.train.generator=null", "sft.warm_start=true"],
            ["sft.warm_start = true", "data.train.solution_key is null", "sft.data"],
        ),
        (["grpo.seed"], ["'grpo.seed'", "section.key=value"]),
        (
            ["policy.megatron_cfg.scheduler={lr_decay_style: linear, lr_warmup_iters: 1000}"],
            [
                "policy.megatron_cfg.scheduler.lr_warmup_iters = 1000 must be below",
                "lr_decay_iters = None, whole run =",
            ],
        ),
        (
            ["policy.megatron_cfg.scheduler.lr_warmup_init=1e-7"],
            ["policy.megatron_cfg.scheduler: lr_warmup_init = 1e-07 has no effect with lr_warmup_iters = 0"],
        ),
        (
            ["policy.megatron_cfg.scheduler={lr_warmup_iters: 2, lr_warmup_init: 0.1}"],
            ["policy.megatron_cfg.scheduler.lr_warmup_init = 0.1 must not be above policy.megatron_cfg.optimizer.lr"],
        ),
        (["sft.max_num_steps=50"], ["sft.scheduler.lr_warmup_iters = 50 must be below the 50", "whole run = 50"]),
        (["sft.optimizer={lr: 0.1, min_lr: 0.2}"], ["sft.optimizer.min_lr = 0.2", "sft.optimizer.lr = 0.1"]),
        (
            ["loss_fn.disable_ppo_ratio=true"],
            ["loss_fn.disable_ppo_ratio = true, but experience.enabled = true", "experience.shaping = 'log_prob'"],
        ),
        (
            ["loss_fn.disable_ppo_ratio=true", "experience.enabled=false", "loss_fn.ratio_clip_max=0.3"],
            ["loss_fn", "ratio_clip_max = 0.3 has no effect", "disable_ppo_ratio = true"],
        ),
        (["env.reward_function=reward.py"], ["env.reward_function", "'reward.py' is not package.module:function"]),
        (["env.correct_above=0.5"], ["env", "correct_above = 0.5 has no effect", "reward_function = None"]),
        (
            ["env.reward_function=a.b:c", "env.math={require_literal: true}"],
            ["env", "math.require_literal = True has no effect", "reward_function = 'a.b:c'"],
        ),
        (["experience.solved_above=0.9"], ["experience.solved_above = 0.9 has no effect without env.reward_function"]),
        (
            ["experience.solved_above=0.5", "env={reward_function: 'a:b', correct_above: 0.5}"],
            ["experience.solved_above = 0.5 is not above env.correct_above = 0.5"],
        ),
        (
            ["checkpointing.metric_name=validation/reward_t1"],
            ["'validation/reward_t1' is measured with env.reward_function alone", "'validation/pass_rate_t1'"],
        ),
        (["variant=papper"], ["variant = 'papper'", "'corrected', 'paper' or 'code'"]),
        (["variant=[]"], ["variant = []", "'corrected', 'paper' or 'code'"]),
        (["variant={}"], ["variant = {}", "'corrected', 'paper' or 'code'"]),
        (["variant.x=1"], ["variant = {'x': 1}", "'corrected', 'paper' or 'code'"]),
        *(([f"{key}={2**63}"], [f"{key} = {2**63}", "less than 9223372036854775808"]) for key in SEEDS),
        (["data.train.generator_difficulties=[]"], ["generator_difficulties = []", "at least 1 item"]),
        (["policy.generation.stop_token_ids=[]"], ["stop_token_ids = []", "at least 1 item"]),
        (["policy.megatron_cfg.optimizer.lr=1e300"], ["optimizer.lr = 1e+300", "less than or equal to 10"]),
        (["sft.optimizer.lr=11"], ["sft.optimizer.lr = 11", "less than or equal to 10"]),
        (
            ["loss_fn={use_importance_sampling_correction: true, old_logprobs: engine}"],
            ["loss_fn: use_importance_sampling_correction = true", "old_logprobs = 'engine'", "'recomputed'"],
        ),
        (
            ["loss_fn.truncated_importance_sampling_ratio=2"],
            ["truncated_importance_sampling_ratio = 2", "use_importance_sampling_correction = false"],
        ),
        (["loss_fn={entropy_bonus: none, entropy_coeff: 0.01}"], ["entropy_coeff = 0.01 has no effect", "'none'"]),
        (["loss_fn.rollout_is=sequence"], ["rollout_is = 'sequence'", "use_importance_sampling_correction = false"]),
        (
            [
                "loss_fn={use_importance_sampling_correction: true, truncated_importance_sampling_type: icepop, "
                "truncated_importance_sampling_ratio: 2}"
            ],
            ["truncated_importance_sampling_type = 'icepop' needs both limits", "None and 2"],
        ),
        (
            ["loss_fn={use_importance_sampling_correction: true, truncated_importance_sampling_ratio_min: 2}"],
            ["truncated_importance_sampling_ratio_min = 2", "truncated_importance_sampling_ratio is null"],
        ),
        (
            [
                "loss_fn={use_importance_sampling_correction: true, truncated_importance_sampling_ratio_min: 2, "
                "truncated_importance_sampling_ratio: 1}"
            ],
            ["ratio_min = 2.0 is above truncated_importance_sampling_ratio = 1.0"],
        ),
        (
            [
                "loss_fn={use_importance_sampling_correction: true, truncated_importance_sampling_type: seq-mask-tis, "
                "truncated_importance_sampling_ratio_min: 0.9, truncated_importance_sampling_ratio: 1.1, "
                "rollout_is: sequence}"
            ],
            ["truncated_importance_sampling_type = 'seq-mask-tis'", "rollout_is = 'sequence'"],
        ),
        (
            ["policy.loss_kernel=logits", "policy.logprob_chunk_size=64"],
            ["policy: logprob_chunk_size = 64 has no effect with loss_kernel = 'logits'", "loss_kernel to 'linear'"],
        ),
        (
            ["grpo.reward_shaping.overlong_buffer_penalty=1"],
            ["grpo.reward_shaping: overlong_buffer_penalty = 1.0", "enabled = false"],
        ),
        (
            ["grpo.reward_shaping={enabled: true, overlong_buffer_penalty: 1}"],
            ["grpo.reward_shaping: enabled = true, but overlong_buffer_length is null"],
        ),
        (
            ["grpo.reward_shaping={enabled: true, overlong_buffer_penalty: 1, overlong_buffer_length: 97}"],
            ["max_response_length - overlong_buffer_length = 96 - 97 = -1", "policy.generation.max_new_tokens = 96"],
        ),
        (
            [
                "grpo.reward_shaping={enabled: true, overlong_buffer_penalty: 1, overlong_buffer_length: 4, "
                "max_response_length: 100}"
            ],
            ["max_response_length - overlong_buffer_length = 100 - 4 = 96", "policy.generation.max_new_tokens = 96"],
        ),
        (["loss_fn.max_abs_log_ratio=1e300"], ["max_abs_log_ratio = 1e+300", "less than or equal to 80"]),
        (["env.math.timeout_s=1e300"], ["env.math.timeout_s = 1e+300", "less than or equal to 86400"]),
        (["policy.generation.temperature=1e-4"], ["temperature = 0.0001", "greater than or equal to 0.001"]),
        (["eval.temperature=1001"], ["eval.temperature = 1001", "less than or equal to 1000"]),
        (["checkpointing.metric_name=nonsense"], ["metric_name = 'nonsense'", "validation/pass_rate_t1"]),
        (["checkpointing.metric_name=validation/truncated/2"], ["metric_name = 'validation/truncated/2'"]),
        (
            ["eval.greedy=false", "data.validation.generator=chain_arithmetic"],
            ["eval.greedy = false", "metric_name = 'validation/pass_rate_greedy'", "'validation/pass_rate_t1'"],
        ),
        (["grpo.seed=1:30"], ["grpo.seed = '1:30'", "valid integer"]),
        (["grpo.seed=0x10"], ["grpo.seed = '0x10'", "valid integer"]),
        (["grpo.seed=" + "9" * 5000], ["override 'grpo.seed=999", "a number of 5000 digits"]),
        (["grpo.seed=!!bool maybe"], ["override 'grpo.seed=!!bool maybe'", "its tag does not admit"]),
        (["grpo.seed={a: 1, a: 2}"], ["override 'grpo.seed={a: 1, a: 2}'", "'a' stands twice"]),
        (["grpo.seed=" + "[" * 5000], ["override 'grpo.seed=[[[", "nested too deeply"]),
        (["grpo.seed" + ".a" * 5000 + "=1"], ["grpo.seed = (a dict)", "valid integer"]),
    ],
)
def test_a_bad_value_names_its_key_value_and_rule(overrides, parts, tmp_path):
    message = refusal(overrides, tmp_path)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_name_is_refused(name, tmp_path):
    message = refusal([f"{name}=''"], tmp_path)
    assert f"{name} = ''" in message
    assert "at least 1 character" in message


def test_true_and_false_are_no_numbers(tmp_path):
    """Every key with a number as its default, and those where null is the default of one."""
    numbers = [option.name for option in options() if option.default.strip("+-").replace(".", "").isdecimal()]
    optional = ["cluster.num_nodes", "policy.megatron_cfg.scheduler.lr_decay_iters", "data.train.max_questions"]
    assert {"grpo.max_num_steps", "policy.megatron_cfg.tensor_model_parallel_size", "eval.temperature"} <= {*numbers}
    numbers = [name for name in numbers if not name.startswith(("data.validation.", "sft.data."))]
    message = refusal([f"{name}=true" for name in [*numbers, *optional]], tmp_path)
    for name in [*numbers, *optional]:
        assert f"{name} = True: Input should be a number, not true or false" in message
    assert "stop_token_ids = [False]" in refusal(["policy.generation.stop_token_ids=[false]"], tmp_path)
    assert parse_recipe(recipe_with(loss_fn={"clip_in_mixed_phase": True})).loss_fn.clip_in_mixed_phase is True


def test_numbers_are_read_as_people_write_them(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + "grpo: {seed: 010}\nexperience: {shaping_beta: 1e-3}\n")
    config = load_recipe(path, ["sft.seed=0017", "policy.megatron_cfg.optimizer.lr=1e-6", "loss_fn.ratio_clip_max=.5"])
    assert (config.grpo.seed, config.sft.seed) == (10, 17)
    assert (config.experience.shaping_beta, config.policy.megatron_cfg.optimizer.lr) == (1e-3, 1e-6)
    assert config.loss_fn.ratio_clip_max == 0.5


@pytest.mark.parametrize("name", ["010", "1:30", "1e-6", "0x10", "2024-01-01", "1_000", ".5", "null", "true", "+.inf"])
def test_a_name_that_looks_like_a_number_survives_a_dump(name, tmp_path):
    config = parse_recipe(recipe_with(logger={"log_dir": name}))
    dumped = dump_recipe(config)
    (tmp_path / "recipe.yaml").write_text(dumped)
    assert load_recipe(tmp_path / "recipe.yaml") == config
    assert parse_recipe(yaml.safe_load(dumped)) == config


@pytest.mark.parametrize("given", ["null", "5", "[5]", "''", "{a: b}"])
def test_defaults_that_name_no_file_are_refused(given, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"defaults: {given}\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: defaults = .*: must be the name of a recipe file"):
        load_recipe(path)


def test_greedy_decoding_may_be_left_out_where_nothing_needs_it():
    validation = {"generator": "chain_arithmetic"}
    raw = recipe_with(eval={"greedy": False}, checkpointing={"metric_name": "validation/pass_rate_t1/number theory"})
    raw["data"]["validation"] = validation
    assert parse_recipe(raw).checkpointing.metric_name == "validation/pass_rate_t1/number theory"
    assert not parse_recipe(recipe_with(eval={"greedy": False})).eval.greedy


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"train_micro_batch_size": 48}, "3 on each of 2 data-parallel rank(s), of at most 48 sequences"),
        (
            {"dynamic_batching": {"enabled": True, "train_mb_tokens": 4096}},
            "as many as the lengths need, each of at most 4096 positions, padded",
        ),
        # Without a limit of its own a pack has room for the longest sequence, 608 tokens.
        ({"sequence_packing": {"enabled": True}}, "as many as the lengths need, each of at most 608 positions, packed"),
    ],
)
def test_micro_batches_are_told_by_the_rule_in_force(policy, expected):
    raw = recipe_with()
    raw["policy"] = raw["policy"] | policy
    assert dict(derived_table(parse_recipe(raw), data_parallel_size=2))["micro-batches an optimiser step"] == expected


def test_several_faults_are_reported_together(tmp_path):
    message = refusal(["grpo.seed=-1", "loss_fn.ratio_clip=0.1"], tmp_path)
    assert "grpo.seed = -1" in message
    assert "loss_fn.ratio_clip: unknown key" in message


def test_a_recipe_file_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such recipe file"):
        load_recipe(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("grpo: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not valid YAML"):
        load_recipe(broken)
    broken.write_text("- a list")
    with pytest.raises(ConfigError, match="mapping of sections, found list"):
        load_recipe(broken)
    broken.write_text("grpo:\n  seed: 1\n  seed: 2\n")
    with pytest.raises(ConfigError, match="line 3: key 'seed' stands twice"):
        load_recipe(broken)
    broken.write_text("grpo: " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"broken\.yaml: not a recipe: it is nested too deeply"):
        load_recipe(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as a recipe"):
        load_recipe(broken)


def test_defaults_are_merged_beneath_the_recipe_and_circles_are_refused(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe_with(grpo={"seed": 5, "max_num_steps": 7})))
    child = tmp_path / "child.yaml"
    child.write_text("defaults: base.yaml\ngrpo: {max_num_steps: 9}\n")
    config = load_recipe(child, ["grpo.val_period=3"])
    assert (config.grpo.seed, config.grpo.max_num_steps, config.grpo.val_period) == (5, 9, 3)
    (tmp_path / "base.yaml").write_text("defaults: child.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_recipe(child)


def test_the_derived_table_counts_questions_sequences_and_updates():
    # By hand: 128 questions x 8 answers = 1024 sequences, 2 optimiser steps of 512; 64 replayed save 64 rollouts.
    raw = recipe_with(grpo={"num_prompts_per_step": 128, "max_num_steps": 700})
    raw["policy"]["train_global_batch_size"] = 512
    table = dict(derived_table(parse_recipe(raw), data_parallel_size=4))
    assert table["sequences trained a step"] == "1024"
    assert table["rollouts a step"] == "1024 without replay, at least 960 with it"
    assert table["optimiser steps a step"] == "2"
    assert table["optimiser steps in all"] == "1400"
    assert table["micro-batches an optimiser step"].startswith("2 on each of 4")
    # 0.29 * 100 is 28.999... in binary; the recipe means 29, and 29 are replayed.
    odd = recipe_with(grpo={"num_prompts_per_step": 100}, experience={"replay_ratio": 0.29})
    odd["policy"]["train_global_batch_size"] = 800
    assert dict(derived_table(parse_recipe(odd)))["questions a step"] == "100, of which at most 29 replayed"


def test_every_option_has_a_meaning_and_numbers_have_units_or_are_plain():
    listed = options()
    assert len(listed) == len({option.name for option in listed}) > 80
    assert all(option.meaning for option in listed)


def test_options_name_the_values_a_key_admits_and_can_be_filtered():
    meanings = {option.name: option.meaning for option in options()}
    assert meanings["variant"].endswith("one of corrected, paper, code")
    assert meanings["data.train.generator"].endswith("one of chain_arithmetic, unknown_symbols")
    # Explained one by one in the text: not listed again.
    assert "one of" not in meanings["experience.shaping"]
    assert {option.name.split(".")[0] for option in options("sft.")} == {"sft"}


def test_a_runs_folder_given_as_recipe_points_to_the_recipe_in_it(tmp_path):
    (tmp_path / "recipe.yaml").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"a folder, not a recipe file; a run is resumed by its recipe: .*recipe\.yaml"
    ):
        load_recipe(tmp_path)


def test_changed_keys_lists_each_leaf_with_both_values():
    old = {"grpo": {"seed": 1, "max_num_steps": 5}, "variant": "paper"}
    new = {"grpo": {"seed": 2, "max_num_steps": 5}, "variant": "code"}
    assert changed_keys(old, new) == ["grpo.seed: 1 -> 2", "variant: paper -> code"]
