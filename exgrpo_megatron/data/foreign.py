"""Rows of question sets as others publish them: columns of OpenR1-Math and NuminaMath, of verl (DAPO), and our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.data.foreign_kinds import REQUIRED, SolutionOf, SourceFormat
from exgrpo_megatron.data.rows import Row, number_text, read_rows
from exgrpo_megatron.errors import DataError


@dataclass(frozen=True)
class Candidate:
    """What a row says. A row that cannot be used at all has a `fault` instead of question and answer."""

    place: str
    question: str = ""
    answer: str = ""
    id: str | None = None
    category: str | None = None
    question_type: str | None = None
    """Such as `MCQ` or `proof`."""
    solution: str | None = None
    verified: bool | None = None
    """Whether the source says that the row is right; None where it has no such column."""
    instruction: str | None = None
    """What was cut from around the question."""
    had_system_prompt: bool = False
    fault: str | None = None
    """Name of the reason to leave the row out."""


NO_QUESTION = "no_question"
NO_ANSWER = "no_answer"
NOT_ONE_TURN = "not_one_turn"

INSTRUCTIONS: Sequence[tuple[str, str]] = (
    (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
        '\n\nRemember to put your answer on its own line after "Answer:".',
    ),
    ("", "Let's think step by step and output the final answer within \\boxed{}."),
    ("", 'Let\'s think step by step and output the final answer after "####".'),
    ("", "Please reason step by step, and put your final answer within \\boxed{}."),
    ("", "Please output the final answer within \\boxed{}."),
)
"""Texts before and after the question that are no part of it: DAPO-Math-17k's, verl's examples', Qwen2.5-Math's."""


def source_format(path: Path, named: SourceFormat | None) -> SourceFormat:
    """The format of a file by its columns, or the named one, which must have them.

    Raises:
        DataError: the file cannot be read, or its columns are of no format, or of several.
    """
    present = _columns(path)
    fitting = [kind for kind, wanted in REQUIRED.items() if set(wanted) <= present]
    shown = ", ".join(sorted(present))
    if named is not None:
        if named not in fitting:
            wanted = ", ".join(REQUIRED[named])
            raise DataError(f"{path}: --format {named} needs the columns {wanted}; there are {shown}")
        return named
    if len(fitting) != 1:
        known = "; ".join(f"{kind}: {', '.join(wanted)}" for kind, wanted in REQUIRED.items())
        found = f"the columns fit {' and '.join(fitting)}" if fitting else "the columns are of no known format"
        raise DataError(f"{path}: {found} ({known}); there are {shown}: name the format with --format")
    return fitting[0]


class ForeignFile:
    """The rows of one file, in order, as often as it is iterated over.

    `category` is a column, or a field of one (`extra_info.split`); None is the format's own, if the file has it.

    Raises:
        DataError: as `source_format`, or the file has no column with the category or the solutions that are asked for.
    """

    def __init__(
        self,
        path: Path,
        named: SourceFormat | None = None,
        solutions: SolutionOf = SolutionOf.none,
        category: str | None = None,
        *,
        keep_instructions: bool = False,
    ) -> None:
        self.path, self.kind = path, source_format(path, named)
        present = _columns(path)
        self._reader = _READERS[self.kind](keep_instructions)
        self.category = category or next((name for name in self._reader.categories if name in present), None)
        self._solution = self._reader.solutions.get(solutions)
        self._check(present, solutions)
        self._columns = list(
            dict.fromkeys(
                [
                    *REQUIRED[self.kind],
                    *(name for name in self._reader.optional if name in present),
                    *([self.category.partition(".")[0]] if self.category else []),
                    *([self._solution] if self._solution else []),
                ]
            )
        )

    def __iter__(self) -> Iterator[Candidate]:
        # Rows of JSONL may lack what the first one has: that is a fault of the row.
        columns = self._columns if _is_parquet(self.path) else []
        for row in read_rows(self.path, columns, _KEY):
            yield self._reader.read(row, self.category, self._solution)

    def _check(self, present: set[str], solutions: SolutionOf) -> None:
        shown = ", ".join(sorted(present))
        if self.category and self.category.partition(".")[0] not in present:
            raise DataError(f"{self.path}: --category {self.category}: no such column; there are {shown}")
        if solutions is not SolutionOf.none and self._solution not in present:
            where = f'the column "{self._solution}", which is not there' if self._solution else "no column"
            raise DataError(
                f"{self.path}: --solutions {solutions}: the format {self.kind} has them in {where}; there are {shown}"
            )


class _Reader:
    """How rows of one format are understood."""

    optional: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    """Columns that are the category where none is named; the first that is there."""
    solutions: Mapping[SolutionOf, str] = {}

    def __init__(self, keep_instructions: bool) -> None:
        self.keep_instructions = keep_instructions

    def read(self, row: Row, category: str | None, solution: str | None) -> Candidate:
        raise NotImplementedError


class _OpenR1(_Reader):
    optional = (
        "uuid", "question_type", "correctness_math_verify", "correctness_llama", "correctness_count",
        "problem_is_valid", "solution_is_valid",
    )  # fmt: skip
    categories = ("problem_type", "source")
    solutions: Mapping[SolutionOf, str] = {SolutionOf.written: "solution", SolutionOf.reasoning: "messages"}
    # NuminaMath, which OpenR1-Math is made of, writes these words where there is no answer.
    no_answer = ("proof", "notfound")

    def read(self, row: Row, category: str | None, solution: str | None) -> Candidate:
        values = row.values
        question, answer = _text(values.get("problem")), _text(values.get("answer"))
        return Candidate(
            row.place,
            question or "",
            answer or "",
            id=_text(values.get("uuid")),
            category=_text(_at(values, category)),
            question_type=_text(values.get("question_type")),
            solution=_solution(values.get(solution)) if solution else None,
            verified=_verified(values),
            fault=_fault(question, None if answer in self.no_answer else answer),
        )


class _Verl(_Reader):
    optional = ("extra_info",)
    categories = ("data_source",)
    # `solution`, which some of these files have, is the bare answer.
    solutions: Mapping[SolutionOf, str] = {SolutionOf.reasoning: "target"}

    def read(self, row: Row, category: str | None, solution: str | None) -> Candidate:
        values = row.values
        messages = _messages(values.get("prompt"))
        asked = [message for message in messages if message[0] != "system"]
        if len(asked) > 1 or (asked and asked[0][0] != "user"):
            return Candidate(row.place, fault=NOT_ONE_TURN)
        question = _text(asked[0][1]) if asked else None
        instruction = None
        if question and not self.keep_instructions:
            question, instruction = _without_instruction(question)
        answer = _ground_truth(values.get("reward_model"))
        return Candidate(
            row.place,
            question or "",
            answer or "",
            id=_text(_at(values, "extra_info.index")),
            category=_text(_at(values, category)),
            solution=_solution(values.get(solution)) if solution else None,
            instruction=instruction,
            had_system_prompt=len(messages) > len(asked),
            fault=_fault(question, answer),
        )


class _Questions(_Reader):
    optional = ("id",)
    categories = ("category",)
    solutions: Mapping[SolutionOf, str] = {SolutionOf.written: "solution"}

    def read(self, row: Row, category: str | None, solution: str | None) -> Candidate:
        values = row.values
        question, answer = _text(values.get("question")), _text(values.get("answer"))
        return Candidate(
            row.place,
            question or "",
            answer or "",
            id=_text(values.get("id")),
            category=_text(_at(values, category)),
            solution=_solution(values.get(solution)) if solution else None,
            fault=_fault(question, answer),
        )


_READERS: Mapping[SourceFormat, type[_Reader]] = {
    SourceFormat.openr1: _OpenR1,
    SourceFormat.verl: _Verl,
    SourceFormat.questions: _Questions,
}

_KEY = "FILE"
"""What messages of `read_rows` call the path."""


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet" and path.is_file()


def _columns(path: Path) -> set[str]:
    """Of the schema of Parquet, of the first row of JSONL; DataError where there is none."""
    if _is_parquet(path):
        try:
            return set(pq.read_schema(path).names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}; check or rewrite the file") from error
    rows = read_rows(path, [], _KEY)
    return set(next(rows).values)


def _text(value: Any) -> str | None:
    """A text or number as text, stripped; None where it is empty, half a character, or anything else."""
    text = value.strip() if isinstance(value, str) else number_text(value)
    try:
        return text if text and text.encode() else None
    except UnicodeEncodeError:
        return None


def _fault(question: str | None, answer: str | None) -> str | None:
    if not question:
        return NO_QUESTION
    return None if answer else NO_ANSWER


def _at(values: Mapping[str, Any], name: str | None) -> Any:
    """A column, or the field of one."""
    found: Any = values
    for part in name.split(".") if name else ():
        found = found.get(part) if isinstance(found, dict) else None
    return found if name else None


def _messages(value: Any) -> list[tuple[str, Any]]:
    """Role and content of each message of a chat; a plain text is the user's only one."""
    if isinstance(value, str):
        return [("user", value)]
    messages = value if isinstance(value, list) else []
    return [(str(message.get("role")), message.get("content")) for message in messages if isinstance(message, dict)]


def _solution(value: Any) -> str | None:
    if isinstance(value, str):
        return _text(value)
    return next((_text(content) for role, content in _messages(value) if role == "assistant"), None)


def _ground_truth(reward_model: Any) -> str | None:
    found = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return _text(found)


def _verified(values: Mapping[str, Any]) -> bool | None:
    """Whether a generation was found right, and where the source says so, whether problem and solution are valid."""
    valid = [values[name] == "Yes" for name in ("problem_is_valid", "solution_is_valid") if name in values]
    flags = [values[name] for name in ("correctness_math_verify", "correctness_llama") if values.get(name) is not None]
    if flags:
        valid.append(any(any(flag) for flag in flags if isinstance(flag, list)))
    elif isinstance(count := values.get("correctness_count"), int | float):
        valid.append(count > 0)
    return all(valid) if valid else None


def _without_instruction(question: str) -> tuple[str, str | None]:
    for before, after in INSTRUCTIONS:
        if question.startswith(before) and question.endswith(after):
            bare = question[len(before) : len(question) - len(after)].strip()
            return bare, before.strip() or after.strip()
    return question, None
