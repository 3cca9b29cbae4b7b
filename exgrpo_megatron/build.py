"""Composition root: from a recipe to the parts of a run. The only place that chooses implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config, OptimizerConfig, SchedulerConfig
from exgrpo_megatron.data.order import QuestionOrder
from exgrpo_megatron.data.sft import SFTBatches
from exgrpo_megatron.debug.watch import BadStepWatch
from exgrpo_megatron.evaluator import Evaluator
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.recent_answers import RecentAnswers
from exgrpo_megatron.parts import Parts, Verifier
from exgrpo_megatron.rewards.exact_text import ExactTextVerifier
from exgrpo_megatron.rewards.function import FunctionVerifier
from exgrpo_megatron.rewards.verifier import MathVerifier
from exgrpo_megatron.rollout.protocol import RolloutEngine
from exgrpo_megatron.rollout.vllm_checks import kv_cache_bytes
from exgrpo_megatron.rollout.weight_buckets import check_manifest
from exgrpo_megatron.run_inputs import Inputs
from exgrpo_megatron.set_answers import SetEvaluator, SetsInTraining
from exgrpo_megatron.sft import SFTTrainer
from exgrpo_megatron.types import Question

if TYPE_CHECKING:
    from exgrpo_megatron.policy.actor import MegatronActor


def build_actor(
    config: Config,
    model_dir: Path,
    comm: Communicator,
    *,
    optimizer: OptimizerConfig,
    scheduler: SchedulerConfig,
    total_updates: int,
) -> MegatronActor:
    """The Megatron-Core actor with the weights of `model_dir`."""
    from exgrpo_megatron.policy.actor import MegatronActor  # noqa: PLC0415

    return MegatronActor(model_dir, config.policy, optimizer, scheduler, total_updates=total_updates, comm=comm)


def build_rl_actor(config: Config, model_dir: Path, comm: Communicator) -> MegatronActor:
    """The actor with the optimiser of the RL steps."""
    megatron = config.policy.megatron_cfg
    return build_actor(
        config,
        model_dir,
        comm,
        optimizer=megatron.optimizer,
        scheduler=megatron.scheduler,
        total_updates=config.total_updates,
    )


def build_engine(
    config: Config, inputs: Inputs, comm: Communicator, weights: Callable[[], Iterable[tuple[str, Tensor]]]
) -> RolloutEngine:
    """The rollout engine named by policy.generation.backend, without weights yet.

    `weights()` gives the weights once more that were loaded last: an engine that fails is replaced.
    """
    if config.policy.generation.backend == "vllm":
        return _build_vllm_engine(config, inputs, comm, weights)
    from exgrpo_megatron.rollout.torch_engine import TorchEngine  # noqa: PLC0415

    return TorchEngine(
        inputs.architecture,
        max_batch_size=config.policy.generation.max_batch_size,
        on_progress=comm.places.advance,
    )


def _build_vllm_engine(
    config: Config, inputs: Inputs, comm: Communicator, weights: Callable[[], Iterable[tuple[str, Tensor]]]
) -> RolloutEngine:
    from exgrpo_megatron.rollout.restarts import RestartingEngine  # noqa: PLC0415
    from exgrpo_megatron.rollout.vllm_engine import VLLMEngine  # noqa: PLC0415
    from exgrpo_megatron.rollout.vllm_process import VLLMSettings  # noqa: PLC0415

    cfg = config.policy.generation.vllm_cfg
    settings = VLLMSettings(
        model_dir=inputs.model_dir,
        cfg=cfg,
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[config.engine_precision],
        max_model_len=config.max_model_len,
        max_batch_size=config.policy.generation.max_batch_size,
        kv_cache_bytes=kv_cache_bytes(config),
    )
    return RestartingEngine(
        lambda: VLLMEngine(inputs.architecture, settings, comm.places.advance),
        weights,
        comm,
        max_restarts=cfg.max_restarts,
    )


def build_verifier(config: Config, comm: Communicator) -> Verifier:
    """Math-Verify or the recipe's own function in worker processes, or the comparison of texts."""
    if config.env.reward_function is not None:
        return FunctionVerifier(config.env, comm.places.advance)
    if config.env.math.exact_text:
        return ExactTextVerifier(config.env.math)
    return MathVerifier(config.env.math, comm.places.advance)


def build_parts(
    config: Config, inputs: Inputs, policy: MegatronActor, comm: Communicator, experience_folder: Path | None = None
) -> Parts:
    """All parts of an RL run around an actor; stored answers lie in `experience_folder`, or in memory."""
    assert config.data.epoch_order is not None
    check_manifest(policy.weight_manifest(), manifest(inputs.architecture))
    return Parts(
        config=config,
        comm=comm,
        policy=policy,
        engine=build_engine(config, inputs, comm, policy.export_weights),
        verifier=build_verifier(config, comm),
        tokenizer=inputs.tokenizer,
        order=QuestionOrder(inputs.train.questions, config.grpo.seed, config.data.epoch_order),
        experience=build_experience(config, inputs.train.questions, comm, experience_folder),
        train=inputs.train,
        validation=inputs.held_out,
        sampling=inputs.sampling,
        model_dir=inputs.model_dir,
        demonstrations=inputs.demonstrations,
        recent=RecentAnswers(config.repo, config.grpo.seed, comm) if config.repo.enabled else None,
        watch=BadStepWatch(config) if config.debug.enabled else None,
    )


def build_experience(
    config: Config, questions: Sequence[Question], comm: Communicator, folder: Path | None
) -> ExperienceBuffer:
    """An empty buffer for the training questions; stored answers lie in `folder`, or in memory."""
    return ExperienceBuffer(
        config.experience,
        config.grpo.num_generations_per_prompt,
        comm,
        folder,
        pass_rate_decay=config.experience.pass_rate_decay,
        categories={question.id: question.category for question in questions},
    )


def build_sets_in_training(
    config: Config, inputs: Inputs, engine: RolloutEngine, verifier: Verifier, comm: Communicator
) -> SetsInTraining | None:
    """What evaluates `inputs.sets`; None where there are none."""
    if not inputs.sets:
        return None
    evaluator = SetEvaluator(config.eval, engine, inputs.tokenizer, inputs.sampling, comm)
    return SetsInTraining(evaluator, inputs.sets, verifier)


def build_evaluator(
    config: Config,
    inputs: Inputs,
    engine: RolloutEngine,
    verifier: Verifier,
    comm: Communicator,
    questions: Sequence[Question] | None = None,
) -> Evaluator | None:
    """Evaluator of the validation questions, or of `questions`; None where there are none."""
    chosen = inputs.held_out if questions is None else questions
    if not chosen:
        return None
    return Evaluator(
        config.eval,
        chosen,
        engine,
        verifier,
        inputs.tokenizer,
        inputs.sampling,
        comm,
        report_rewards=config.env.reward_function is not None,
    )


def build_sft(config: Config, inputs: Inputs, comm: Communicator) -> tuple[SFTTrainer, MegatronActor]:
    """Supervised trainer and its actor, from the base model."""
    batches = SFTBatches(config, inputs.tokenizer)
    actor = build_actor(
        config,
        inputs.model_dir,
        comm,
        optimizer=config.sft.optimizer,
        scheduler=config.sft.scheduler,
        total_updates=config.sft.max_num_steps,
    )
    return SFTTrainer(actor, batches, comm, config.sft.max_num_steps), actor
