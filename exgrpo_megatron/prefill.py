"""Experience to begin with: made from worked solutions (`exgrpo prefill`), and taken in by a new run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from exgrpo_megatron.comm import gather_parts
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.solutions import closed_solutions, read_solutions, solution_column
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.parts import Parts, score_shared
from exgrpo_megatron.types import Group, Question, ScoredSequence, TokenIds, Trajectory

ANSWERS_AT_ONCE = 1024
"""Solutions graded, scored and handed to their owners together; the rest of the file is not in memory yet."""


@dataclass
class PrefillReport:
    """What became of the worked solutions."""

    stored: int = 0
    """Answers stored."""
    questions: int = 0
    """Questions with a stored answer."""
    too_long: int = 0
    """Answers longer than policy.generation.max_new_tokens."""
    unwritable: int = 0
    """Answers with characters the vocabulary lacks, or with the name of a special token."""
    wrong: int = 0
    """Answers the verifier gives no reward."""
    duplicates: int = 0
    """Answers that were there already."""
    no_question: int = 0
    """Rows whose question is not among the usable ones of data.train."""

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.stored} answers of {self.questions} questions; left out: {self.too_long} too long, "
            f"{self.unwritable} the tokenizer cannot write, {self.wrong} the verifier rejects, {self.duplicates} "
            f"duplicates, {self.no_question} rows whose question is not used"
        )


def check_prefill_target(config: Config) -> Path:
    """The folder that `experience.prefill_path` names, free to be written.

    Raises:
        ConfigError: it is unset or taken, or the recipe is one that solutions cannot be recorded for.
    """
    path = config.experience.prefill_path
    if path is None:
        raise ConfigError("experience.prefill_path: required (the folder to write), but not set")
    if Path(path).exists():
        raise ConfigError(f"experience.prefill_path = {path!r} exists: move it away, or name another folder")
    if not config.experience.enabled:
        raise ConfigError("experience.enabled = false: nothing would be stored or replayed")
    if config.sft.warm_start:
        raise ConfigError(
            "sft.warm_start = true: log-probs must be those of the policy a run starts with, which is not "
            "policy.model_name then; set sft.warm_start=false and policy.model_name to the folder of the warm start"
        )
    solution_column(config.data.train, "data.train")
    return Path(path)


def record_solutions(parts: Parts, endings: Sequence[str]) -> PrefillReport:
    """Store the verified worked solutions of data.train in `parts.experience`.

    A solution without a box is stored once with each of `endings`, in which {answer} stands for the gold answer; which
    of a question's answers is replayed, the policy then decides. Nobody knows the policy that wrote a solution: the
    recorded log-probs are those of `parts.policy`, so the ratio of a replayed solution begins at 1. A question is
    placed in the bucket of one correct answer until a run has tried it.

    Raises:
        ConfigError, DataError: the solutions cannot be read, or none can be stored.
    """
    report = PrefillReport()
    answers = _tokenised(parts, endings, report)
    while some := list(islice(answers, ANSWERS_AT_ONCE)):
        recorded = parts.experience.record(_groups(parts, some, report), step=0, collect=True)
        report.stored += recorded.stored
        report.duplicates += recorded.duplicates
    report.questions = parts.experience.num_questions
    if not report.stored:
        raise DataError(f"data.train: no worked solution can be replayed: {report.describe()}")
    return report


def load_prefill(parts: Parts, path: Path) -> str:
    """Begin with the answers in an experience file, those of questions that data.train lacks left out; a line about it.

    Raises:
        CheckpointError: the file is missing, damaged or for another group size.
        ConfigError: nothing in it can be replayed under this recipe.
    """
    known = {question.id for question in parts.train.questions}
    added = parts.experience.merge_file(path)
    unknown = parts.experience.keep_only(known)
    if not parts.experience.num_answers:
        raise ConfigError(
            f"experience.prefill_path = {str(path)!r}: none of its questions is in data.train; use the data it was "
            f"recorded on, or null"
        )
    longest, highest = parts.experience.extent()
    if longest > parts.sampling.max_new_tokens:
        raise ConfigError(
            f"experience.prefill_path = {str(path)!r} has answers of up to {longest} tokens, more than "
            f"policy.generation.max_new_tokens = {parts.sampling.max_new_tokens}: raise it, or make the file with it"
        )
    if highest >= parts.tokenizer.vocab_size:
        raise ConfigError(
            f"experience.prefill_path = {str(path)!r} has token id {highest}, but the tokenizer only "
            f"{parts.tokenizer.vocab_size} tokens: it was made with another model"
        )
    return (
        f"experience: {added.answers} answers of {added.questions} questions from {path}; {unknown} questions left out "
        f"because data.train does not have them"
    )


_Answer = tuple[Question, TokenIds]


def _tokenised(parts: Parts, endings: Sequence[str], report: PrefillReport) -> Iterator[_Answer]:
    """Every solution that a rollout could have been, with its end token."""
    questions = {question.text: question for question in parts.train.questions}
    for solution in read_solutions(parts.config.data.train, "data.train"):
        parts.comm.places.advance()
        question = questions.get(solution.question)
        if question is None:
            report.no_question += 1
            continue
        for text in closed_solutions(parts.config.data.train, solution.text, question.answer, endings):
            token_ids = np.array([*parts.tokenizer.encode(text), parts.tokenizer.eos_id], dtype=np.int32)
            writable = parts.tokenizer.can_write(text)
            fits = len(token_ids) <= parts.sampling.max_new_tokens
            report.unwritable += not writable
            report.too_long += writable and not fits
            if writable and fits:
                yield question, token_ids


def _groups(parts: Parts, answers: list[_Answer], report: PrefillReport) -> list[Group]:
    """A group for each answer that the verifier accepts; every process grades a part of them."""
    comm, size = parts.comm, parts.config.grpo.num_generations_per_prompt
    first, processes = comm.rank * comm.members + comm.member, comm.size * comm.members
    mine = answers[first::processes]
    texts = [(parts.tokenizer.decode(ids), question.answer, question.text) for question, ids in mine]
    graded = zip(range(first, len(answers), processes), parts.verifier.grade(texts), strict=True)
    verdicts = gather_parts(comm, list(graded))
    right = [answer for answer, verdict in zip(answers, verdicts, strict=True) if verdict.correct]
    report.wrong += len(answers) - len(right)
    scores = score_shared(parts, [(question.prompt_ids, token_ids) for question, token_ids in right])
    return [
        _group(question, token_ids, score, size, parts.policy.version)
        for (question, token_ids), score in zip(right, scores, strict=True)
    ]


def _group(question: Question, token_ids: TokenIds, score: ScoredSequence, size: int, version: int) -> Group:
    """The solution as the one correct member; attempts that nobody made stand in as wrong ones."""
    solution = Trajectory(token_ids, score.logprobs, 1.0, False, "stop", version)
    nothing = np.zeros(0, np.float32)
    untried = Trajectory(nothing.astype(np.int32), nothing, 0.0, False, "length", version)
    return Group(question, (solution, *[untried] * (size - 1)))
