"""An evaluation on the sets of a recipe: what is missing is sampled, written down batch by batch, and summed up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.checkpoint_evaluation import checkpoint_weights, evaluation_name
from exgrpo_megatron.comm import Communicator, together
from exgrpo_megatron.config import Config, EvalSetConfig
from exgrpo_megatron.data.eval_sets import load_eval_set
from exgrpo_megatron.data.questions import QuestionSet, first_ids
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.evaluation_request import EvalRequest
from exgrpo_megatron.files import replace_text, writable_folder
from exgrpo_megatron.parts import Verifier
from exgrpo_megatron.places import READING, STARTING
from exgrpo_megatron.rewards.choice import ChoiceVerifier
from exgrpo_megatron.rollout.protocol import RolloutEngine
from exgrpo_megatron.run_folder import locked
from exgrpo_megatron.run_inputs import Inputs
from exgrpo_megatron.set_answers import SetEvaluator
from exgrpo_megatron.set_evaluation.files import Progress, SetFiles
from exgrpo_megatron.set_evaluation.identity import checkpoint_digest, set_identity
from exgrpo_megatron.set_evaluation.results import SetResult, group_averages, markdown, set_result

Note = Callable[[str], None]
"""Shows a line, on the main process alone."""


@dataclass(frozen=True)
class WrittenSets:
    """The files of an evaluation on sets."""

    folder: Path
    table: str

    def describe(self) -> str:
        """The table, and where everything lies."""
        return f"{self.table}\nresults  {self.folder}/results.json, results.md, <set>.generations.jsonl"


def evaluate_sets(config: Config, request: EvalRequest, comm: Communicator, note: Note) -> WrittenSets:
    """Every set of `eval.sets`, going on where an earlier call stopped; collective over all processes.

    Raises:
        CheckpointError: the answers that are there are of another checkpoint, setting or version, or damaged.
    """
    with comm.places.inside(READING):
        inputs = run_inputs.load_inputs(config, comm, with_questions=False)
        with together(comm):
            tasks = [
                SetTask(name, chosen, _questions(name, config, inputs, comm))
                for name, chosen in config.eval.sets.items()
            ]
    folder = Path(config.logger.log_dir) / "eval" / f"{evaluation_name(config, request.checkpoint)}-sets"
    with _own_folder(folder, comm):
        return _SetRun(config, inputs, request, comm, note, folder).run(tasks)


def check_sets(config: Config, *, entropy: bool) -> None:
    """Raise ConfigError where there are no sets, or something is asked of them that is measured elsewhere."""
    if not config.eval.sets:
        raise ConfigError("eval.sets: an evaluation of sets needs some, but there is none (docs/evaluation.md)")
    if entropy:
        raise ConfigError("--entropy is for --questions validation or train: of sets no token entropies are measured")


@dataclass(frozen=True)
class SetTask:
    """One set to evaluate."""

    name: str
    config: EvalSetConfig
    questions: QuestionSet

    @cached_property
    def ids(self) -> list[str]:
        return [question.id for question in self.questions.questions]


class _SetRun:
    """Every method is collective; files are the main process's."""

    def __init__(
        self, config: Config, inputs: Inputs, request: EvalRequest, comm: Communicator, note: Note, folder: Path
    ) -> None:
        self.config, self.inputs, self.request, self.comm = config, inputs, request, comm
        self.note, self.folder = note, folder
        self.results: dict[str, SetResult] = {}
        self.identities: dict[str, dict[str, Any]] = {}

    def run(self, tasks: Sequence[SetTask]) -> WrittenSets:
        progress = self._progress(tasks)
        # Finished sets first: their numbers are there however this call ends.
        written = self._sum_up(tasks, [task for task in tasks if len(progress[task.name].done) == len(task.ids)])
        missing = [task for task in tasks if len(progress[task.name].done) < len(task.ids)]
        if not missing:
            return written
        weights, _ = checkpoint_weights(self.config, self.inputs, self.request, self.comm)
        with ExitStack() as stack:
            with self.comm.places.inside(STARTING):
                engine = build.build_engine(self.config, self.inputs, self.comm, weights)
                stack.callback(engine.close)
                engine.load_weights(weights(), version=0)
            free = None
            for task in missing:
                if task.config.choices_key is None and free is None:
                    free = stack.enter_context(closing(build.build_verifier(self.config, self.comm)))
                verifier = ChoiceVerifier() if task.config.choices_key else free
                assert verifier is not None
                self._sample(task, progress[task.name], engine, verifier)
                written = self._sum_up(tasks, [task])
        return written

    def _progress(self, tasks: Sequence[SetTask]) -> dict[str, Progress]:
        """How far each set is; nothing is written unless all sets may go on."""
        progress: dict[str, Progress] = {}
        with together(self.comm):
            if self.comm.is_main:
                digest = checkpoint_digest(self.request.checkpoint)
                for task in tasks:
                    identity = set_identity(self.config, self.inputs, digest, task.name, task.questions)
                    self.identities[task.name] = identity
                    files = SetFiles(self.folder, task.name)
                    progress[task.name] = files.progress(identity, task.ids, task.config.num_samples)
        progress = self.comm.broadcast(progress)
        for task in tasks:
            found = progress[task.name]
            again = f", {found.dropped} of a batch that was cut off are sampled again" if found.dropped else ""
            there = f"; {len(found.done)} questions are done{again}" if found.begun else ""
            self.note(f"{task.name}: {task.questions.describe()}{there}")
        return progress

    def _sample(self, task: SetTask, progress: Progress, engine: RolloutEngine, verifier: Verifier) -> None:
        files = SetFiles(self.folder, task.name)
        if not progress.begun:
            self._begin(task, files, verifier)
        left = [question for question in task.questions.questions if question.id not in progress.done]
        size = max(1, self.config.eval.save_every // task.config.num_samples)
        tools = self.inputs
        evaluator = SetEvaluator(self.config.eval, engine, tools.tokenizer, tools.sampling, self.comm)
        for first in range(0, len(left), size):
            groups = evaluator.answers(task.name, left[first : first + size], verifier)
            with together(self.comm):
                if self.comm.is_main:
                    files.append([row for group in groups for row in group])
            done = len(progress.done) + min(first + size, len(left))
            self.note(f"{task.name}: {done} of {len(task.ids)} questions")

    def _begin(self, task: SetTask, files: SetFiles, verifier: Verifier) -> None:
        """Note what the answers will be of, and the gold answers that no response can match."""
        with together(self.comm):
            if not self.comm.is_main:
                return
            checked = self.config.env.math.check_gold
            golds = [question.answer for question in task.questions.questions] if checked else []
            unmatched = [task.ids[index] for index in verifier.check_gold(golds)]
            if unmatched:
                self.note(
                    f"{task.name}: the gold answers of {len(unmatched)} questions fail the grader's own rules, and no "
                    f"response to them can be right ({first_ids(unmatched)})"
                )
            files.begin(
                {
                    "identity": self.identities[task.name],
                    "questions": task.questions.record(),
                    "gold_answers_checked": checked,
                    "gold_answers_without_match": unmatched,
                }
            )

    def _sum_up(self, tasks: Sequence[SetTask], finished: Sequence[SetTask]) -> WrittenSets:
        """Add the numbers of `finished` sets to those that are there, and write the results of all of them."""
        table = ""
        with together(self.comm):
            if self.comm.is_main:
                for task in finished:
                    answers = SetFiles(self.folder, task.name).answers(task.ids)
                    self.results[task.name] = set_result(task.name, self.config.eval, answers)
                table = self._write([task for task in tasks if task.name in self.results], tasks)
        return WrittenSets(self.folder, self.comm.broadcast(table))

    def _write(self, there: Sequence[SetTask], tasks: Sequence[SetTask]) -> str:
        results = [self.results[task.name] for task in there]
        averages = group_averages(self.config.eval, results)
        records = {task.name: SetFiles(self.folder, task.name).record() for task in there}
        missing = [task.name for task in tasks if task not in there]
        content = {
            "checkpoint": str(self.request.checkpoint),
            "missing": missing,
            "seed": self.config.eval.seed,
            "bootstrap_samples": self.config.eval.bootstrap_samples,
            "sets": {result.name: {**result.as_json(), **records[result.name]} for result in results},
            "macro_average": {group: found.as_json() for group, found in averages.items()},
        }
        engine = next(iter(self.identities.values()))["engine"]
        footer = (
            f"In brackets 95% bootstrap intervals over questions. Engine: {engine['backend']} ({engine['version']}, "
            f"{engine['device']}); eval.seed = {self.config.eval.seed}."
            + (f" Not finished: {', '.join(missing)}." if missing else "")
        )
        table = markdown(f"Evaluation of {self.request.checkpoint}", results, averages, footer)
        replace_text(self.folder / "results.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        replace_text(self.folder / "results.md", table)
        return table


def _questions(name: str, config: Config, inputs: Inputs, comm: Communicator) -> QuestionSet:
    chosen, seed = config.eval.sets[name], config.eval.seed
    return load_eval_set(name, chosen, config.data, inputs.tokenizer, seed, comm.places.advance)


@contextmanager
def _own_folder(folder: Path, comm: Communicator) -> Iterator[None]:
    """`folder`, made, and locked against a second evaluation of the same checkpoint."""
    with ExitStack() as stack:
        with together(comm):
            writable_folder(folder, "logger.log_dir")
            if comm.is_main:
                stack.enter_context(locked(folder, "logger.log_dir"))
        yield
