"""What a recipe's numbers mean, as the commands print it at the start."""

from __future__ import annotations

from exgrpo_megatron.config import Config, PolicyConfig


def derived_table(config: Config, data_parallel_size: int = 1) -> list[tuple[str, str]]:
    """What the recipe's numbers mean, in questions, answers, sequences and tokens."""
    grpo, policy = config.grpo, config.policy
    answers = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    replayed, stored = config.max_replayed_per_step, config.max_replay_step_answers
    per_rank = -(-policy.train_global_batch_size // data_parallel_size)
    return [
        ("questions a step", f"{grpo.num_prompts_per_step}, of which at most {replayed} replayed"),
        ("answers a question (K)", f"{grpo.num_generations_per_prompt}; a replayed question samples one less"),
        ("sequences trained a step", f"{answers}"),
        (
            "rollouts a step",
            f"{answers}, one less for each demonstration"
            if config.demonstrations.enabled
            else f"{answers} without replay, at least {answers - replayed} with it",
        ),
        ("sequences an optimiser step", f"{policy.train_global_batch_size}"),
        ("optimiser steps a step", f"{config.updates_per_step}"),
        *([("stored answers trained on beside them", _replay_steps_text(config, stored))] if stored else []),
        ("optimiser steps in all", f"{config.total_updates}"),
        ("micro-batches an optimiser step", _micro_batches_text(policy, per_rank, data_parallel_size)),
        ("tokens in one sequence, at most", f"{policy.max_total_sequence_length}"),
        ("computed with", _layers_text(policy)),
        ("output layer and loss", _loss_text(policy)),
        ("response tokens a step, at most", f"{answers * policy.generation.max_new_tokens:,}"),
        ("answers in the whole run", f"{answers * grpo.max_num_steps:,}, replayed ones included"),
    ]


def _replay_steps_text(config: Config, answers: int) -> str:
    steps = config.replay_steps_per_step
    where = f"in {steps} replay step{'s' if steps > 1 else ''}" if steps else "joining the update on new ones"
    return f"at most {answers} {where}"


def _micro_batches_text(policy: PolicyConfig, sequences: int, data_parallel_size: int) -> str:
    if policy.token_budget is not None:
        kind = "packed" if policy.sequence_packing.enabled else "padded"
        return f"as many as the lengths need, each of at most {policy.mb_tokens(train=True)} positions, {kind}"
    size = policy.mb_sequences(train=True)
    return f"{-(-sequences // size)} on each of {data_parallel_size} data-parallel rank(s), of at most {size} sequences"


def _layers_text(policy: PolicyConfig) -> str:
    layout, fp8 = policy.megatron_cfg, policy.megatron_cfg.fp8_cfg
    layers = {
        "auto": "Transformer Engine's layers where a GPU has it, else Megatron's own",
        "transformer_engine": "Transformer Engine's layers; refused where they cannot be used",
        "local": "Megatron's own layers",
    }["local" if policy.precision == "float32" else layout.transformer_impl]
    if not fp8.enabled:
        return f"{layers}; {policy.precision}"
    multiple = layout.row_multiple
    return f"{layers}; FP8 ({fp8.fp8}, {fp8.fp8_recipe}), rows padded to multiples of {multiple}"


def _loss_text(policy: PolicyConfig) -> str:
    form = "linear" if policy.loss_kernel == "auto" else policy.loss_kernel
    where = "" if form == "reference" else ", in Triton where a GPU has it, else"
    return f"{form} form{where} in torch"
