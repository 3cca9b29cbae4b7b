"""Evaluation of a checkpoint outside a run (`exgrpo eval`), on held-out or on training questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from exgrpo_megatron import __version__, build, run_inputs
from exgrpo_megatron.checkpointing import read_state
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.pass_rates import measured, write_pass_rates
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.evaluation_request import EvalRequest, QuestionsOf
from exgrpo_megatron.evaluator import Evaluation
from exgrpo_megatron.files import replace_text, writable_folder
from exgrpo_megatron.parts import score_by_all
from exgrpo_megatron.places import LOADING, STARTING
from exgrpo_megatron.report.entropy import EntropyReport, draw_entropy, entropy_report
from exgrpo_megatron.rollout.weight_buckets import in_groups
from exgrpo_megatron.run_folder import checkpoint_store
from exgrpo_megatron.run_inputs import Inputs
from exgrpo_megatron.types import Question

if TYPE_CHECKING:
    from exgrpo_megatron.policy.actor import MegatronActor


@dataclass(frozen=True)
class WrittenEvaluation:
    """The files of one evaluation."""

    summary: Path
    answers: Path
    pass_rates: Path
    report: EntropyReport | None
    """Token entropy by band, where it was measured; a picture of it is at `picture`."""
    picture: Path | None

    def describe(self, checkpoint: Path) -> str:
        """Where everything lies, a line each."""
        places = {
            "checkpoint": checkpoint,
            "metrics": self.summary,
            "answers": self.answers,
            "pass rates": self.pass_rates,
            "entropies": self.picture,
        }
        return "\n".join(f"{name:10}  {place}" for name, place in places.items() if place is not None)


def find_checkpoint(
    config: Config, given: Path | None, comm: Communicator, questions: QuestionsOf = QuestionsOf.validation
) -> Path:
    """The folder to evaluate: `given`, or the newest checkpoint of the recipe's run.

    Raises:
        ConfigError: the recipe has no held-out questions, and they are to be evaluated.
        CheckpointError: there is no such folder, or it is neither a checkpoint nor a Hugging Face folder.
    """
    if questions is QuestionsOf.validation and config.data.validation is None:
        raise ConfigError("data.validation: an evaluation needs held-out questions, but it is not set")
    found = given or checkpoint_store(config, comm).latest()
    if found is None:
        raise CheckpointError(f"no checkpoint under {config.logger.log_dir}: train first, or give --checkpoint DIR")
    if not found.is_dir():
        raise CheckpointError(f"--checkpoint {found}: no such folder; give a run's checkpoint or a Hugging Face folder")
    if not _is_hf(found):
        read_state(found)
    return found


def evaluate_checkpoint(config: Config, inputs: Inputs, request: EvalRequest, comm: Communicator) -> Evaluation:
    """Pass rates of a run's checkpoint or of a Hugging Face folder."""
    questions = inputs.train.questions if request.questions is QuestionsOf.train else inputs.held_out
    weights, actor = checkpoint_weights(config, inputs, request, comm)
    with comm.places.inside(STARTING):
        engine = build.build_engine(config, inputs, comm, weights)
        engine.load_weights(weights(), version=0)
    with closing(build.build_verifier(config, comm)) as verifier:
        evaluator = build.build_evaluator(config, inputs, engine, verifier, comm, questions)
        assert evaluator is not None, "find_checkpoint refuses a recipe without data.validation"
        evaluation = evaluator.run(keep_tokens=request.entropy)
    engine.close()
    if request.entropy:
        assert actor is not None
        with comm.places.inside("evaluation: entropies"):
            _add_entropies(evaluation, questions, actor, comm, config.eval.temperature)
    return evaluation


def checkpoint_weights(
    config: Config, inputs: Inputs, request: EvalRequest, comm: Communicator
) -> tuple[Callable[[], Iterable[tuple[str, Tensor]]], MegatronActor | None]:
    """What gives the checkpoint's weights, as often as it is called; the actor that has them, if it was made."""
    checkpoint = request.checkpoint
    if _is_hf(checkpoint):
        run_inputs.check_architecture(checkpoint, inputs)
        if request.entropy:
            with comm.places.inside(LOADING):
                actor = build.build_rl_actor(config, checkpoint, comm)
            return actor.export_weights, actor
        reader = run_inputs.HFReader(checkpoint)

        def read() -> Iterator[tuple[str, Tensor]]:
            for name in in_groups(reader.names()):
                comm.places.advance()
                yield name, reader.get(name)

        return read, None
    with comm.places.inside(LOADING):
        actor = build.build_rl_actor(config, inputs.model_dir, comm)
        checkpoint_store(config, comm).verify(checkpoint)
        actor.load(checkpoint / "policy")
    return actor.export_weights, actor


def write_evaluation(config: Config, evaluation: Evaluation, request: EvalRequest) -> WrittenEvaluation:
    """Metrics as `<log_dir>/eval/<checkpoint>.json`; beside it as JSONL every graded answer, and the pass rate of every
    question. Those of training questions have `-train` in their names."""
    folder = writable_folder(Path(config.logger.log_dir) / "eval", "logger.log_dir")
    name = evaluation_name(config, request.checkpoint)
    if request.questions is QuestionsOf.train:
        name += "-train"
    sampled = [row for row in evaluation.answers if row["mode"] == "t1"]
    rates = measured(sampled)
    report = entropy_report(sampled, rates) if request.entropy else None
    content = {
        "checkpoint": str(request.checkpoint),
        "questions": request.questions.value,
        "version": __version__,
        "eval": config.eval.model_dump(mode="json"),
        "metrics": evaluation.metrics,
        **({} if report is None else {"entropy": report.as_json()}),
    }
    written = WrittenEvaluation(
        summary=folder / f"{name}.json",
        answers=folder / f"{name}.answers.jsonl",
        pass_rates=folder / f"{name}.pass_rates.jsonl",
        report=report,
        picture=None if report is None else folder / f"{name}.entropy.png",
    )
    answers = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.answers)
    replace_text(written.answers, answers)
    write_pass_rates(written.pass_rates, rates)
    if report is not None and written.picture is not None:
        draw_entropy(report, written.picture)
    replace_text(written.summary, json.dumps(content, indent=1) + "\n")
    return written


def evaluation_name(config: Config, checkpoint: Path) -> str:
    """What the files of a checkpoint's evaluations are called."""
    return _name(checkpoint.resolve(), Path(config.logger.log_dir).resolve())


def _add_entropies(
    evaluation: Evaluation, questions: Sequence[Question], actor: MegatronActor, comm: Communicator, temperature: float
) -> None:
    """Mean token entropy and log-prob of every sampled answer, at the temperature it was sampled at, into its row."""
    prompts = {question.id: question.prompt_ids for question in questions}
    sampled = [
        (row, token_ids)
        for row, token_ids in zip(evaluation.answers, evaluation.token_ids, strict=True)
        if row["mode"] == "t1"
    ]
    pairs = [(prompts[str(row["question_id"])], token_ids) for row, token_ids in sampled]
    for (row, _), scored in zip(sampled, score_by_all(actor, comm, pairs, temperature), strict=True):
        row["mean_entropy"] = float(np.mean(scored.entropies, dtype=np.float64))
        row["mean_logprob"] = float(np.mean(scored.logprobs, dtype=np.float64))


def _is_hf(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _name(checkpoint: Path, log_dir: Path) -> str:
    """`step_000020`, `hf` or `sft-hf` of this run; of another one with its folder before it, so that neither hides the
    other."""
    if not checkpoint.is_relative_to(log_dir):
        return f"{checkpoint.parent.name}-{checkpoint.name}"
    if (checkpoint / "state.json").is_file():
        return checkpoint.name
    return "-".join(checkpoint.relative_to(log_dir).parts) or checkpoint.name
