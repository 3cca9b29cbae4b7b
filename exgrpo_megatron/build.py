"""Composition root: from a recipe to the parts of a run. The only place that chooses implementations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError
from exgrpo_conversion.hf_folder import HFReader, ModelFolderError, read_config
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron import __version__
from exgrpo_megatron.checkpointing import read_state
from exgrpo_megatron.comm import Communicator, gather_everyone, together
from exgrpo_megatron.config import Config, DataSourceConfig, OptimizerConfig, SchedulerConfig
from exgrpo_megatron.data.demonstrations import Demonstrations
from exgrpo_megatron.data.embedded_model import is_embedded, materialize
from exgrpo_megatron.data.eval_sets import load_eval_set
from exgrpo_megatron.data.order import QuestionOrder
from exgrpo_megatron.data.questions import NO_QUESTIONS, QuestionSet, load_questions
from exgrpo_megatron.data.sft import SFTBatches
from exgrpo_megatron.data.solutions import read_solutions
from exgrpo_megatron.data.tokenizer import PromptTokenizer, load_tokenizer
from exgrpo_megatron.debug.watch import BadStepWatch
from exgrpo_megatron.errors import CheckpointError, ConfigError, DataError
from exgrpo_megatron.evaluator import Evaluator
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.reading import check_answers_files
from exgrpo_megatron.experience.recent_answers import RecentAnswers
from exgrpo_megatron.files import sha256_of
from exgrpo_megatron.layout import check_layout, check_positions
from exgrpo_megatron.parts import Parts, Verifier
from exgrpo_megatron.rewards.exact_text import ExactTextVerifier
from exgrpo_megatron.rewards.function import FunctionVerifier, check_reward_function
from exgrpo_megatron.rewards.verifier import MathVerifier
from exgrpo_megatron.rollout.protocol import RolloutEngine, SamplingParams
from exgrpo_megatron.rollout.vllm_checks import check_vllm, kv_cache_bytes
from exgrpo_megatron.rollout.weight_buckets import check_manifest
from exgrpo_megatron.set_answers import SetEvaluator, SetsInTraining
from exgrpo_megatron.sft import SFTTrainer
from exgrpo_megatron.types import Question

if TYPE_CHECKING:
    from exgrpo_megatron.policy.actor import MegatronActor


@dataclass(frozen=True)
class Inputs:
    """Everything a run reads, checked before any weight is loaded."""

    model_dir: Path
    architecture: Architecture
    tokenizer: PromptTokenizer
    train: QuestionSet
    validation: QuestionSet | None
    sampling: SamplingParams
    demonstrations: Demonstrations | None
    sets: Mapping[str, QuestionSet] = field(default_factory=dict)
    """Those of eval.sets that are evaluated in training, by name."""

    def data_record(self) -> dict[str, Any]:
        """What is said of the questions in checkpoints and model cards."""
        in_training = {f"eval.sets.{name}": questions for name, questions in self.sets.items()}
        sets = {"train": self.train, "validation": self.validation, **in_training}
        return {name: questions.record() for name, questions in sets.items() if questions is not None}

    @property
    def held_out(self) -> tuple[Question, ...]:
        return self.validation.questions if self.validation else ()


def load_inputs(config: Config, comm: Communicator, *, with_questions: bool = True) -> Inputs:
    """Model configuration, tokenizer and, unless they are not wanted, questions; raises ConfigError, DataError for what
    the user must change."""
    check_reward_function(config.env)
    model_dir = base_model(config, comm)
    architecture = read_architecture(model_dir)
    check_positions(architecture, config.policy.max_total_sequence_length)
    check_layout(architecture, config.policy.megatron_cfg)
    if config.policy.generation.backend == "vllm":
        check_vllm(config, architecture, world_size=comm.world_size, data_parallel_size=comm.size)
    tokenizer_dir = Path(config.policy.tokenizer.name or model_dir)
    tokenizer = load_tokenizer(tokenizer_dir)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ConfigError(
            f"policy.tokenizer.name = {str(tokenizer_dir)!r} has token ids up to {tokenizer.vocab_size - 1}, but "
            f"the model in {model_dir} has {architecture.vocab_size} tokens"
        )
    stop = config.policy.generation.stop_token_ids or tokenizer.stop_token_ids(model_dir)
    sampling = SamplingParams(
        max_new_tokens=config.policy.generation.max_new_tokens,
        temperature=config.policy.generation.temperature,
        stop_token_ids=tuple(stop),
    )
    _check_stop_tokens(sampling, architecture)
    if not with_questions:
        return Inputs(model_dir, architecture, tokenizer, NO_QUESTIONS, None, sampling, None)
    train, validation = _load_question_sets(config, tokenizer, comm)
    _check_enough_questions(config, train)
    shown = Demonstrations(config, train.questions, tokenizer) if config.demonstrations.enabled else None
    with together(comm):
        sets = {
            name: load_eval_set(name, chosen, config.data, tokenizer, config.eval.seed)
            for name, chosen in config.eval.sets_in_training.items()
        }
    return Inputs(model_dir, architecture, tokenizer, train, validation, sampling, shown, sets)


def _load_question_sets(
    config: Config, tokenizer: PromptTokenizer, comm: Communicator
) -> tuple[QuestionSet, QuestionSet | None]:
    """Training and held-out questions; DataError where processes have different ones."""
    data = config.data
    with together(comm):
        train = load_questions(data.train, data, tokenizer, held_out=False)
        held_out = load_questions(data.validation, data, tokenizer, held_out=True) if data.validation else None
    for key, questions in (("data.train", train), ("data.validation", held_out)):
        found = gather_everyone(comm, questions.fingerprint if questions else "")
        if questions and len(set(found)) > 1:
            other = next(rank for rank, fingerprint in enumerate(found) if fingerprint != found[0])
            raise DataError(
                f"{key}: process {other} of {len(found)} has other questions from {questions.source} than process 0 "
                f"(fingerprints {found[other]} and {found[0]}): all must have the same file, or a function that gives "
                "the same rows in the same order wherever it is called"
            )
    return train, held_out


def check_prefill(config: Config, working_folder: Path) -> None:
    """Raise ConfigError where experience.prefill_path is set and is no experience file for groups of this size, or is
    the run's own `working_folder` of stored answers, which is emptied when the run begins."""
    path = config.experience.prefill_path
    if path is None or not config.experience.enabled:
        return
    if not Path(path).exists():
        raise ConfigError(
            f"experience.prefill_path = {path!r}: no such file or folder; `exgrpo prefill RECIPE` makes it from worked "
            f"solutions, null begins without"
        )
    if Path(path).resolve() == working_folder.resolve():
        raise ConfigError(
            f"experience.prefill_path = {path!r} is where this run keeps its stored answers, and would be emptied "
            f"first: move it away, and name the place where it is then"
        )
    try:
        check_answers_files(Path(path), config.grpo.num_generations_per_prompt)
    except CheckpointError as error:
        raise ConfigError(f"experience.prefill_path: {error}") from None


def check_init_from(config: Config) -> None:
    """Raise ConfigError where policy.init_from is no whole checkpoint of a run."""
    path = config.policy.init_from
    if path is None:
        return
    if (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"policy.init_from = {path!r} is a Hugging Face folder: set policy.model_name to it, and init_from to null"
        )
    try:
        read_state(Path(path))
    except CheckpointError as error:
        raise ConfigError(f"policy.init_from: {error}") from None


def base_model(config: Config, comm: Communicator) -> Path:
    """The folder of policy.model_name; an embedded model is written into the run's folder first."""
    name = config.policy.model_name
    if not is_embedded(name):
        if not Path(name).is_dir():
            raise ConfigError(
                f"policy.model_name = {name!r}: no such model folder (and not an embedded: model). Nothing is "
                f"downloaded; a model of a hub is put there by hf download {name} --local-dir {name}"
            )
        return Path(name)
    folder = Path(config.logger.log_dir) / "model"
    if comm.is_main:
        materialize(name, folder, config.sft.seed)
    comm.barrier()
    return folder


def read_architecture(model_dir: Path, key: str = "policy.model_name") -> Architecture:
    """The architecture of a model folder whose weight files are complete; raises ConfigError that quotes `key`."""
    try:
        architecture = Architecture.from_hf_config(read_config(model_dir))
        HFReader(model_dir).check(manifest(architecture))
    except (UnsupportedModelError, ModelFolderError) as error:
        raise ConfigError(f"{key} = {str(model_dir)!r}: {error}") from None
    return architecture


def check_architecture(folder: Path, inputs: Inputs) -> None:
    """Raise CheckpointError where the model in `folder` is of another shape than the recipe's."""
    found, wanted = asdict(read_architecture(folder, "--checkpoint")), asdict(inputs.architecture)
    differences = [
        f"{name}: {found[name]!r}, recipe {wanted[name]!r}" for name in wanted if found[name] != wanted[name]
    ]
    if differences:
        raise CheckpointError(
            f"{folder} is another model than the recipe's policy.model_name, {inputs.model_dir} "
            f"({'; '.join(differences)}): give a checkpoint of that model, or set policy.model_name"
        )


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


def build_verifier(config: Config) -> Verifier:
    """Math-Verify or the recipe's own function in worker processes, or the comparison of texts."""
    if config.env.reward_function is not None:
        return FunctionVerifier(config.env)
    return ExactTextVerifier(config.env.math) if config.env.math.exact_text else MathVerifier(config.env.math)


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
        verifier=build_verifier(config),
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


def warm_start_dir(config: Config, inputs: Inputs) -> Path:
    """Where the warm start of this model, data and `sft:` section is kept; any change of them changes the name."""
    of_model = {
        **warm_start_identity(config),
        "model": _folder_fingerprint(inputs.model_dir),
        "rows": _supervised_rows(config),
    }
    identity = json.dumps(of_model, sort_keys=True)
    name = config.policy.model_name.replace("embedded:", "").rstrip("/").rsplit("/", 1)[-1]
    return Path(config.sft.warm_start_dir) / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def warm_start_identity(config: Config) -> dict[str, Any]:
    """All of a recipe that a warm start depends on, but for its model's files and the content of its data."""
    policy = config.policy
    return {
        "version": __version__,
        "sft": config.sft.model_dump(mode="json", exclude={"warm_start", "warm_start_dir", "data"}),
        "source": _supervised_source(config.sft.data or config.data.train),
        "prompt": [config.data.system_prompt, config.data.prompt_template, config.data.max_input_seq_length],
        "precision": [policy.precision, policy.max_grad_norm, policy.skip_grad_norm_above],
        "length": policy.max_total_sequence_length,
    }


def _supervised_source(source: DataSourceConfig) -> dict[str, Any]:
    """What supervised batches depend on: a generator writes new questions for them, whatever its seeds and size."""
    dumped = source.model_dump(mode="json")
    if source.generator is None:
        return dumped
    return {name: dumped[name] for name in ("generator", "generator_difficulties")}


def _supervised_rows(config: Config) -> str | None:
    """Hash of the solutions that a file or function gives; None for a generator."""
    key, source = ("data.train", config.data.train) if config.sft.data is None else ("sft.data", config.sft.data)
    if not source.has_rows:
        return None
    digest = hashlib.sha256()
    for solution in islice(read_solutions(source, key), source.max_questions):
        digest.update(json.dumps([solution.question, solution.text]).encode())
    return digest.hexdigest()


def _folder_fingerprint(folder: Path) -> list[object]:
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".safetensors"})
    return [[path.name, sha256_of(path)] for path in files]


def _check_stop_tokens(sampling: SamplingParams, architecture: Architecture) -> None:
    beyond = [token for token in sampling.stop_token_ids if token >= architecture.vocab_size]
    if beyond:
        raise ConfigError(
            f"policy.generation.stop_token_ids: {beyond} are not below the vocabulary size {architecture.vocab_size}"
        )


def _check_enough_questions(config: Config, train: QuestionSet) -> None:
    wanted = config.grpo.num_prompts_per_step
    if wanted > len(train.questions):
        raise ConfigError(
            f"grpo.num_prompts_per_step = {wanted} is more than the {len(train.questions)} training questions "
            f"left after the length filter ({len(train.dropped_too_long)} were too long) and data.train.pass_rate_band "
            f"or _range ({len(train.dropped_by_pass_rate)} were outside): lower it, or give more questions"
        )
