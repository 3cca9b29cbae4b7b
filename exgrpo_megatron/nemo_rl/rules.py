"""Rules of the keys of NeMo-RL whose meaning depends on others of the file, or is ours in another unit."""

from __future__ import annotations

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.nemo_rl.data_rules import SOURCES
from exgrpo_megatron.nemo_rl.verdicts import NEUTRAL, Given, Leaf, Leave, Refuse, Take, Verdict, shown

_PACKED = "policy.sequence_packing.enabled"
_DYNAMIC = "policy.dynamic_batching.enabled"


def epochs(leaf: Leaf) -> Verdict:
    """Theirs ends a run after so many passes over the data, if max_num_steps does not."""
    if leaf.value is None:
        return Leave(NEUTRAL)
    return Refuse(
        "a run here ends after grpo.max_num_steps alone",
        f"{leaf.key}=null grpo.max_num_steps=STEPS; theirs are at most {leaf.value} x (questions // prompts of a step)",
    )


def estimator(leaf: Leaf) -> Verdict:
    """`grpo.X` and `grpo.adv_estimator.X`, of which the second counts where it is there."""
    name = leaf.key.rpartition(".")[2]
    of_estimator = f"grpo.adv_estimator.{name}"
    if leaf.key != of_estimator and of_estimator in leaf.given:
        return Leave("the same key of grpo.adv_estimator is what counts")
    return Take({f"grpo.{name}": leaf.value}, "" if leaf.key == f"grpo.{name}" else f"is grpo.{name}")


def reward_shaping(leaf: Leaf) -> Verdict:
    if leaf.given.get("grpo.reward_shaping.enabled") is not True:
        return Leave("grpo.reward_shaping.enabled = false")
    return Take({leaf.key: leaf.value})


def val_period(leaf: Leaf) -> Verdict:
    if isinstance(leaf.value, int) and leaf.value < 0:
        return Take({leaf.key: 0}, "0: only after the last step")
    return Take({leaf.key: leaf.value})


def max_val_samples(leaf: Leaf) -> Verdict:
    sources = [f"data.validation.{name}" for name in (*SOURCES, "data_path")]
    if any(leaf.given.get(key) is not None for key in (*sources, "data.val_data_path")):
        return Take({"data.validation.max_questions": leaf.value}, "is data.validation.max_questions")
    return Leave("no data.validation is given")


def token_level_loss(leaf: Leaf) -> Verdict:
    normalizer = "global_tokens" if leaf.value else "per_answer_length"
    return Take({"loss_fn.normalizer": normalizer}, "is loss_fn.normalizer")


def force_on_policy_ratio(leaf: Leaf) -> Verdict:
    if leaf.value is not True:
        return Leave(NEUTRAL)
    if updates_per_step(leaf.given) == 1:
        return Leave("with one optimiser step a training step the ratio is 1 by itself")
    return Refuse(
        f"there are {updates_per_step(leaf.given)} optimiser steps a training step (theirs refuses that too)",
        f"{leaf.key}=false",
    )


def correction_limits(leaf: Leaf) -> Verdict:
    """Null is their default and ours, but for the type, which ours has always."""
    return Leave(NEUTRAL) if leaf.value is None else Take({leaf.key: leaf.value})


def per_update(leaf: Leaf) -> Verdict:
    """Theirs moves the schedule on once a training step, ours once an optimiser step."""
    if (
        leaf.key.endswith("lr_decay_iters")
        and leaf.given.get("policy.megatron_cfg.scheduler.lr_decay_style") == "constant"
    ):
        return Leave("lr_decay_style = constant: nothing decays")
    if leaf.value is None:
        return Take({leaf.key: None})
    updates = updates_per_step(leaf.given)
    note = "" if updates == 1 else f"training steps x {updates} optimiser steps each, over which ours moves evenly"
    return Take({leaf.key: _whole(leaf.given, leaf.key) * updates}, note)


def warmup_init(leaf: Leaf) -> Verdict:
    if not leaf.given.get("policy.megatron_cfg.scheduler.lr_warmup_iters"):
        return Leave("lr_warmup_iters = 0: there is no warm-up")
    return Take({leaf.key: leaf.value})


def weight_decay_schedule(leaf: Leaf) -> Verdict:
    """Only a constant weight decay."""
    decay = leaf.given.get("policy.megatron_cfg.optimizer.weight_decay", leaf.value)
    if leaf.value == decay:
        return Leave("the weight decay is that of optimizer.weight_decay throughout")
    return Refuse(f"the weight decay does not change in a run; optimizer.weight_decay = {decay}", f"{leaf.key}={decay}")


def clip_grad(leaf: Leaf) -> Verdict:
    norm = leaf.given.get("policy.max_grad_norm", leaf.value)
    if leaf.value == norm:
        return Take({"policy.max_grad_norm": leaf.value}, "is policy.max_grad_norm")
    return Refuse(f"it differs from policy.max_grad_norm = {norm}", f"{leaf.key}={norm}")


def bf16(leaf: Leaf) -> Verdict:
    precision = leaf.given.get("policy.precision")
    if precision == "float32" or leaf.value == (precision == "bfloat16"):
        return Leave("policy.precision decides")
    return Refuse(f"policy.precision = {precision} says otherwise", f"{leaf.key}={shown(precision == 'bfloat16')}")


def fusion(leaf: Leaf) -> Verdict:
    if leaf.value is True:
        return Take({leaf.key: None}, "null: where Transformer Engine's layers are used")
    return Take({leaf.key: leaf.value})


def micro_batch(leaf: Leaf) -> Verdict:
    if leaf.given.get(_PACKED) is True or leaf.given.get(_DYNAMIC) is True:
        return Leave("micro-batches are filled up to a number of tokens")
    return Take({leaf.key: leaf.value})


def packing(leaf: Leaf) -> Verdict:
    """Keys of sequence_packing or dynamic_batching, of which those of one that is off say nothing."""
    section = leaf.key.rpartition(".")[0]
    if leaf.given.get(f"{section}.enabled") is not True:
        return Leave(f"{section}.enabled = false")
    return Take({leaf.key: leaf.value})


def packing_algorithm(leaf: Leaf) -> Verdict:
    if leaf.given.get(_PACKED) is not True:
        return Leave("policy.sequence_packing.enabled = false")
    if leaf.value in ("first_fit_decreasing", "best_fit_decreasing"):
        return Take({leaf.key: leaf.value})
    return Take({leaf.key: "first_fit_decreasing"}, "which sequences share a row, not what is computed")


def tokenizer_name(leaf: Leaf) -> Verdict:
    if leaf.value == leaf.given.get("policy.model_name"):
        return Take({leaf.key: None}, "null: that of policy.model_name")
    return Take({leaf.key: leaf.value})


def input_length(leaf: Leaf) -> Verdict:
    """Theirs lets prompt and response share the total; ours wants room for the longest of both."""
    prompt, response = _whole(leaf.given, leaf.key), _whole(leaf.given, "policy.generation.max_new_tokens")
    total = _whole(leaf.given, "policy.max_total_sequence_length")
    if prompt + response <= total:
        return Take({leaf.key: leaf.value})
    return Refuse(
        f"{prompt} tokens of prompt and {response} of response (policy.generation.max_new_tokens) do not fit into "
        f"policy.max_total_sequence_length = {total}; theirs cuts a response where its own prompt leaves no room",
        f"{leaf.key}=N policy.generation.max_new_tokens=M with N + M at most {total}",
    )


def backend(leaf: Leaf) -> Verdict:
    if leaf.value in ("vllm", "embedded"):
        return Take({leaf.key: leaf.value})
    return Refuse("rollouts are sampled by vLLM or the embedded engine", f"{leaf.key}=vllm")


def engine_precision(leaf: Leaf) -> Verdict:
    if leaf.value in (None, "float32", "bfloat16"):
        return Take({leaf.key: leaf.value})
    return Refuse("the engine's weights are those of the actor, in float32 or bfloat16", f"{leaf.key}=bfloat16")


def num_workers(leaf: Leaf) -> Verdict:
    """Theirs counts the workers of the whole run, ours those of one process."""
    processes = (leaf.given.get("cluster.num_nodes") or 1) * (leaf.given.get("cluster.gpus_per_node") or 1)
    return Take(
        {leaf.key: max(1, -(-_whole(leaf.given, leaf.key) // processes))},
        f"of the run, shared among {processes} processes",
    )


def metric_name(leaf: Leaf) -> Verdict:
    if leaf.value in (None, "val:accuracy", "val_reward"):
        return Take({leaf.key: "validation/pass_rate_t1"}, "the same number under its name here")
    if str(leaf.value).startswith("validation/"):
        return Take({leaf.key: leaf.value})
    return Refuse("the best checkpoint is that of a metric of the evaluations", f"{leaf.key}=validation/pass_rate_t1")


def keep_top_k(leaf: Leaf) -> Verdict:
    """Theirs are the newest where no metric says which are the best."""
    if leaf.value is None or leaf.given.get("checkpointing.metric_name") is not None:
        return Take({leaf.key: leaf.value})
    return Take({"checkpointing.keep_last_n": _newest_kept(leaf)}, "metric_name = null: the newest")


def keep_latest(leaf: Leaf) -> Verdict:
    if leaf.value is None:
        return Leave(NEUTRAL)
    return Take({"checkpointing.keep_last_n": _newest_kept(leaf)}, "is checkpointing.keep_last_n")


def _newest_kept(leaf: Leaf) -> int:
    by_metric = leaf.given.get("checkpointing.metric_name") is not None
    names = ("ft_keep_latest_k",) if by_metric else ("ft_keep_latest_k", "keep_top_k")
    keys = [f"checkpointing.{name}" for name in names]
    return max(_whole(leaf.given, key) for key in keys if leaf.given.get(key) is not None)


def tool(leaf: Leaf) -> Verdict:
    """Keys of a logger, of which those of one that is off say nothing; null is always what is not given."""
    section = leaf.key.rpartition(".")[0]
    if leaf.given.get(f"{section}_enabled") is not True:
        return Leave(f"{section}_enabled = false")
    return Leave(NEUTRAL) if leaf.value is None else Take({leaf.key: leaf.value})


def updates_per_step(given: Given) -> int:
    """Optimiser steps of a training step."""
    answers = _whole(given, "grpo.num_prompts_per_step") * _whole(given, "grpo.num_generations_per_prompt")
    return max(1, answers // max(1, _whole(given, "policy.train_global_batch_size")))


def _whole(given: Given, key: str) -> int:
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ConfigError(f"{key} = {value!r}: must be a whole number")
    return int(value)
