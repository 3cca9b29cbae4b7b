"""Saving, loading, merging, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.types import Group, Question, Trajectory

K = 4
ANSWERS = "answers-00000-of-00001.parquet"
Table = dict[str, list[Any]]


def empty(group_size: int = K) -> ExperienceBuffer:
    return ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), group_size, SingleProcess())


def group(rng: np.random.Generator, name: str) -> Group:
    members = tuple(
        Trajectory(
            token_ids=rng.integers(0, 1000, int(rng.integers(1, 9))).astype(np.int32),
            logprobs=np.empty(0, dtype=np.float32),
            reward=float(rng.random() < 0.6),
            replayed=False,
            stop_reason="stop",
            policy_version=int(rng.integers(5)),
        )
        for _ in range(K)
    )
    members = tuple(
        Trajectory(
            m.token_ids, -rng.random(len(m.token_ids)).astype(np.float32), m.reward, False, "stop", m.policy_version
        )
        for m in members
    )
    return Group(Question(name, np.array([1], dtype=np.int32), "42"), members)


def play(target: ExperienceBuffer, seed: int, steps: int) -> list[list[str]]:
    """Random steps; the draws made on the way."""
    rng = np.random.default_rng(seed)
    draws = []
    for step in range(steps):
        target.record([group(rng, f"q{rng.integers(60)}") for _ in range(8)], step=step, collect=True)
        draws.append(target.draw(6, rng, exclude={f"q{step}"}))
    return draws


def contents(target: ExperienceBuffer) -> Any:
    names = sorted(set(target.draw(10**6, np.random.default_rng(0))))
    answers = [
        (name, a.token_ids.tolist(), a.logprobs.tobytes(), a.policy_version, a.step)
        for name in names
        for a in target.answers(name)
    ]
    return answers, target.bucket_sizes(), target.retired, target.num_questions, target.num_answers


@pytest.fixture
def played() -> ExperienceBuffer:
    target = empty()
    play(target, seed=0, steps=30)
    assert target.num_questions > 20
    assert target.retired
    return target


def test_a_loaded_buffer_has_the_same_contents_and_makes_the_same_further_draws(
    played: ExperienceBuffer, tmp_path: Path
):
    played.save(tmp_path / "new" / "folder")
    loaded = empty()
    loaded.load(tmp_path / "new" / "folder")
    assert contents(loaded) == contents(played)
    assert play(loaded, seed=1, steps=30) == play(played, seed=1, steps=30)
    assert contents(loaded) == contents(played)


def test_saving_what_was_loaded_gives_the_same_rows(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path / "a")
    loaded = empty()
    loaded.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    first, second = (pq.read_table(tmp_path / name / ANSWERS) for name in "ab")
    assert first.equals(second)
    assert (tmp_path / "a" / "experience.json").read_text() == (tmp_path / "b" / "experience.json").read_text()


def test_an_empty_buffer_can_be_saved_and_loaded(tmp_path: Path):
    empty().save(tmp_path)
    loaded = empty()
    play(loaded, seed=0, steps=3)
    loaded.load(tmp_path)
    assert contents(loaded) == contents(empty())


def test_more_rows_than_one_batch_survive(tmp_path: Path):
    rng = np.random.default_rng(0)
    target = empty()
    target.record([group(rng, f"q{i}") for i in range(3000)], step=0, collect=True)
    assert target.num_answers > 4096
    target.save(tmp_path)
    loaded = empty()
    loaded.load(tmp_path)
    assert contents(loaded) == contents(target)


def table(path: Path) -> tuple[Table, Any]:
    read = pq.read_table(path)
    return read.to_pydict(), read.schema


def drop_logprob(t: Table) -> None:
    t["logprobs"][2] = t["logprobs"][2][:-1]


def poison_logprob(t: Table) -> None:
    t["logprobs"][2] = [float("nan"), *t["logprobs"][2][1:]]


def bad_bucket(t: Table) -> None:
    t["bucket"][2] = K


def mixed_bucket(t: Table) -> None:
    row = next(i for i in range(3, len(t["bucket"])) if t["question_id"][i] == t["question_id"][i - 1])
    t["bucket"][row] = 1 + t["bucket"][row] % (K - 1)


def skipped_index(t: Table) -> None:
    t["answer_index"][2] += 1


def scattered(t: Table) -> None:
    for column in t.values():
        column.append(column[2])


def empty_answer(t: Table) -> None:
    t["token_ids"][2] = []
    t["logprobs"][2] = []


def repeated_answer(t: Table) -> None:
    last = len(t["bucket"]) - 1
    for column in t.values():
        column.append(column[last])
    t["answer_index"][-1] += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_logprob, r"row 2, question '.*': the answer cannot be replayed: it has \d+ log-probs for \d+ tokens"),
        (poison_logprob, r"row 2, .*: the answer cannot be replayed: log-prob 0 of \d+ is nan"),
        (bad_bucket, r"row 2, .*: bucket 4 is not in 1\.\.3"),
        (mixed_bucket, r"row \d+, .*: bucket is \d here and \d in the row before"),
        (skipped_index, r"row 2, .*: answer_index is \d+ where \d+ is due"),
        (scattered, r"row \d+, .*: the rows of the question do not stand together"),
        (empty_answer, r"row 2, .*: the answer cannot be replayed: it has no tokens"),
        (repeated_answer, r"row \d+, .*: the same token ids are stored for the question already"),
    ],
)
def test_a_wrong_row_is_named_with_its_file_and_nothing_is_changed(
    damage: Callable[[Table], None], message: str, played: ExperienceBuffer, tmp_path: Path
):
    played.save(tmp_path)
    path = tmp_path / ANSWERS
    rows, schema = table(path)
    damage(rows)
    pq.write_table(pa.table(rows, schema=schema), path)
    before = contents(played)
    for action in (lambda: played.load(tmp_path), lambda: played.merge_file(path)):
        with pytest.raises(CheckpointError, match=message) as caught:
            action()
        assert str(path) in str(caught.value)
        assert contents(played) == before


def test_an_empty_cell_is_named_with_its_row(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    path = tmp_path / ANSWERS
    for name, value, message in (
        ("bucket", None, "row 3: `bucket` is empty"),
        ("token_ids", [1, None], "row 3: `token_ids` has an empty element"),
    ):
        rows, schema = table(path)
        rows[name][3] = value
        nullable = pa.schema([pa.field(f.name, f.type) for f in schema], schema.metadata)
        pq.write_table(pa.table(rows, schema=nullable), tmp_path / "edited.parquet")
        with pytest.raises(CheckpointError, match=message):
            empty().merge_file(tmp_path / "edited.parquet")


def test_a_missing_column_is_named(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    path = tmp_path / ANSWERS
    pq.write_table(pq.read_table(path).drop_columns(["logprobs"]), path)
    with pytest.raises(CheckpointError, match="column `logprobs` is missing"):
        empty().load(tmp_path)


def test_a_truncated_file_is_refused(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    path = tmp_path / ANSWERS
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"answers-00000-of-00001\.parquet: cannot be read"):
        empty().load(tmp_path)


def test_a_flipped_byte_in_the_data_is_refused(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    path = tmp_path / ANSWERS
    column = pq.ParquetFile(path).metadata.row_group(0).column(4)
    whole = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    whole[start + column.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(bytes(whole))
    with pytest.raises(CheckpointError, match=r"answers-00000-of-00001\.parquet: cannot be read"):
        empty().load(tmp_path)


@pytest.mark.parametrize("name", [ANSWERS, "experience.json"])
def test_a_missing_file_is_named(name: str, played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        empty().load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 4, "not an experience summary of format 1, 2 or 3"),
        ("num_answers", -1, "`num_answers` must be a whole number, found -1"),
        ("num_questions", "many", "`num_questions` must be a whole number, found 'many'"),
        ("num_questions", 1, r"hold \d+ questions and \d+ answers, but experience\.json says 1 and"),
        ("retired", [1], "`retired` must be a list of question ids"),
    ],
)
def test_a_wrong_summary_is_refused(key: str, value: Any, message: str, played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    path = tmp_path / "experience.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=message):
        empty().load(tmp_path)


def test_a_summary_that_is_not_json_is_refused(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    (tmp_path / "experience.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        empty().load(tmp_path)


def test_answers_of_a_retired_question_are_refused(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    rows, _ = table(tmp_path / ANSWERS)
    path = tmp_path / "experience.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "retired": [*summary["retired"], rows["question_id"][0]]}))
    with pytest.raises(CheckpointError, match=r"question 'q\d+' has answers, but is retired"):
        empty().load(tmp_path)


def test_another_group_size_is_refused_with_both_numbers(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"written for groups of 4, but grpo\.num_generations_per_prompt = 8"):
        empty(8).load(tmp_path)


def test_a_buffer_can_begin_with_the_experience_of_another_run(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    for path in (tmp_path, tmp_path / ANSWERS):
        fresh = empty()
        report = fresh.merge_file(path)
        assert (report.questions, report.answers) == (played.num_questions, played.num_answers)
        assert (report.duplicates, report.retired, fresh.retired) == (0, 0, frozenset())
        assert fresh.bucket_sizes() == played.bucket_sizes()
        # Their age counts from the beginning of this run.
        assert {answer.step for _, answers in fresh.own_answers() for answer in answers} == {0}


def test_merging_keeps_what_is_here_and_counts_what_is_left_out(played: ExperienceBuffer, tmp_path: Path):
    played.save(tmp_path)
    before = contents(played)
    again = played.merge_file(tmp_path)
    assert (again.questions, again.answers, again.duplicates) == (0, 0, played.num_answers)
    assert contents(played) == before

    other = empty()
    play(other, seed=0, steps=60)
    rows, _ = table(tmp_path / ANSWERS)
    here = other.retired & set(rows["question_id"])
    assert here
    report = other.merge_file(tmp_path)
    assert report.retired == sum(name in here for name in rows["question_id"])
    assert not any(other.answers(name) for name in here)


def test_merging_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such experience file"):
        empty().merge_file(tmp_path / "none.parquet")


def test_a_snapshot_is_of_its_moment_and_names_what_it_wrote(played: ExperienceBuffer, tmp_path: Path):
    before, snapshot = contents(played), played.snapshot()
    play(played, seed=2, steps=20)
    assert contents(played) != before
    names = ["segments/00000-000000.seg", "index-00000-of-00001.parquet", "experience.json", "questions.parquet"]
    assert snapshot.save(tmp_path) == [tmp_path / name for name in names]
    loaded = empty()
    loaded.load(tmp_path)
    assert contents(loaded) == before
