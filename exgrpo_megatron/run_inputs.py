"""What a run reads: model folder, tokenizer and questions, checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError
from exgrpo_conversion.hf_folder import HFReader, ModelFolderError, read_config
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.checkpointing import read_state
from exgrpo_megatron.comm import Communicator, gather_everyone, together
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.demonstrations import Demonstrations
from exgrpo_megatron.data.embedded_model import is_embedded, materialize
from exgrpo_megatron.data.eval_sets import load_eval_set
from exgrpo_megatron.data.questions import NO_QUESTIONS, QuestionSet, load_questions
from exgrpo_megatron.data.tokenizer import PromptTokenizer, load_tokenizer
from exgrpo_megatron.errors import CheckpointError, ConfigError, DataError
from exgrpo_megatron.experience.reading import check_answers_files
from exgrpo_megatron.layout import check_layout, check_positions
from exgrpo_megatron.rewards.function import check_reward_function
from exgrpo_megatron.rollout.protocol import SamplingParams
from exgrpo_megatron.rollout.vllm_checks import check_vllm
from exgrpo_megatron.types import Question

if TYPE_CHECKING:
    pass


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
            name: load_eval_set(name, chosen, config.data, tokenizer, config.eval.seed, comm.places.advance)
            for name, chosen in config.eval.sets_in_training.items()
        }
    return Inputs(model_dir, architecture, tokenizer, train, validation, sampling, shown, sets)


def _load_question_sets(
    config: Config, tokenizer: PromptTokenizer, comm: Communicator
) -> tuple[QuestionSet, QuestionSet | None]:
    """Training and held-out questions; DataError where processes have different ones."""
    data, on_row, held_out = config.data, comm.places.advance, None
    with together(comm):
        train = load_questions(data.train, data, tokenizer, held_out=False, on_row=on_row)
        if data.validation:
            held_out = load_questions(data.validation, data, tokenizer, held_out=True, on_row=on_row)
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


def _check_stop_tokens(sampling: SamplingParams, architecture: Architecture) -> None:
    beyond = [token for token in sampling.stop_token_ids if token >= architecture.vocab_size]
    if beyond:
        raise ConfigError(
            f"policy.generation.stop_token_ids: {beyond} are not below the vocabulary size {architecture.vocab_size}"
        )


def _check_enough_questions(config: Config, train: QuestionSet) -> None:
    wanted = config.grpo.num_prompts_per_step
    if wanted <= len(train.questions):
        return
    data = config.data.train
    by_pass_rate = [
        f"data.train.{name} ({len(train.dropped_by_pass_rate)} were outside)"
        for name, limits in (("pass_rate_band", data.pass_rate_band), ("pass_rate_range", data.pass_rate_range))
        if limits is not None
    ]
    filters = [f"the length filter ({len(train.dropped_too_long)} were too long)", *by_pass_rate]
    raise ConfigError(
        f"grpo.num_prompts_per_step = {wanted} is more than the {len(train.questions)} training questions left after "
        f"{' and '.join(filters)}: lower it, or give more questions"
    )
