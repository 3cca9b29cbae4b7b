"""NeMo-RL's own files, unmodified (see NOTICE): what is taken, converted, left out and refused."""

from pathlib import Path

import pytest
import yaml

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.nemo_rl import is_nemo_rl
from exgrpo_megatron.nemo_rl.keys import FIXED, TABLE, row_of
from exgrpo_megatron.nemo_rl.markdown import nemo_rl_markdown
from exgrpo_megatron.recipe import load_recipe, load_with_report
from exgrpo_megatron.recipe_options import options
from exgrpo_megatron.recipe_table import derived_table

ROOT = Path(__file__).parents[3]
FILES = Path(__file__).parent / "files" / "examples" / "configs"
SMALL = FILES / "grpo_math_1B_megatron.yaml"
LARGE = FILES / "grpo_math_8B_megatron.yaml"
QWEN = FILES / "recipes" / "llm" / "grpo-qwen2.5-7b-instruct-4n8g-megatron.yaml"

# What has to be said to each of them: no KL term, no limit of epochs, files of questions.
NEEDED = [
    "loss_fn.reference_policy_kl_penalty=0",
    "grpo.max_num_epochs=null",
    "data.train.path=train.jsonl",
    "data.validation.path=held_out.jsonl",
]
SHORT = ["data.max_input_seq_length=128", "policy.generation.max_new_tokens=384"]
LONG = ["data.max_input_seq_length=1024", "policy.generation.max_new_tokens=3072"]


def write(folder, text):
    path = folder / "own.yaml"
    path.write_text(text)
    return path


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_a_file_as_published_is_refused_once_with_all_that_would_change_the_result():
    message = refusal(LARGE)
    for text in (
        "loss_fn.reference_policy_kl_penalty = 0.01: ExGRPO has no KL term",
        "give loss_fn.reference_policy_kl_penalty=0",
        "grpo.max_num_epochs = 1: ",
        "data.train.dataset_name = OpenMathInstruct-2: ",
        "give data.train.path=FILE",
        "data.train.split_validation_size = 0.05: ",
        "data.max_input_seq_length = 4096: 4096 tokens of prompt and 4096 of response",
    ):
        assert text in message
    assert message.count("\n    give ") == 5


def test_the_overrides_that_are_named_make_it_a_recipe():
    config = load_recipe(SMALL, [*NEEDED, *SHORT])
    # grpo_math_1B_megatron.yaml over grpo_math_1B.yaml, read by eye.
    grpo, policy, layout = config.grpo, config.policy, config.policy.megatron_cfg
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt, grpo.max_num_steps) == (32, 16, 1_000_000)
    assert (grpo.normalize_rewards, grpo.use_leave_one_out_baseline, grpo.val_period, grpo.seed) == (
        True,
        True,
        10,
        42,
    )
    assert (policy.train_global_batch_size, config.updates_per_step) == (512, 1)
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.2, 0.2)
    assert (layout.optimizer.lr, layout.optimizer.min_lr, layout.optimizer.adam_eps) == (5e-6, 5e-7, 1e-8)
    assert (layout.scheduler.lr_warmup_iters, layout.scheduler.lr_warmup_init) == (13, 5e-7)
    assert (policy.max_total_sequence_length, config.max_model_len) == (512, 512)
    assert policy.sequence_packing.enabled
    # ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}} = 512 x 4
    assert (policy.sequence_packing.train_mb_tokens, policy.sequence_packing.logprob_mb_tokens) == (2048, 2048)
    assert (policy.generation.backend, policy.precision, policy.generation.vllm_cfg.precision) == (
        "vllm", "bfloat16", "bfloat16",
    )  # fmt: skip
    assert (config.data.validation.max_questions, config.eval.num_tests_per_prompt) == (256, 1)
    assert (config.env.math.num_workers, config.checkpointing.metric_name) == (8, "validation/pass_rate_t1")
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (1, 1)


def test_units_are_converted_and_the_chain_of_defaults_is_followed():
    config = load_recipe(LARGE, [*NEEDED, *LONG])
    assert dict(derived_table(config))["sequences trained a step"] == "2048"  # 64 questions x 32 answers
    assert config.updates_per_step == 4  # 2048 / 512, of grpo_math_8B_megatron.yaml
    schedule = config.policy.megatron_cfg.scheduler
    # 13 training steps, each of 4 optimiser steps; the file's own 3e-8 over the 5e-7 beneath.
    assert (schedule.lr_warmup_iters, schedule.lr_warmup_init) == (52, 3e-8)
    assert config.policy.megatron_cfg.optimizer.lr == 3e-7
    assert config.policy.megatron_cfg.pipeline_model_parallel_size == 2
    # 4096 x train_micro_batch_size 1, and x logprob_batch_size 4
    assert config.policy.sequence_packing.train_mb_tokens == 4096
    assert config.policy.sequence_packing.logprob_mb_tokens == 16384
    assert config.env.math.num_workers == 1  # 8 in the run, 8 processes


def test_a_recipe_two_folders_down_finds_its_parent_and_its_prompt_file():
    config = load_recipe(QWEN, [*NEEDED, *LONG])
    assert (config.policy.megatron_cfg.tensor_model_parallel_size, config.grpo.max_num_steps) == (2, 30)
    assert config.policy.generation.vllm_cfg.tensor_parallel_size == 4
    assert config.policy.megatron_cfg.scheduler.lr_warmup_iters == 50 * 4
    # The file's {{}} is what a format string writes {} with.
    assert "\\boxed{} tags.:\n{question}\n" in config.data.prompt_template
    assert config.policy.tokenizer.name is None


def test_the_report_names_every_key_once():
    config, report = load_with_report(LARGE, [*NEEDED, *LONG])
    assert report is not None
    flat = " ".join(report.split())
    assert "lr_warmup_iters = 13 -> policy.megatron_cfg.scheduler.lr_warmup_iters = 52 (training steps x 4" in flat
    assert "experience.enabled = false: NeMo-RL's GRPO has no replay" in flat
    assert "of another optimiser: policy.megatron_cfg.optimizer.sgd_momentum" in flat
    assert "data.train.path is given instead: data.train.dataset_name" in flat
    assert flat.count("logger.wandb_enabled") == 1
    assert config.experience.enabled is False
    assert (config.loss_fn.entropy_bonus, config.loss_fn.entropy_coeff) == ("none", 0.0)
    assert config.loss_fn.normalizer == "global_tokens"


def test_keys_of_recipes_may_stand_beside_them_and_win():
    more = ["experience.enabled=true", "loss_fn.normalizer=global_width", "experience.replay_ratio=0.25"]
    config, report = load_with_report(SMALL, [*NEEDED, *SHORT, *more])
    assert (config.experience.enabled, config.loss_fn.normalizer, config.experience.replay_ratio) == (
        True, "global_width", 0.25,
    )  # fmt: skip
    assert "loss_fn.normalizer is given instead: loss_fn.token_level_loss" in report


def test_a_file_of_questions_is_taken_with_its_columns(tmp_path):
    path = write(
        tmp_path,
        f"defaults: {SMALL}\n"
        "data:\n"
        "  _override_: true\n"
        "  max_input_seq_length: 128\n"
        "  train: {data_path: mine.jsonl, input_key: problem}\n"
        "  validation: null\n"
        "  default: {dataset_name: ResponseDataset, output_key: solution, processor: math_hf_data_processor}\n",
    )
    config = load_recipe(path, [*NEEDED[:2], SHORT[1]])
    train = config.data.train
    assert (train.path, train.question_key, train.answer_key) == ("mine.jsonl", "problem", "solution")
    assert (config.data.validation, config.data.prompt_template) == (None, "{question}")


def of_older_layout(folder, *more, without=()):
    """The keys of v0.5.0's grpo_math_1B.yaml below `data`, those of v0.3 and v0.4 among them, over the newer file."""
    (folder / "cot.txt").write_text("Think.\n{}\n")
    lines = {
        "max_input_seq_length": "${policy.max_total_sequence_length}",
        "prompt_file": "cot.txt",
        "system_prompt_file": "null",
        "shuffle": "true",
        "num_workers": "1",
        "processor": "math_hf_data_processor",
        "env_name": "math",
        "dataset_name": "OpenMathInstruct-2",
    }
    data = [f"  {key}: {value}" for key, value in lines.items() if key not in without]
    text = "\n".join([f"defaults: {SMALL}", "data:", "  _override_: true", *data, *(f"  {line}" for line in more)])
    return write(folder, f"{text}\npolicy: {{fsdp_offload_enabled: false, activation_checkpointing_enabled: false}}\n")


def test_what_the_first_message_names_suffices_in_the_layout_before_v0_6_too(tmp_path):
    path = of_older_layout(tmp_path)
    message = refusal(path)
    assert "give data.train.path=FILE data.validation.path=FILE (JSONL" in message
    assert message.count("\n    give ") == 4  # epochs, KL, length, data set
    config = load_recipe(path, [*NEEDED, *SHORT])
    assert (config.data.prompt_template, config.data.system_prompt) == ("Think.\n{question}\n", None)
    assert (config.data.train.path, config.data.validation.path) == ("train.jsonl", "held_out.jsonl")
    assert config.data.validation.max_questions == 256
    alone = load_recipe(path, [*NEEDED[:3], "data.validation=null", *SHORT])
    assert alone.data.validation is None
    half = refusal(path, *NEEDED[:3], *SHORT)
    assert "give data.validation.path=FILE (" in half
    assert half.count("\n    give ") == 1


def test_files_of_questions_in_the_older_layout_are_taken_with_their_columns(tmp_path):
    named = ["train_data_path: a.jsonl", "val_data_path: b.jsonl", "input_key: problem", "train_split: null"]
    path = of_older_layout(tmp_path, "dataset_name: ResponseDataset", *named, without=("dataset_name",))
    data = load_recipe(path, [*NEEDED[:2], *SHORT]).data
    assert (data.train.path, data.train.question_key, data.train.answer_key) == ("a.jsonl", "problem", "output")
    assert (data.validation.path, data.validation.question_key) == ("b.jsonl", "problem")
    assert data.validation.max_questions == 256
    replaced = load_recipe(path, [*NEEDED, *SHORT]).data
    assert (replaced.train.path, replaced.train.question_key) == ("train.jsonl", "question")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.val_dataset_name=AIME2024", "give data.validation.path=FILE, or data.val_dataset_name=null"),
        ("data.env_name=reward_model", "give data.env_name=math"),
        ("data.prompt_file=none.txt", "give data.prompt_template=TEXT, or data.prompt_file=FILE"),
        ("data.shuffle=false", "give data.shuffle=true"),
    ],
)
def test_keys_of_the_older_layout_are_refused_with_the_override_to_give(override, text, tmp_path):
    assert text in refusal(of_older_layout(tmp_path), *NEEDED[:3], *SHORT, override)


def test_questions_of_ones_own_function_stand_for_a_data_set_too(tmp_path):
    own = [f"data.{name}.source_function=own:questions" for name in ("train", "validation")]
    config = load_recipe(of_older_layout(tmp_path), [*NEEDED[:2], *own, *SHORT])
    assert (config.data.train.path, config.data.validation.max_questions) == (None, 256)
    load_recipe(SMALL, [*NEEDED[:2], *own, *SHORT])


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("grpo.use_dynamic_sampling=true", "give grpo.use_dynamic_sampling=false"),
        ("grpo.async_grpo.enabled=true", "rollouts and training take turns"),
        ("loss_fn.ratio_clip_c=3", "the ratio is clipped once"),
        ("loss_fn.use_cispo=true", "loss_fn.use_cispo = true"),
        ("loss_fn.sequence_level_importance_ratios=true", "the ratio is that of a token"),
        ("policy.generation.top_p=0.9", "give policy.generation.top_p=1"),
        ("policy.generation.backend=megatron", "give policy.generation.backend=vllm"),
        ("policy.generation.vllm_cfg.precision=fp8", "in float32 or bfloat16"),
        ("policy.megatron_cfg.expert_model_parallel_size=8", "models with experts are not supported"),
        ("policy.megatron_cfg.peft.enabled=true", "all weights are trained"),
        ("policy.megatron_cfg.optimizer.clip_grad=0.5", "differs from policy.max_grad_norm = 1.0"),
        ("policy.megatron_cfg.scheduler.end_weight_decay=0.1", "optimizer.weight_decay = 0.01"),
        ("policy.megatron_cfg.enabled=false", "the actor is Megatron-Core"),
        ("policy.megatron_cfg.env_vars={A: b, C: d}", "env_vars.A = b, policy.megatron_cfg.env_vars.C = d: "),
        ("env.math.math_verify_impl=dapo_math_verify", "the verifier is Math-Verify"),
        ("data.shuffle=false", "questions are always shuffled"),
        ("data.default.prompt_file=none.txt", "'none.txt' cannot be used: no such file"),
        ("checkpointing.metric_name=train:loss", "that of a metric of the evaluations"),
        ("grpo.not_a_key=1", "grpo.not_a_key: unknown key; nearest:"),
        ("data.prompt_template={question}", "a text in braces needs quotes"),
        ("policy.train_global_batch_size=many", "policy.train_global_batch_size = 'many': must be a whole number"),
    ],
)
def test_what_would_change_the_result_is_refused(override, text):
    assert text in refusal(SMALL, *NEEDED, *SHORT, override)


def test_a_forced_ratio_changes_nothing_with_one_optimiser_step():
    forced = "loss_fn.force_on_policy_ratio=true"
    load_recipe(SMALL, [*NEEDED, *SHORT, forced])
    assert "there are 4 optimiser steps a training step" in refusal(LARGE, *NEEDED, *LONG, forced)


@pytest.mark.parametrize(
    ("given", "top_k", "last_n"),
    [
        ([], 3, 2),  # as published: 3 by val:accuracy
        (["keep_top_k=null"], None, 2),
        (["ft_keep_latest_k=5"], 3, 5),
        (["metric_name=null"], 1, 3),
        (["metric_name=null", "ft_keep_latest_k=5"], 1, 5),
        (["metric_name=null", "ft_keep_latest_k=2"], 1, 3),
    ],
)
def test_the_checkpoints_that_it_keeps_are_kept(given, top_k, last_n):
    kept = load_recipe(SMALL, [*NEEDED, *SHORT, *(f"checkpointing.{override}" for override in given)]).checkpointing
    assert (kept.keep_top_k, kept.keep_last_n) == (top_k, last_n)


def test_what_is_nemo_rls_and_what_is_ours():
    assert is_nemo_rl({"policy": {"megatron_cfg": {"enabled": True}}, "loss_fn": {"reference_policy_kl_penalty": 0}})
    assert not is_nemo_rl({"policy": {"megatron_cfg": {"enabled": True}}, "loss_fn": {}})
    assert not is_nemo_rl({"policy": None, "loss_fn": {"reference_policy_kl_penalty": 0}})
    recipes = ROOT / "recipes"
    for path in {*recipes.rglob("*.yaml")} - {*recipes.glob("evaluation/*.yaml")}:  # parts, no recipes by themselves
        assert load_with_report(path)[1] is None


def test_no_pattern_of_the_table_swallows_a_key_of_ours():
    judged = ("grpo.reward_shaping.", "policy.sequence_packing.", "policy.dynamic_batching.")
    caught = [o.name for o in options() if o.name not in TABLE and row_of(o.name) and not o.name.startswith(judged)]
    assert caught == []
    known = {option.name for option in options()}
    assert set(FIXED) <= known


def test_a_section_marked_as_override_replaces_the_one_beneath(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"data": {"train": {"generator": "chain_arithmetic"}}}))
    path = write(
        tmp_path,
        "defaults: [base.yaml]\npolicy: {model_name: 'embedded:chain-qwen2'}\n"
        "data: {_override_: true, train: {path: a.jsonl}}\n",
    )
    assert load_recipe(path).data.train.generator is None


def test_the_documented_table_is_the_one_in_the_code():
    text = (ROOT / "docs" / "nemo.md").read_text(encoding="utf-8")
    assert text.endswith(nemo_rl_markdown()), "run `make docs`"
