"""No key of the algorithm does nothing: every one, set to another value, leaves another trace of the same run.

What each changes, and by how much, is in test_variants.py and test_objective_keys.py.
"""

import numpy as np
import pytest
from scripted import build_trainer, plant, right, token_ids, wrong

from exgrpo_megatron.config import (
    VARIANTS,
    ClusterConfig,
    DemonstrationsConfig,
    ExperienceConfig,
    GRPOConfig,
    LossConfig,
    ReplayStepConfig,
    RepoConfig,
)

ENGINE = {"loss_fn": {"old_logprobs": "engine"}}
CORRECTED = {"loss_fn": {"use_importance_sampling_correction": True}}
LIMITS = {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 0.5}
LIMITED = {"loss_fn": {"use_importance_sampling_correction": True, **LIMITS}}
SHORT = {"policy": {"generation": {"max_new_tokens": 5}}}
ON_POLICY = {"experience": {"start_pass_rate": 1.0}}

WINDOW = {"experience": {"difficulty": "window", "difficulty_window": 8}}
VARIANCE = {"experience": {"difficulty": "reward_variance"}}
RANGE = {"experience": {"difficulty_range": [0.2, 0.6]}}
CATEGORIES = {"data": {"train": {"category_key": "answer"}}}
STARTED = {"experience": {"start_pass_rate": 0.45}}
GUARDED = {"experience": {"guards": {"max_kl_replayed": 1e-6, "action": "clip"}}}
HELD = {"experience": {"guards": {"max_kl_replayed": 1e-6, "action": "on_policy"}}}
CAPPED = {"experience": {"max_answers": 12}}
BOTH = {"experience": {"strategy": "both"}}
SMALL_STEPS = {"experience": {"strategy": "both", "replay_step": {"size": 0.25}}}

# The questions q1, q2, ... are chains, whose worked solutions the generator's side knows.
SHOWN = {
    "experience": {"enabled": False},
    "demonstrations": {"enabled": True, "data": {"generator": "chain_arithmetic"}},
}

# Every question comes back after three steps: in step 7 each has twice the default number of answers to choose from.
REPO = {
    "experience": {"enabled": False},
    "repo": {"enabled": True, "min_kept": 8},
    "grpo": {"num_generations_per_prompt": 8},
    "num_questions": 12,
}

STEPS = 7

# (key, another value, what the run is beside the default): the default is B = 4, K = 4, replay on from the first step.
CASES = [
    ("variant", "paper", {}),
    ("variant", "code", {}),
    ("grpo.num_prompts_per_step", 8, {}),
    ("grpo.num_generations_per_prompt", 8, {}),
    ("grpo.seed", 11, {}),
    ("grpo.num_iterations", 2, {}),
    ("grpo.normalize_rewards", True, {}),
    ("grpo.use_leave_one_out_baseline", True, {}),
    ("grpo.scale_by_informative_groups", True, {}),
    ("grpo.overlong_filtering", True, SHORT),
    (
        "grpo.reward_shaping",
        {"enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 0.5, "max_response_length": 8},
        {},
    ),
    ("loss_fn.use_importance_sampling_correction", True, {}),
    ("loss_fn.rollout_is", "sequence", CORRECTED),
    ("loss_fn.truncated_importance_sampling_ratio", 2.0, CORRECTED),
    ("loss_fn.truncated_importance_sampling_ratio_min", 0.9, LIMITED),
    ("loss_fn.truncated_importance_sampling_type", "icepop", LIMITED),
    ("loss_fn.truncated_importance_sampling_type", "seq-mask-tis", LIMITED),
    ("loss_fn.ratio_clip_min", 0.99, {**ENGINE, **ON_POLICY}),
    ("loss_fn.ratio_clip_max", 2.0, {"loss_fn": {"old_logprobs": "engine", "clip_in_mixed_phase": True}}),
    ("loss_fn.clip_in_mixed_phase", True, ENGINE),
    ("loss_fn.normalizer", "per_answer_length", {}),
    ("loss_fn.normalizer", "global_tokens", {}),
    ("loss_fn.normalizer", "rank_width", {}),
    ("loss_fn.disable_ppo_ratio", True, {"experience": {"enabled": False}}),
    ("loss_fn.entropy_coeff", 0.002, {}),
    ("loss_fn.entropy_bonus", "per_micro_batch", {"policy": {"train_micro_batch_size": 4}}),
    ("loss_fn.entropy_bonus", "none", {}),
    ("loss_fn.old_logprobs", "engine", {}),
    ("loss_fn.max_abs_log_ratio", 1.0, ENGINE),
    ("experience.enabled", False, {}),
    ("experience.replay_ratio", 0.25, {}),
    ("experience.replay_probability", 0.5, {}),
    ("experience.start_pass_rate", 0.9, {}),
    ("experience.start_epoch", 1, {}),
    ("experience.start_step", 3, {}),
    ("experience.stop_pass_rate", 0.45, STARTED),
    ("experience.pass_rate_steps", 3, STARTED),
    ("experience.return_retired", {"share": 0.5, "period": 1}, {}),
    ("experience.guards", {"max_kl_replayed": 1e-6}, {}),
    ("experience.guards", {"max_kl_replayed": 1e-6, "action": "clip"}, {}),
    ("experience.guards", {"max_kl_replayed": 1e-6, "action": "clip", "ratio_cap": 0.5}, GUARDED),
    ("experience.guards", {"max_kl_replayed": 1e-6, "action": "on_policy"}, GUARDED),
    ("experience.guards", {"max_kl_replayed": 1e-6, "action": "on_policy", "hold_steps": 1}, HELD),
    ("experience.alarms", {"min_data_left": 0.9}, {}),
    ("experience.bucket_weight", "accuracy", {}),
    ("experience.bucket_weight", "linear", {}),
    ("experience.bucket_weight", "sqrt", {}),
    ("experience.bucket_weight", "linear_clip", {}),
    ("experience.bucket_weight", "uniform", {}),
    ("experience.bucket_sigma", 0.1, {}),
    ("experience.answer_choice", "lowest_total_entropy", {}),
    ("experience.answer_choice", "lowest_perplexity", {}),
    ("experience.answer_choice", "random", {}),
    ("experience.answer_choice", "shortest", {}),
    ("experience.answer_choice", "newest", {}),
    ("experience.answer_choice", "agreement", {}),
    ("experience.difficulty", "reward_variance", {"experience": {"difficulty_range": [0.0, 0.6]}}),
    ("experience.difficulty_reward_range", [0.0, 2.0], VARIANCE),
    ("experience", WINDOW["experience"], {}),
    ("experience.difficulty_window", 3, WINDOW),
    ("experience.difficulty_range", [0.2, 0.6], {}),
    ("experience.difficulty_range_unit", "quantile", RANGE),
    ("experience.difficulty_per_category", True, CATEGORIES),
    ("experience.entropy_percentile", 40, {}),
    ("experience.stored_answer", "text", {}),
    ("experience.collect_from", "mixed_phase", ON_POLICY),
    ("experience.retire_from", "replay", {}),
    ("experience.retire_from", "never", {}),
    ("experience.unused_fresh", "discard", {}),
    ("experience.allow_duplicates", True, {}),
    ("experience.shaping", "none", {}),
    ("experience.shaping", "normalized_ratio", {}),
    ("experience.shaping", "sqrt", {}),
    ("experience.shaping", "clip", {}),
    ("experience.shaping", "log_prob", {}),
    ("experience.strategy", "replay_step", {}),
    ("experience.strategy", "both", {}),
    ("experience.replay_step.size", 0.25, BOTH),
    ("experience.replay_step.num_steps", 2, BOTH),
    ("experience.replay_step.start_pass_rate", 0.9, BOTH),
    ("experience.replay_step.bucket_weight", "uniform", SMALL_STEPS),
    ("experience.replay_step.bucket_sigma", 0.1, SMALL_STEPS),
    ("experience.replay_step.answer_choice", "lowest_mean_entropy", BOTH),
    ("experience.replay_step.weight", "one", BOTH),
    ("experience.replay_step.pass_rate_decay", 0.9, BOTH),
    ("experience.replay_step.shaping", "none", BOTH),
    ("experience.replay_step.shaping_beta", 0.2, BOTH),
    ("experience.replay_step.lr_multiplier", 0.5, BOTH),
    ("experience.replay_step.joint", True, {"experience": {"strategy": "replay_step"}}),
    ("experience.max_answers_per_question", 1, {}),
    ("experience.max_answers", 6, {}),
    ("experience.max_bytes", 500, {}),
    ("experience.eviction", "highest_entropy", CAPPED),
    ("experience.eviction", "least_recently_replayed", CAPPED),
    ("experience.shaping_beta", 0.2, {}),
    ("demonstrations", SHOWN["demonstrations"], {"experience": {"enabled": False}}),
    ("demonstrations.gamma", 0.3, SHOWN),
    ("repo", REPO["repo"], {**REPO, "repo": {}}),
    *[("repo.choice", choice, REPO) for choice in ("full_scope", "recent", "variance", "symmetric", "random")],
    ("repo.num_answers", 3, REPO),
    ("repo.max_kept", 12, REPO),
    ("repo.min_kept", 16, REPO),
    ("repo.weight", 0.5, REPO),
    ("data.epoch_order", "same", {"num_questions": 12}),
    ("policy.train_global_batch_size", 8, {}),
    ("policy.max_grad_norm", 1e-3, {}),
    ("policy.skip_grad_norm_above", 1e-3, {}),
    ("policy.generation.max_new_tokens", 64, {}),
    ("policy.generation.temperature", 0.9, {}),
]
# These change how long a run is and when it is looked at; prefill_path is in test_whole_variants.py, the others of
# experience are in test_stored_experience.py.
NOT_OF_A_STEP = {
    "experience.replay_step",  # by its keys
    "grpo.max_num_steps",
    "grpo.val_period",
    "grpo.val_at_start",
    "experience.prefill_path",
    "experience.store_dir",
    "experience.on_corruption",
    # test_demonstrations.py
    "demonstrations.enabled",
    "demonstrations.data",
    "demonstrations.ending",
    # test_reward_function.py
    "experience.solved_above",
    # test_off_policy_groups.py
    "repo.enabled",
    # test_policy_groups.py, and of a hang test_hang.py and test_hang_process.py
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.hang_timeout_s",
}


def lively(question_id, samples):
    """As many right as the number of the question modulo 5, each in another form."""
    good = ["=" * index + right(question_id) for index in range(int(question_id[1:]) % 5)]
    return [*good, *[wrong(question_id)] * samples][:samples]


def uneven(question, ids):
    """An engine's log-probs that give even questions ratios far below 1, and odd ones far above."""
    return np.full(len(ids), (-0.5, -6.0)[int(question.id[1:]) % 2], np.float32)


def trace(folder, comm, sections):
    """Groups and metrics (but those of time) of some steps, and the weights after them."""
    trainer = build_trainer(folder, lively, comm=comm, **{"num_questions": 26, **sections})
    trainer.parts.engine.recorder = uneven
    most = trainer.config.grpo.num_generations_per_prompt - 1
    for number in range(1, 13):
        name = f"q{number}"
        answers = [token_ids(trainer, right(name))[:-1], f"????{right(name)}", right(name, 1)]
        plant(trainer, name, answers[: 1 + number % 3], k=1 + number % most)
    results = [trainer.step() for _ in range(STEPS)]
    groups = [
        [(group.question.id, [(m.token_ids.tolist(), m.reward) for m in group.trajectories]) for group in result.groups]
        for result in results
    ]
    weights = {name: tensor.numpy().tobytes() for name, tensor in trainer.parts.policy.export_weights()}
    return groups, [untimed(result.metrics) for result in results], weights


def untimed(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "run/", "rollout/tokens_"))}


def with_key(sections, dotted, value):
    name, _, rest = dotted.partition(".")
    return {**sections, name: with_key(sections.get(name, {}), rest, value) if rest else value}


@pytest.fixture(scope="module")
def traces(tmp_path_factory, data_parallel):
    """The trace of a recipe's sections, computed once for each."""
    known = {}

    def trace_of(sections):
        if repr(sections) not in known:
            known[repr(sections)] = trace(tmp_path_factory.mktemp("trace"), data_parallel, sections)
        return known[repr(sections)]

    return trace_of


@pytest.mark.parametrize(("key", "value", "sections"), CASES, ids=lambda part: part if isinstance(part, str) else "")
def test_another_value_leaves_another_trace(traces, key, value, sections):
    assert traces(with_key(sections, key, value)) != traces(sections)


def test_the_same_recipe_leaves_the_same_trace(tmp_path, data_parallel, traces):
    assert trace(tmp_path, data_parallel, {}) == traces({})


def test_every_key_of_the_algorithm_is_here():
    sections = {
        "grpo": GRPOConfig,
        "loss_fn": LossConfig,
        "experience": ExperienceConfig,
        "demonstrations": DemonstrationsConfig,
        "experience.replay_step": ReplayStepConfig,
        "repo": RepoConfig,
        "cluster": ClusterConfig,
    }
    keys = {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    assert keys | set(VARIANTS) <= {key for key, _, _ in CASES} | NOT_OF_A_STEP


def test_every_value_of_every_switch_is_here():
    named = [(key, value) for key, value, _ in CASES]
    for key, values in VARIANTS.items():
        default = values["corrected"]
        assert all(value == default or (key, value) in named for value in values.values()), key
