"""Question files and their report, written beside their places and put there together."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.data.prepare_report import PrepareReport
from exgrpo_megatron.errors import ConfigError, UserError
from exgrpo_megatron.files import sha256_of, writable_folder

QuestionRow = Mapping[str, str | None]
"""Column name -> text."""

_GROUP_ROWS = 4096


def check_targets(out: Path, held_out: Path | None, report: Path) -> None:
    """Raise ConfigError where a target exists, cannot be written, is named twice or has an unknown ending."""
    named = {"--out": out, **({"--held-out": held_out} if held_out else {}), "--report": report}
    if len(set(named.values())) < len(named):
        raise ConfigError(
            f"{', '.join(f'{key} {path}' for key, path in named.items())}: name a file of its own for each"
        )
    for key, path in named.items():
        if path.exists():
            raise ConfigError(f"{key} {path}: there is something already; remove it, or choose another name")
        if key != "--report" and path.suffix.lower() not in (".jsonl", ".parquet"):
            raise ConfigError(f"{key} {path}: must end in .jsonl or .parquet")
    for key, path in named.items():
        writable_folder(path.parent, key)


class Outputs:
    """The files while they are written; leaving the block without `publish` removes all that was written."""

    def __init__(self, out: Path, held_out: Path | None, has_category: bool, has_solution: bool) -> None:
        columns = ["id", "question", "answer"]
        columns += ["category"] * has_category + ["solution"] * has_solution
        self._train = _QuestionFile(out, columns)
        try:
            self._held_out = _QuestionFile(held_out, columns) if held_out else None
        except UserError:
            self._train.discard()
            raise
        self._written: list[tuple[Path, Path]] = []

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files():
            file.discard()
        for aside, _ in self._written:
            aside.unlink(missing_ok=True)

    def write(self, row: QuestionRow, *, held_out: bool) -> bool:
        """Returns whether the row went to the held-out file."""
        if held_out and self._held_out is not None:
            self._held_out.write(row)
            return True
        self._train.write(row)
        return False

    def publish(self, report: PrepareReport) -> None:
        """Put all files in their places, with the report; UserError where that fails, and none is there then."""
        placed: list[Path] = []
        for file in self._files():
            file.close()
            report.sha256[str(file.path)] = file.sha256()
            self._written.append((file.aside, file.path))
        aside = _aside(report.path)
        self._written.append((aside, report.path))
        with _writing(report.path):
            aside.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        try:
            for source, target in self._written:
                os.replace(source, target)
                placed.append(target)
        except BaseException as error:
            for target in placed:
                target.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise UserError(f"the files cannot be put in their places: {error}; none of them is there") from error
            raise

    def _files(self) -> list[_QuestionFile]:
        return [self._train, *([self._held_out] if self._held_out else [])]


class _QuestionFile:
    """One file of question rows, all columns text."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path, self.aside = path, _aside(path)
        self._columns, self._rows = columns, list[QuestionRow]()
        self._schema = pa.schema([(name, pa.string()) for name in columns])
        with _writing(path):
            self._file = self.aside.open("wb")
            is_parquet = path.suffix.lower() == ".parquet"
            self._parquet = pq.ParquetWriter(self._file, self._schema, compression="zstd") if is_parquet else None

    def write(self, row: QuestionRow) -> None:
        self._rows.append({name: row[name] for name in self._columns})
        if len(self._rows) == _GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        with _writing(self.path):
            if self._parquet is not None:
                self._parquet.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def sha256(self) -> str:
        return sha256_of(self.aside)

    def discard(self) -> None:
        # What could not be written before cannot be written now; the file goes anyway.
        with contextlib.suppress(OSError, pa.ArrowException, ValueError):
            if self._parquet is not None:
                self._parquet.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self.aside.unlink(missing_ok=True)

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        with _writing(self.path):
            if self._parquet is not None:
                self._parquet.write_table(pa.Table.from_pylist(rows, schema=self._schema))
            else:
                self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".new")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; make room, then run again") from error
