"""Question sets of others turned into question files: what is kept, what is left out and why, and a report of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.data.foreign import Candidate, ForeignFile
from exgrpo_megatron.data.foreign_kinds import SolutionOf, SourceFormat
from exgrpo_megatron.data.prepare_output import Outputs, check_targets
from exgrpo_megatron.data.prepare_report import PrepareReport
from exgrpo_megatron.data.questions import LONGEST_ID
from exgrpo_megatron.data.tokenizer import PromptTokenizer, load_tokenizer
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.rewards.rules import boxed, is_literal
from exgrpo_megatron.rewards.verifier import MathVerifier

BATCH_ROWS = 1024
"""Rows whose answers are checked together."""

HELD_OUT_SHARE = 0.01

NO_CATEGORY = "unknown"
"""Category of a row without one, where others have one: a question file names a category in every row."""


@dataclass(frozen=True)
class PrepareRequest:
    """What the command line says; see `exgrpo data prepare --help`."""

    files: Sequence[Path]
    out: Path
    held_out: Path | None = None
    held_out_share: float | None = None
    """Null: `HELD_OUT_SHARE`."""
    report: Path | None = None
    format: SourceFormat | None = None
    category: str | None = None
    solutions: SolutionOf = SolutionOf.none
    keep_instructions: bool = False
    drop_types: Sequence[str] = ()
    verified: bool = False
    max_question_chars: int | None = None
    max_prompt_tokens: int | None = None
    tokenizer: Path | None = None
    check_answers: bool = True
    num_workers: int = 2

    @property
    def share(self) -> float:
        """Of the questions that are held out."""
        return HELD_OUT_SHARE if self.held_out_share is None else self.held_out_share

    @property
    def report_path(self) -> Path:
        return self.report or self.out.with_suffix(".report.json")


def prepare(request: PrepareRequest) -> PrepareReport:
    """Write the question files and the report, all of them or none.

    Every file is read twice: first for questions that have several answers, then row by row into the result. What is
    kept in memory is a hash and the answer of every distinct question, not the rows.

    Raises:
        ConfigError: options that do not fit together, or a target that exists.
        DataError: a file that cannot be read, of an unknown format or without what is asked for; no question is left.
    """
    _check_options(request)
    check_targets(request.out, request.held_out, request.report_path)
    sources = [
        ForeignFile(path, request.format, request.solutions, request.category,
                    keep_instructions=request.keep_instructions)
        for path in request.files
    ]  # fmt: skip
    tokenizer = load_tokenizer(request.tokenizer) if request.tokenizer else None
    report = PrepareReport(request.out, request.held_out, request.report_path)
    with ExitStack() as stack:
        answers = _AnswerCheck(request, stack)
        rules = _Rules(request, answers.settle(_distinct_answers(request, sources)), answers, tokenizer)
        has_category = any(source.category for source in sources)
        outputs = stack.enter_context(Outputs(request.out, request.held_out, has_category, rules.wants_solution))
        for source in sources:
            rows = iter(source)
            while batch := list(islice(rows, BATCH_ROWS)):
                rules.take(batch, outputs, report)
                report.count_rows(source, len(batch))
        report.look_for_types(request.drop_types)
        _check_result(report, request)
        outputs.publish(report)
    return report


def _check_options(request: PrepareRequest) -> None:
    if not request.files:
        raise ConfigError("no input file: name at least one .jsonl or .parquet file")
    if len(set(request.files)) < len(request.files):
        raise ConfigError("an input file is named twice; name it once")
    if (request.tokenizer is None) != (request.max_prompt_tokens is None):
        raise ConfigError("--tokenizer and --max-prompt-tokens belong together: give both, or neither")
    if request.held_out is None and request.held_out_share is not None:
        raise ConfigError("--held-out-share is for --held-out: name the file, or leave it out")
    if not 0 < request.share < 1:
        raise ConfigError(f"--held-out-share {request.share:g}: must be between 0 and 1, both excluded")


def _check_result(report: PrepareReport, request: PrepareRequest) -> None:
    if not report.num_kept:
        raise DataError(f"no question of {report.num_rows} rows is left ({report.reasons()}); nothing was written")
    if request.held_out and not report.num_held_out:
        raise DataError(
            f"--held-out-share {request.share:g} of {report.num_kept} questions gives no held-out question; "
            f"raise it; nothing was written"
        )


def _key(question: str) -> bytes:
    """Equal for questions that differ in white space alone."""
    return hashlib.blake2b(" ".join(question.split()).encode(), digest_size=16).digest()


def _reason_of_row(candidate: Candidate, request: PrepareRequest) -> str | None:
    """Why a row is left out that needs no look at other rows, and no model."""
    if candidate.fault:
        return candidate.fault
    if candidate.question_type and candidate.question_type.casefold() in map(str.casefold, request.drop_types):
        return "question_type"
    if request.verified and not candidate.verified:
        return "not_verified"
    if request.max_question_chars and len(candidate.question) > request.max_question_chars:
        return "too_many_characters"
    if request.solutions is not SolutionOf.none and not candidate.solution:
        return "no_solution"
    return None


_Answers = dict[bytes, str | list[str]]
"""The answer of each question, or all of them where there are several."""


def _distinct_answers(request: PrepareRequest, sources: Iterable[ForeignFile]) -> _Answers:
    found: _Answers = {}
    for source in sources:
        for candidate in source:
            if _reason_of_row(candidate, request) is not None:
                continue
            before = found.setdefault(_key(candidate.question), candidate.answer)
            known = [before] if isinstance(before, str) else before
            if candidate.answer not in known:
                found[_key(candidate.question)] = [*known, candidate.answer]
    return found


class _AnswerCheck:
    """Which answers Math-Verify understands, and which of them it takes for the same."""

    def __init__(self, request: PrepareRequest, stack: ExitStack) -> None:
        self._verifier = (
            stack.enter_context(MathVerifier(MathEnvConfig(num_workers=request.num_workers)))
            if request.check_answers
            else None
        )

    def settle(self, answers: _Answers) -> dict[bytes, str | None]:
        """The answer of each question to keep: the first that is understood; None where others contradict it.

        Questions with a single answer keep it, understood or not."""
        several = {key: found for key, found in answers.items() if isinstance(found, list)}
        refused = self.refused({answer for found in several.values() for answer in found})
        settled: dict[bytes, str | None] = {key: found for key, found in answers.items() if isinstance(found, str)}
        pairs: list[tuple[bytes, str, str]] = []
        for key, found in several.items():
            first, *others = [answer for answer in found if answer not in refused] or found[:1]
            settled[key] = first
            pairs += [(key, first, other) for other in others]
        for (key, _, _), same in zip(pairs, self._same([(first, other) for _, first, other in pairs]), strict=True):
            if not same:
                settled[key] = None
        return settled

    def refused(self, answers: Iterable[str]) -> set[str]:
        """Those that would earn no reward as the answer to themselves."""
        if self._verifier is None:
            return set()
        # What `is_literal` accepts is a plain number: grading a million of them would only cost time.
        asked = sorted(answer for answer in set(answers) if len(answer) > _SHORT or not is_literal(answer))
        return {asked[index] for index in self._verifier.check_gold(asked)}

    def _same(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        if self._verifier is None:
            return [False] * len(pairs)
        return [verdict.correct for verdict in self._verifier.grade([(boxed(other), first) for first, other in pairs])]


_SHORT = 40


class _Rules:
    """Decides about rows in order, and writes those that are kept."""

    def __init__(
        self,
        request: PrepareRequest,
        settled: dict[bytes, str | None],
        answers: _AnswerCheck,
        tokenizer: PromptTokenizer | None,
    ) -> None:
        self._request, self._settled, self._answers, self._tokenizer = request, settled, answers, tokenizer
        self._written: set[bytes] = set()
        self._ids: set[bytes] = set()
        self.wants_solution = request.solutions is not SolutionOf.none

    def take(self, batch: Sequence[Candidate], outputs: Outputs, report: PrepareReport) -> None:
        reasons = [self._reason(candidate) for candidate in batch]
        refused = self._answers.refused(
            candidate.answer
            for candidate, reason in zip(batch, reasons, strict=True)
            if reason is None and _key(candidate.question) not in self._written
        )
        for candidate, early in zip(batch, reasons, strict=True):
            reason = early or self._late_reason(candidate, refused)
            report.see(candidate)
            if reason is not None:
                report.drop(candidate, reason)
                continue
            key = _key(candidate.question)
            category = candidate.category or NO_CATEGORY
            self._written.add(key)
            row = {"id": self._id(candidate, report), "question": candidate.question, "answer": candidate.answer,
                   "category": category, "solution": candidate.solution}  # fmt: skip
            held_out = int.from_bytes(key[:8]) < self._request.share * 2**64
            report.keep(category, held_out=outputs.write(row, held_out=held_out))

    def _reason(self, candidate: Candidate) -> str | None:
        reason = _reason_of_row(candidate, self._request)
        if reason is None and self._settled[_key(candidate.question)] is None:
            return "contradictory"
        return reason

    def _late_reason(self, candidate: Candidate, refused: set[str]) -> str | None:
        key = _key(candidate.question)
        if key in self._written:
            return "duplicate"
        if candidate.answer in refused:
            return "not_understood"
        if self._settled[key] != candidate.answer:
            return "duplicate"
        if self._tokenizer is None:
            return None
        if not self._tokenizer.can_write(candidate.question):
            return "tokenizer_cannot_write"
        most = self._request.max_prompt_tokens
        prompt = self._tokenizer.encode_prompt(candidate.question, None, "{question}")
        return "too_many_tokens" if most is not None and len(prompt) > most else None

    def _id(self, candidate: Candidate, report: PrepareReport) -> str:
        """Its own if no question before has it, else a hash of the question, as where `data.train.id_key` is null."""
        made = hashlib.sha256(candidate.question.encode()).hexdigest()[:16]
        chosen = candidate.id or made
        report.num_ids_made += candidate.id is None
        if _digest(chosen) in self._ids or len(chosen.encode()) > LONGEST_ID:
            chosen = made
            report.num_ids_replaced += 1
        self._ids.add(_digest(chosen))
        return chosen


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()
