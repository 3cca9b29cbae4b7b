"""A recipe on so many processes: who shares what, and what each GPU will hold."""

from __future__ import annotations

from dataclasses import dataclass

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.config import Config, PolicyConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.layout import check_engine_layout, check_layout, check_positions
from exgrpo_megatron.plan.activations import TokenLayout
from exgrpo_megatron.plan.experience_memory import ExperienceBytes, experience_bytes
from exgrpo_megatron.plan.parameters import Stage, model_elements, stages
from exgrpo_megatron.plan.ranks import Ranks, lay_out
from exgrpo_megatron.plan.rollout_memory import RolloutBytes, embedded_rollout, vllm_rollout
from exgrpo_megatron.plan.training_memory import HeldBytes, StepBytes, held_bytes, step_bytes

GIB = 1 << 30
RESERVED_SHARE = 0.08
"""Of a GPU's memory, left to the CUDA context, communication buffers, workspaces and fragmentation. An assumption."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: all its ranks hold as much, to within the padding of shared optimizer state."""

    stage: Stage
    ranks: range
    held: HeldBytes
    step: StepBytes


@dataclass(frozen=True)
class Plan:
    """What a recipe needs on one kind of GPU."""

    architecture: Architecture
    parameters: int
    """Of the whole model, unpadded."""
    ranks: Ranks
    stages: tuple[StagePlan, ...]
    rollout: RolloutBytes
    recomputed: bool
    """Whether activations are recomputed."""
    micro_batches: int
    """Of an optimiser step on one data-parallel rank, at most."""
    train: TokenLayout
    score: TokenLayout
    gpu_bytes: int
    experience: ExperienceBytes

    @property
    def usable_bytes(self) -> int:
        return int(self.gpu_bytes * (1 - RESERVED_SHARE))

    def peaks(self, stage: StagePlan) -> dict[str, int]:
        """Bytes on a GPU of the stage in each phase of a step."""
        engine = self.rollout
        training = stage.held.total + (0 if engine.sleeps else engine.weights)
        activations = stage.step.recomputed if self.recomputed else stage.step.kept
        return {
            "update": training + activations + stage.step.loss,
            "scoring": training + stage.step.scoring,
            "rollout": stage.held.total + engine.weights + engine.kv_cache,
            "weight push": stage.held.total + engine.weights + engine.loading,
        }


def make_plan(config: Config, architecture: Architecture, world_size: int, gpu_bytes: int) -> Plan:
    """The plan of a recipe; raises ConfigError where the processes or the model cannot be divided."""
    policy, layout = config.policy, config.policy.megatron_cfg
    ranks = lay_out(world_size, layout)
    check_layout(architecture, layout)
    check_positions(architecture, policy.max_total_sequence_length)
    number_bytes = 2 if policy.precision == "bfloat16" else 4
    sequences = -(-policy.train_global_batch_size // ranks.data)
    train = _tokens(policy, ranks, number_bytes, train=True, sequences=sequences)
    # Of the stored answers to be scored a rank may get more than of an optimiser step.
    score = _tokens(policy, ranks, number_bytes, train=False, sequences=None)
    # With a token budget a micro-batch holds one sequence at least.
    micro_batches = sequences if policy.token_budget else -(-sequences // policy.mb_sequences(train=True))
    return Plan(
        architecture=architecture,
        parameters=model_elements(architecture),
        ranks=ranks,
        stages=tuple(
            StagePlan(
                stage,
                ranks.of_stage(stage.index),
                held_bytes(stage, ranks, layout, number_bytes),
                step_bytes(architecture, stage, ranks, train, score, micro_batches),
            )
            for stage in stages(architecture, layout, layout.chunks)
        ),
        rollout=_rollout(config, architecture, ranks, gpu_bytes),
        recomputed=layout.activation_checkpointing,
        micro_batches=micro_batches,
        train=train,
        score=score,
        gpu_bytes=gpu_bytes,
        experience=_experience(config, ranks),
    )


def check_fits(plan: Plan, config: Config) -> None:
    """Raise ConfigError where a phase of a step needs more than a GPU has, with its parts and what to change."""
    stage, phase, needed = max(
        ((stage, phase, bytes_) for stage in plan.stages for phase, bytes_ in plan.peaks(stage).items()),
        key=lambda item: item[2],
    )
    if needed <= plan.usable_bytes:
        return
    held, engine = stage.held, plan.rollout
    parts = {
        "weights": held.weights,
        "FP8 weights": held.fp8_weights,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        **_parts_of(phase, stage, plan),
        "rollout weights": 0 if engine.sleeps and phase in ("update", "scoring") else engine.weights,
    }
    listed = " + ".join(f"{name} {bytes_ / GIB:.1f}" for name, bytes_ in parts.items() if bytes_)
    raise ConfigError(
        f"does not fit: {phase} needs {needed / GIB:.1f} GiB on each of ranks {stage.ranks[0]}-{stage.ranks[-1]} "
        f"({listed}), but --gpu-memory-gib {plan.gpu_bytes / GIB:g} leaves {plan.usable_bytes / GIB:.1f} after "
        f"{RESERVED_SHARE:.0%} for context, communication buffers and fragmentation: {_advice(phase, plan, config)}"
    )


def _parts_of(phase: str, stage: StagePlan, plan: Plan) -> dict[str, int]:
    step = stage.step
    activations = step.recomputed if plan.recomputed else step.kept
    return {
        "update": {"activations": activations, "loss": step.loss},
        "scoring": {"scoring": step.scoring},
        "rollout": {"KV cache": plan.rollout.kv_cache},
        "weight push": {"second rollout weights": plan.rollout.loading},
    }[phase]


def _advice(phase: str, plan: Plan, config: Config) -> str:
    layout = config.policy.megatron_cfg
    fewer = [
        "raise policy.megatron_cfg.tensor_model_parallel_size "
        f"({layout.tensor_model_parallel_size}) or pipeline_model_parallel_size ({layout.pipeline_model_parallel_size})"
    ]
    if plan.ranks.data * plan.ranks.context > 1 and not layout.optimizer.use_distributed_optimizer:
        fewer.append("set policy.megatron_cfg.optimizer.use_distributed_optimizer = true")
    if config.policy.precision == "float32":
        fewer.append("set policy.precision = bfloat16")
    if phase == "update" and not plan.recomputed:
        fewer.append("set policy.megatron_cfg.activation_checkpointing = true")
    if phase in ("update", "scoring"):
        fewer.append(f"lower {_micro_batch_key(config.policy, train=phase == 'update')}")
    generation = config.policy.generation
    if generation.backend == "embedded":
        if phase == "rollout":
            fewer.append(f"lower policy.generation.max_batch_size ({generation.max_batch_size})")
        fewer.append("set policy.generation.backend = vllm")
    elif phase in ("rollout", "weight push"):
        given = generation.vllm_cfg.gpu_memory_utilization
        fewer.append(f"lower policy.generation.vllm_cfg.gpu_memory_utilization ({given})")
    return ", ".join(fewer)


def _micro_batch_key(policy: PolicyConfig, *, train: bool) -> str:
    if policy.token_budget is None:
        name = "train_micro_batch_size" if train else "logprob_batch_size"
        return f"policy.{name} ({policy.mb_sequences(train=train)})"
    name = "train_mb_tokens" if train else "logprob_mb_tokens"
    return f"policy.{policy.token_budget_name}.{name} ({policy.mb_tokens(train=train)})"


def _tokens(
    policy: PolicyConfig, ranks: Ranks, number_bytes: int, *, train: bool, sequences: int | None
) -> TokenLayout:
    """A micro-batch of the greatest length, made of so many `sequences` of a data-parallel rank at most."""
    positions = policy.mb_tokens(train=train)
    if sequences is not None:
        positions = min(positions, sequences * policy.longest_row)
    responses = positions
    if policy.token_budget is None:
        responses = positions // policy.longest_row * policy.generation.max_new_tokens
    return TokenLayout(
        positions=-(-positions // ranks.context),
        response_tokens=-(-responses // ranks.context),
        tensor_parallel=ranks.tensor,
        sequence_parallel=policy.megatron_cfg.sequence_parallel,
        number_bytes=number_bytes,
        loss_kernel=policy.loss_kernel,
        chunk_size=policy.logprob_chunk_size,
    )


def _rollout(config: Config, architecture: Architecture, ranks: Ranks, gpu_bytes: int) -> RolloutBytes:
    generation = config.policy.generation
    if generation.backend == "vllm":
        return _vllm(config, architecture, ranks, gpu_bytes)
    rows = min(generation.max_batch_size, max(_sampled_rows(config, ranks), _evaluated_rows(config, ranks)))
    columns = config.data.max_input_seq_length + generation.max_new_tokens
    return embedded_rollout(architecture, rows=rows, columns=columns)


def _sampled_rows(config: Config, ranks: Ranks) -> int:
    """Answers that a process samples in a step, at most: every process has its part of the questions."""
    questions = -(-config.grpo.num_prompts_per_step // ranks.world_size)
    return questions * config.grpo.num_generations_per_prompt


def _evaluated_rows(config: Config, ranks: Ranks) -> int:
    """The same in an evaluation; of a file nobody knows yet how many questions it has."""
    held_out = config.data.validation
    if config.eval.sets_in_training:
        return config.policy.generation.max_batch_size
    if held_out is None:
        return 0
    if held_out.path is not None:
        return config.policy.generation.max_batch_size
    return -(-held_out.generator_size // ranks.world_size) * config.eval.num_tests_per_prompt


def _vllm(config: Config, architecture: Architecture, ranks: Ranks, gpu_bytes: int) -> RolloutBytes:
    cfg, layout = config.policy.generation.vllm_cfg, config.policy.megatron_cfg
    check_engine_layout(architecture, layout, cfg.tensor_parallel_size, ranks.world_size, ranks.data)
    engine = vllm_rollout(
        architecture,
        budget=int(cfg.gpu_memory_utilization * gpu_bytes),
        kv_cache=cfg.kv_cache_memory_bytes,
        tensor_parallel=cfg.tensor_parallel_size,
        number_bytes=2 if config.engine_precision == "bfloat16" else 4,
    )
    if engine.kv_tokens < config.max_model_len:
        raise ConfigError(
            f"does not fit: vLLM's weights take {engine.weights / GIB:.1f} GiB of a GPU, and what is left for keys and "
            f"values, {engine.kv_cache / GIB:.1f} GiB, has room for {engine.kv_tokens:,} positions, fewer than one "
            f"sequence of {config.max_model_len:,} (policy.generation.vllm_cfg.max_model_len): raise "
            f"policy.generation.vllm_cfg.gpu_memory_utilization ({cfg.gpu_memory_utilization}) or tensor_parallel_size "
            f"({cfg.tensor_parallel_size})"
        )
    return engine


def _experience(config: Config, ranks: Ranks) -> ExperienceBytes:
    grpo = config.grpo
    questions = grpo.num_prompts_per_step * grpo.max_num_steps if config.experience.enabled else 0
    return experience_bytes(
        questions=questions,
        answers=questions * grpo.num_generations_per_prompt,
        tokens=config.policy.generation.max_new_tokens,
        owners=ranks.data,
    )
