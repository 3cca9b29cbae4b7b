"""Experience to and from other runs and tools: an exported folder, and what is made of other people's rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.experience.adding import add
from exgrpo_megatron.experience.answers import AnswerStore, SegmentFolder
from exgrpo_megatron.experience.files import (
    SUMMARY_FILE,
    Row,
    Summary,
    VocabularyName,
    answers_file,
    find_answers_files,
    write_answers,
    write_summary,
)
from exgrpo_megatron.experience.index import QuestionIndex
from exgrpo_megatron.experience.partition import shard_of
from exgrpo_megatron.experience_tools.readers import JsonlReader
from exgrpo_megatron.experience_tools.rows import JSONL_FILE, CheckedRow, RowCheck, is_jsonl, json_line, read_rows
from exgrpo_megatron.experience_tools.sources import Source
from exgrpo_megatron.experience_tools.sums import write_sums
from exgrpo_megatron.experience_tools.texts import Texts
from exgrpo_megatron.files import writable_folder

TextColumns = Mapping[str, Callable[[Row], str | None]]


@dataclass
class Written:
    """What an exported folder has."""

    folder: Path
    questions: int = 0
    answers: int = 0
    duplicates: int = 0
    """Rows left out because the question has an answer with the same token ids already."""
    unused: tuple[str, ...] = ()
    """Columns of the rows that mean nothing here."""

    def describe(self) -> str:
        """One line for people."""
        left_out = f"; {self.duplicates} duplicates left out" if self.duplicates else ""
        unused = f"; columns not used: {', '.join(self.unused)}" if self.unused else ""
        return f"{self.answers} answers of {self.questions} questions written to {self.folder}{left_out}{unused}"


def export_experience(
    source: Source, out: Path, to: str, texts: Texts, group_size: int | None, *, with_texts: bool
) -> Written:
    """Write the answers of a source as `parquet` or `jsonl` into a new folder; `with_texts`: those of question and
    answer in columns of their own. `texts` has the name of the vocabulary too.

    Raises:
        ConfigError: `out` exists, or nothing says the group size, or another one is said.
        CheckpointError, DataError: the answers cannot be read.
    """
    reader, columns, vocabulary = source.reader(), texts if with_texts else None, texts.vocabulary()
    if isinstance(reader, JsonlReader):
        check = RowCheck(group_size)
        return import_experience([reader.path], out, check, to=to, texts=columns, vocabulary=vocabulary)
    summary = source.summary()
    retired = summary.retired if summary else ()
    size = _group_size(source, reader.group_size, group_size)
    return write_folder(out, to, reader.rows(), size, columns, retired, vocabulary)


def import_experience(
    paths: Sequence[Path],
    out: Path,
    check: RowCheck,
    *,
    to: str = "parquet",
    texts: Texts | None = None,
    vocabulary: VocabularyName | None,
) -> Written:
    """Rows of Parquet or JSON-lines files, or of folders of them, checked one by one, as a folder that a run can begin
    with. Rows of a question need not stand together; they are collected on disk.

    Raises:
        ConfigError: `out` exists.
        DataError: a file cannot be read, or a row breaks a rule; names file and row.
    """
    check_free(out)
    with _gathered(out) as gathered:
        for path in _files(paths):
            for place, values in read_rows(path):
                gathered.add(check.checked(place, values))
        if not gathered.num_answers:
            raise DataError(f"{', '.join(map(str, paths))}: has no rows")
        assert check.group_size is not None
        written = write_folder(out, to, gathered.rows(check.group_size), check.group_size, texts, (), vocabulary)
    written.duplicates, written.unused = gathered.duplicates, tuple(sorted(check.unused))
    return written


def write_folder(
    out: Path,
    to: str,
    rows: Iterable[Row],
    group_size: int,
    texts: Texts | None,
    retired: Sequence[str],
    vocabulary: VocabularyName | None,
) -> Written:
    """Rows, those of a question together, as a folder of their own, which has its name when it is whole."""
    check_free(out)
    columns = _text_columns(texts)
    written = Written(out)
    with _beside(out) as folder:
        aside = folder / "whole"
        aside.mkdir()
        if to == "parquet":
            write_answers(aside / answers_file(0, 1), _counted(rows, written), group_size, columns)
        else:
            _write_lines(aside / JSONL_FILE, _counted(rows, written), group_size, columns)
        summary = Summary(group_size, written.questions, written.answers, tuple(retired), tokenizer=vocabulary)
        write_summary(aside / SUMMARY_FILE, summary)
        write_sums(aside)
        aside.rename(out)
    return written


def check_free(out: Path) -> None:
    """Raises ConfigError where `out` cannot be the name of a new folder."""
    try:
        taken = out.exists() or out.is_symlink()
    except OSError as error:
        raise ConfigError(f"--out {str(out)[:200]}: no name for a folder ({error.strerror})") from None
    if taken:
        raise ConfigError(f"--out {out}: exists; name another folder, or move it away")


class _Gathered:
    """Answers by question, in segments of a folder of their own; an index is in memory."""

    def __init__(self, folder: Path) -> None:
        self.store = AnswerStore(SegmentFolder(folder))
        self.duplicates = 0
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._buckets: list[int] = []
        self._serials = count()

    @property
    def num_answers(self) -> int:
        return self.store.num_answers

    def add(self, row: CheckedRow) -> None:
        number = self._rows.setdefault(row.question_id, len(self._rows))
        if number == len(self._names):
            self._names.append(row.question_id)
            self._buckets.append(row.bucket)
        self.duplicates += not add(self.store, number, row.question_id, next(self._serials), row.answer)
        if self.store.num_answers % 256 == 0:
            self.store.flush()

    def rows(self, group_size: int) -> Iterator[Row]:
        index = QuestionIndex(group_size)
        for number, name in enumerate(self._names):
            index.put(name, self._buckets[number], len(self.store.slots(number)))
        for name in sorted(self._names, key=shard_of):
            for place, answer in enumerate(self.store.get(self._rows[name])):
                yield Row(name, index.bucket(name), index.position(name), place, answer)


@contextmanager
def _gathered(out: Path) -> Iterator[_Gathered]:
    with _beside(out) as folder:
        gathered = _Gathered(folder)
        try:
            yield gathered
        finally:
            gathered.store.close()


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder for what is not whole yet, on the disk of `out`; deleted in the end."""
    parent = writable_folder(out.parent, "folder of --out")
    try:
        folder = tempfile.TemporaryDirectory(prefix=f".{out.name[:40]}.", dir=parent)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}); choose another") from error
    with folder as name:
        yield Path(name)


def common_vocabulary(paths: Sequence[Path]) -> VocabularyName | None:
    """What the files beside the paths say of their token ids; raises DataError where they contradict each other."""
    found = {path: summary.tokenizer for path in paths if (summary := Source(path).summary()) and summary.tokenizer}
    names = list(found.items())
    for path, name in names[1:]:
        if name.fingerprint != names[0][1].fingerprint:
            raise DataError(
                f"{path}: its token ids are of {name}, those of {names[0][0]} of {names[0][1]}; import them apart"
            )
    return names[0][1] if names else None


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        yield from [path] if path.is_file() or is_jsonl(path) else find_answers_files(path)


def _counted(rows: Iterable[Row], written: Written) -> Iterator[Row]:
    for row in rows:
        written.questions += row.answer_index == 0
        written.answers += 1
        yield row


def _text_columns(texts: Texts | None) -> TextColumns:
    if texts is None:
        return {}
    return {
        "question": lambda row: texts.questions.get(row.question_id),
        "text": lambda row: texts.of_answer(row.answer),
    }


def _write_lines(path: Path, rows: Iterable[Row], group_size: int, columns: TextColumns) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json_line(row, group_size, {name: text(row) for name, text in columns.items()}))


def _group_size(source: Source, recorded: int | None, given: int | None) -> int:
    config = source.config()
    known = recorded or (config.grpo.num_generations_per_prompt if config else None)
    if known is None and given is None:
        raise ConfigError(f"{source.path}: nothing says how many answers a group has; name it with --group-size")
    if known and given and known != given:
        raise ConfigError(f"--group-size {given}: {source.path} is of groups of {known}; leave it out")
    return known or given or 0
