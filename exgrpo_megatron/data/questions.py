"""Question sets: read from a file or generated, checked, rendered as prompts, and filtered by length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from exgrpo_megatron.config import DataConfig, DataSourceConfig
from exgrpo_megatron.data.embedded_tasks import TaskQuestion, task_of
from exgrpo_megatron.data.pass_rates import BANDS, Band, read_pass_rates
from exgrpo_megatron.data.rows import Row
from exgrpo_megatron.data.sources import source_rows
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.files import sha256_of
from exgrpo_megatron.types import Question

LONGEST_ID = 2**16 - 1
"""Bytes of a question's id, which stored answers count in 16 bits."""


@dataclass(frozen=True)
class QuestionSet:
    """The usable questions of one source, and what was left out."""

    questions: tuple[Question, ...]
    fingerprint: str
    """Hash over ids, prompts' token ids and answers, in order: equal for equal training data only."""
    source: str
    """File, function or generator."""
    dropped_too_long: tuple[str, ...]
    """Ids of questions whose prompt is longer than data.max_input_seq_length."""
    dropped_unwritable: tuple[str, ...]
    """Ids of questions with characters the vocabulary lacks, or with the name of a special token."""
    num_duplicates: int
    """Rows dropped because question and answer had been there before."""
    dropped_by_pass_rate: tuple[str, ...] = ()
    """Ids of questions whose measured pass rate is not in the recipe's band."""

    def describe(self) -> str:
        """One line for people."""
        lengths = [len(question.prompt_ids) for question in self.questions]
        left_out = [
            _counted(self.dropped_too_long, "too long"),
            _counted(self.dropped_unwritable, "the tokenizer cannot write"),
            f"{self.num_duplicates} duplicates" if self.num_duplicates else "",
            _counted(self.dropped_by_pass_rate, "of another pass rate"),
        ]
        return (
            f"{len(self.questions)} from {self.source}, prompts of {min(lengths)} to {max(lengths)} tokens; "
            f"left out: {', '.join(filter(None, left_out)) or 'none'}; fingerprint {self.fingerprint}"
        )

    def record(self) -> dict[str, object]:
        """What a checkpoint and a model card say of the questions (the recipe has the path); reads a file once for its
        SHA-256."""
        path = Path(self.source)
        return {
            "source": path.name,
            "sha256": sha256_of(path) if path.is_file() else None,
            "questions": len(self.questions),
            "left_out": sum(map(len, (self.dropped_too_long, self.dropped_unwritable, self.dropped_by_pass_rate)))
            + self.num_duplicates,
            "fingerprint": self.fingerprint,
        }


NO_QUESTIONS = QuestionSet((), "", "", (), (), 0)
"""Of a command that reads none."""


def _counted(ids: tuple[str, ...], what: str) -> str:
    return f"{len(ids)} {what} ({first_ids(ids)})" if ids else ""


def first_ids(ids: Sequence[str], most: int = 3) -> str:
    """The first few ids, for a message."""
    return ", ".join(ids[:most]) + (", ..." if len(ids) > most else "")


def load_questions(
    source: DataSourceConfig,
    data: DataConfig,
    tokenizer: PromptTokenizer,
    *,
    held_out: bool,
    on_row: Callable[[], None] = lambda: None,
) -> QuestionSet:
    """The questions of `data.train` (`held_out` False) or `data.validation` (True).

    `held_out` also chooses the side of a generator, whose two sides share no question. `on_row` is called a row.

    Raises:
        DataError: at the first row that cannot be used, or where no question is left.
        ConfigError: the tokenizer cannot write the system prompt or the prompt template, or there is no such function.
    """
    check_prompt_texts(data, tokenizer)
    key = "data.validation" if held_out else "data.train"
    collected = CollectedQuestions(data, tokenizer, _pass_rate_filter(source, key))
    for entry in _entries(source, key, held_out):
        on_row()
        collected.add(entry)
        if len(collected.questions) == source.max_questions:
            break
    return collected.finish(key, source.described)


def questions_as_written(source: DataSourceConfig) -> Iterator[Question]:
    """Every row of `data.train`, usable or not, without a tokenizer: the prompts are empty.

    Raises:
        DataError: the file is missing, or at the first row that cannot be read.
        ConfigError: there is no such function.
    """
    no_prompt = np.zeros(0, dtype=np.int32)
    for entry in _entries(source, "data.train", held_out=False):
        yield Question(entry.id, no_prompt, entry.answer, entry.text, entry.category)


def check_disjoint(train: QuestionSet, validation: QuestionSet) -> int:
    """Number of validation questions whose text is also a training question's."""
    texts = {question.text for question in train.questions}
    return sum(question.text in texts for question in validation.questions)


def check_prompt_texts(data: DataConfig, tokenizer: PromptTokenizer) -> None:
    """Raise ConfigError where the text around every question would lose characters in tokenisation."""
    around = {
        "data.system_prompt": data.system_prompt or "",
        "data.prompt_template": data.prompt_template.replace("{question}", ""),
    }
    for key, text in around.items():
        if not tokenizer.can_write(text, special_tokens=True):
            raise ConfigError(f"{key} = {text!r} has characters that the tokenizer of {tokenizer.folder} cannot write")


@dataclass(frozen=True)
class Entry:
    """A question before it is rendered."""

    id: str
    text: str
    answer: str
    category: str | None
    place: str


@dataclass
class CollectedQuestions:
    """The questions so far."""

    data: DataConfig
    tokenizer: PromptTokenizer
    has_pass_rate: Callable[[str], bool]
    """Whether a question is to be used, by its measured pass rate."""
    questions: list[Question] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    unwritable: list[str] = field(default_factory=list)
    of_another_rate: list[str] = field(default_factory=list)
    num_duplicates: int = 0
    by_id: dict[str, Entry] = field(default_factory=dict)
    by_text: dict[str, Entry] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        if self._is_duplicate(entry):
            self.num_duplicates += 1
            return
        self.by_id[entry.id] = self.by_text[entry.text] = entry
        if not self.tokenizer.can_write(entry.text):
            self.unwritable.append(entry.id)
            return
        prompt_ids = self.tokenizer.encode_prompt(entry.text, self.data.system_prompt, self.data.prompt_template)
        if len(prompt_ids) > self.data.max_input_seq_length:
            self.too_long.append(entry.id)
            return
        if not self.has_pass_rate(entry.id):
            self.of_another_rate.append(entry.id)
            return
        self.questions.append(Question(entry.id, prompt_ids, entry.answer, entry.text, entry.category))

    def finish(self, key: str, source: str) -> QuestionSet:
        if not self.questions:
            by_rate = (
                f", and {len(self.of_another_rate)} are outside of {key}.pass_rate_band or pass_rate_range (measure "
                "with more answers, or widen it)"
            )
            raise DataError(
                f"{key}: no question of {source} is left of {len(self.by_id)}: {len(self.too_long)} prompts are longer "
                f"than data.max_input_seq_length = {self.data.max_input_seq_length} tokens (raise it), and "
                f"{len(self.unwritable)} questions have characters that the tokenizer of {self.tokenizer.folder} "
                f"cannot write (use another model or other questions){by_rate if self.of_another_rate else ''}"
            )
        return QuestionSet(
            questions=tuple(self.questions),
            fingerprint=_fingerprint(self.questions),
            source=source,
            dropped_too_long=tuple(self.too_long),
            dropped_unwritable=tuple(self.unwritable),
            num_duplicates=self.num_duplicates,
            dropped_by_pass_rate=tuple(self.of_another_rate),
        )

    def _is_duplicate(self, entry: Entry) -> bool:
        """True where the same question and answer are there; DataError where they contradict each other."""
        same_text, same_id = self.by_text.get(entry.text), self.by_id.get(entry.id)
        if same_text is not None and same_text.answer != entry.answer:
            raise DataError(
                f"{entry.place}: the same question as in {same_text.place} has another answer ({entry.answer!r}, not "
                f"{same_text.answer!r}); correct or remove one of them"
            )
        if same_id is not None and same_id.text != entry.text:
            raise DataError(
                f"{entry.place}: the id {entry.id!r} is that of another question in {same_id.place}; ids must be "
                f"unique (id_key null takes a hash of the question)"
            )
        return same_text is not None


def _pass_rate_filter(source: DataSourceConfig, key: str) -> Callable[[str], bool]:
    """Tells whether a question's measured pass rate is what the recipe asks for; DataError for one without a rate."""
    if source.pass_rates_path is None:
        return lambda _: True
    rates = read_pass_rates(source.pass_rates_path, f"{key}.pass_rates_path")
    band = BANDS[source.pass_rate_band] if source.pass_rate_band else Band(*source.pass_rate_range or (0.0, 1.0))

    def has(question_id: str) -> bool:
        if question_id not in rates:
            raise DataError(
                f"{key}.pass_rates_path = {source.pass_rates_path!r} has no pass rate of question {question_id!r}; "
                f"measure these questions with `exgrpo eval RECIPE --questions {key.removeprefix('data.')}`"
            )
        return rates[question_id] in band

    return has


def _entries(source: DataSourceConfig, key: str, held_out: bool) -> Iterator[Entry]:
    if not source.has_rows:
        for made in _generated(source, key, held_out):
            yield Entry(made.text, made.text, made.answer, made.category, f"generated question {made.text}")
        return
    optional = [column for column in (source.id_key, source.category_key) if column is not None]
    for row in source_rows(source, [source.question_key, source.answer_key, *optional], key):
        yield entry_of_row(row, source)


def _generated(source: DataSourceConfig, key: str, held_out: bool) -> list[TaskQuestion]:
    try:
        return task_of(source).questions(source, held_out)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def entry_of_row(row: Row, source: DataSourceConfig) -> Entry:
    text = row.text(source.question_key)
    category = None if source.category_key is None else row.text_or_number(source.category_key)
    given_id = None if source.id_key is None else row.text_or_number(source.id_key)
    if given_id is not None:
        _check_id(given_id, row.place)
    return Entry(
        given_id or hashlib.sha256(text.encode()).hexdigest()[:16], text, _gold_answer(row, source), category, row.place
    )


def _check_id(question_id: str, place: str) -> None:
    size = len(question_id.encode())
    if size > LONGEST_ID:
        raise DataError(f"{place}: the id {question_id[:40]!r}... has {size} bytes, more than {LONGEST_ID}; shorten it")


def _gold_answer(row: Row, source: DataSourceConfig) -> str:
    whole = row.text_or_number(source.answer_key)
    if source.answer_marker is None:
        return whole
    _, marker, answer = whole.rpartition(source.answer_marker)
    if not marker:
        raise DataError(
            f'{row.place}: answer_marker {source.answer_marker!r} does not occur in "{source.answer_key}"; correct the '
            f"row, or answer_marker in the recipe"
        )
    if not answer.strip():
        raise DataError(f'{row.place}: nothing follows {source.answer_marker!r} in "{source.answer_key}"; fill it in')
    return answer.strip()


def _fingerprint(questions: list[Question]) -> str:
    digest = hashlib.sha256()
    for question in questions:
        parts = (question.id.encode(), question.prompt_ids.astype("<i4").tobytes(), question.answer.encode())
        # Lengths keep apart what would be one string when joined.
        digest.update(np.asarray([len(part) for part in parts], dtype="<i8").tobytes())
        for part in parts:
            digest.update(part)
    return digest.hexdigest()[:32]
