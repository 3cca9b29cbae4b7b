"""Log-probs of stored answers recomputed under other weights, so that another model can begin with them."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.checkpointing import STATE_FILE, CheckpointStore
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import ClusterConfig, Config, PolicyConfig
from exgrpo_megatron.data.embedded_model import is_embedded
from exgrpo_megatron.data.questions import load_questions
from exgrpo_megatron.data.tokenizer import PromptTokenizer, load_tokenizer
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.experience.encoding import rounded
from exgrpo_megatron.experience.files import Row, VocabularyName
from exgrpo_megatron.experience_tools.readers import JsonlReader
from exgrpo_megatron.experience_tools.sources import Source
from exgrpo_megatron.experience_tools.texts import Texts, vocabulary_name
from exgrpo_megatron.experience_tools.transfer import Written, check_free, write_folder
from exgrpo_megatron.parts import Policy
from exgrpo_megatron.process import process_group
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.run_folder import RECIPE_FILE
from exgrpo_megatron.types import TokenIds

ANSWERS_AT_ONCE = 64


@dataclass(frozen=True)
class RescoreRequest:
    """What is to be done."""

    source: Source
    model: Path
    """A run's checkpoint or a Hugging Face folder."""
    out: Path
    recipe: Path | None
    """Instead of that of the answers' run: it has the questions and how they are asked."""
    tokenizer: Path | None
    """Of the model that wrote the answers, where nothing else says which it was."""


@dataclass
class Moved:
    """What became of the recorded log-probs."""

    answers: int = 0
    tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    before: float = 0.0
    """Sum of the recorded log-probs."""
    after: float = 0.0
    absolute: float = 0.0
    """Sum of the absolute differences."""
    largest: float = 0.0
    ratios: float = 0.0
    """Sum of w = exp(new - recorded)."""
    squares: float = 0.0
    means: array[float] = field(default_factory=lambda: array("f"))
    """Mean difference of each answer."""

    def add(self, before: np.ndarray, after: np.ndarray) -> None:
        difference = after.astype(np.float64) - before.astype(np.float64)
        weights = np.exp(difference.clip(-300, 300))
        self.answers += 1
        self.tokens += len(difference)
        self.before += float(before.sum(dtype=np.float64))
        self.after += float(after.sum(dtype=np.float64))
        self.absolute += float(np.abs(difference).sum())
        self.largest = max(self.largest, float(np.abs(difference).max()))
        self.ratios += float(weights.sum())
        self.squares += float(np.square(weights).sum())
        self.means.append(float(difference.mean()))

    def describe(self) -> list[str]:
        """For people."""
        n = max(1, self.tokens)
        low, middle, high = np.quantile(np.array(self.means), [0.05, 0.5, 0.95]).tolist() if self.means else [0.0] * 3
        left_out = "; ".join(f"{count} {why}" for why, count in self.left_out.items())
        return [
            f"mean log-prob of a token: recorded {self.before / n:.4f}, now {self.after / n:.4f}",
            f"a token moved by {self.absolute / n:.4g} nats on average, {self.largest:.4g} at most; an answer's mean "
            f"by {low:.4g} (5%), {middle:.4g} (median), {high:.4g} (95%)",
            f"ratio w, new over recorded: mean {self.ratios / n:.4g}, effective sample size "
            f"{self.ratios**2 / (n * self.squares) if self.squares else 0.0:.1%} of the tokens",
            f"left out: {left_out or 'none'}",
        ]


def rescore(request: RescoreRequest) -> tuple[Written, Moved]:
    """Write the answers with the log-probs they have under `request.model`, at the recipe's sampling temperature.

    Raises:
        ConfigError: no recipe says how the questions are asked, or the model has another vocabulary.
        CheckpointError, DataError: the answers or the model cannot be read.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("exgrpo experience rescore is one process: run it alone")
    check_free(request.out)
    config, model_dir, tokenizer_dir = _model(request)
    tokenizer = load_tokenizer(tokenizer_dir)
    vocabulary = vocabulary_name(tokenizer, str(request.model))
    _check_vocabulary(request, vocabulary)
    reader, moved = request.source.reader(), Moved()
    if isinstance(reader, JsonlReader):
        raise ConfigError(f"{reader.path}: JSON lines; `exgrpo experience import` makes a source of them first")
    size = reader.group_size or config.grpo.num_generations_per_prompt
    prompts = _prompts(config, tokenizer)
    with process_group(config, watch=False) as comm:
        megatron = config.policy.megatron_cfg
        actor = build.build_actor(
            config, model_dir, comm, optimizer=megatron.optimizer, scheduler=megatron.scheduler, total_updates=1
        )
        if _is_checkpoint(request.model):
            actor.load(request.model / "policy")
        longest = actor.max_sequence_length
        usable = _usable(reader.rows(), prompts, longest, moved)
        rows = _rescored(usable, actor, prompts, config.policy.generation.temperature, moved)
        written = write_folder(request.out, "parquet", _renumbered(rows, size), size, None, (), vocabulary)
    return written, moved


def _model(request: RescoreRequest) -> tuple[Config, Path, Path]:
    """The recipe with a policy for one process, the folder of the model, and that of its tokenizer."""
    model = request.model
    if not model.is_dir():
        raise ConfigError(f"{model}: no such folder; give a run's checkpoint or a Hugging Face folder")
    if _is_checkpoint(model):
        own = load_recipe(model / RECIPE_FILE) if (model / RECIPE_FILE).is_file() else request.source.config()
        if own is None:
            raise CheckpointError(f"{model}: has no {RECIPE_FILE}, which says what model it is of")
        config = request.source.config(request.recipe) if request.recipe else own
        CheckpointStore(model.parent, own.checkpointing, SingleProcess()).verify(model)
        name = own.policy.model_name
        model_dir = model.absolute().parents[1] / "model" if is_embedded(name) else Path(name)
        named = own.policy.tokenizer.name
        tokenizer_dir = Path(named) if named else model_dir
        policy = own.policy
    else:
        config = request.source.config(request.recipe)
        if config is None:
            raise ConfigError(f"{request.source.path}: no recipe beside it says how questions are asked: --recipe")
        model_dir = tokenizer_dir = model
        policy = config.policy
    assert config is not None
    run_inputs.read_architecture(model_dir, "MODEL")
    alone = PolicyConfig(
        model_name=str(model_dir),
        precision=policy.precision,
        max_total_sequence_length=policy.max_total_sequence_length,
        generation=config.policy.generation,
    )
    return config.model_copy(update={"policy": alone, "cluster": ClusterConfig()}), model_dir, tokenizer_dir


def _check_vocabulary(request: RescoreRequest, found: VocabularyName) -> None:
    wrote = Texts(request.source, tokenizer_dir=request.tokenizer).vocabulary()
    if wrote is None:
        raise ConfigError(
            f"{request.source.path}: nothing says which tokenizer its token ids are of; name that of the model that "
            "wrote them with --tokenizer"
        )
    if wrote.fingerprint != found.fingerprint:
        raise ConfigError(
            f"the answers in {request.source.path} are token ids of {wrote}, and {request.model} has another "
            f"vocabulary, {found}: log-probs can only be recomputed by a model with the same tokens"
        )


def _prompts(config: Config, tokenizer: PromptTokenizer) -> dict[str, TokenIds]:
    questions = load_questions(config.data.train, config.data, tokenizer, held_out=False).questions
    return {question.id: question.prompt_ids for question in questions}


def _usable(rows: Iterable[Row], prompts: dict[str, TokenIds], longest: int, moved: Moved) -> Iterator[Row]:
    for row in rows:
        prompt = prompts.get(row.question_id)
        if prompt is None:
            moved.left_out["whose question is not among the usable ones of data.train"] += 1
        elif len(prompt) + len(row.answer.token_ids) > longest:
            moved.left_out[f"longer than {longest} tokens with their question"] += 1
        else:
            yield row


def _rescored(
    rows: Iterator[Row], actor: Policy, prompts: dict[str, TokenIds], temperature: float, moved: Moved
) -> Iterator[Row]:
    while some := list(islice(rows, ANSWERS_AT_ONCE)):
        pairs = [(prompts[row.question_id], row.answer.token_ids) for row in some]
        for row, scored in zip(some, actor.score(pairs, temperature), strict=True):
            logprobs = rounded(scored.logprobs)
            moved.add(row.answer.logprobs, logprobs)
            yield replace(row, answer=replace(row.answer, logprobs=logprobs, policy_version=actor.version))


def _renumbered(rows: Iterable[Row], group_size: int) -> Iterator[Row]:
    """Places in buckets and among answers without the gaps of what was left out."""
    sizes, last, index, position = [0] * group_size, None, 0, 0
    for row in rows:
        if row.question_id == last:
            index += 1
        else:
            last, index, position = row.question_id, 0, sizes[row.bucket]
            sizes[row.bucket] += 1
        yield replace(row, position=position, answer_index=index)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / STATE_FILE).is_file()
