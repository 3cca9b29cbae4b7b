"""Experience spread over ranks is the experience of one process: contents, draws, reports, files, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ranks import ThreadRank, on_ranks

from exgrpo_megatron.comm import Communicator, SingleProcess, gather_everyone, gather_parts, together
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.partition import owner_of, shard_of
from exgrpo_megatron.types import Group, Question, StoredAnswer, Trajectory

K = 4
LAYOUTS = [(2, 1), (3, 2), (5, 1), (1, 3)]
"""(data-parallel ranks, processes of each)."""


def buffer_of(comm: Communicator) -> ExperienceBuffer:
    return ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), K, comm)


def random_group(rng: np.random.Generator) -> Group:
    """Short answers over few tokens, so that many are stored already; some cannot be stored."""
    members = []
    for i in range(K):
        ids = rng.integers(0, 3, int(rng.integers(1, 5))).astype(np.int32)
        logprobs = -rng.random(len(ids) + (rng.random() < 0.05)).astype(np.float32)
        replayed = i == K - 1 and rng.random() < 0.3
        members.append(Trajectory(ids, logprobs, float(rng.random() < 0.6), replayed, "stop", int(rng.integers(5))))
    return Group(Question(f"q{rng.integers(60)}", np.array([1], np.int32), "42"), tuple(members))


def play(buffer: ExperienceBuffer, seed: int, steps: int = 25) -> list[Any]:
    """Random steps; reports, and draws with their answers."""
    rng, seen = np.random.default_rng(seed), []
    for step in range(steps):
        groups = [random_group(rng) for _ in range(8)]
        seen.append(buffer.record(groups, step=step, collect=bool(rng.random() < 0.8)))
        drawn = buffer.draw(6, rng, exclude={f"q{step}"})
        chosen = [(name, int(rng.integers(buffer.count(name)))) for name in drawn]
        seen.append((drawn, [plain(answer) for answer in buffer.fetch(chosen)]))
        seen.append([[ids.tolist() for ids in listed] for listed in buffer.token_ids(drawn)])
        seen.append((buffer.bucket_sizes(), buffer.num_questions, buffer.num_answers, buffer.extent()))
    return seen


def plain(answer: StoredAnswer) -> Any:
    return answer.token_ids.tolist(), answer.logprobs.tobytes(), answer.policy_version, answer.step


def replicated(buffer: ExperienceBuffer) -> Any:
    """What every process must hold alike, order included."""
    order = list(buffer.questions())
    return order, [buffer.count(name) for name, _ in order], sorted(buffer.retired)


def kept(buffer: ExperienceBuffer) -> dict[str, list[Any]]:
    return {name: [plain(answer) for answer in answers] for name, answers in buffer.own_answers()}


def union(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)), "a question's answers are on two processes"
    return {name: answers for part in parts for name, answers in part.items()}


@pytest.fixture(scope="module")
def alone() -> tuple[ExperienceBuffer, list[Any]]:
    buffer = buffer_of(SingleProcess())
    seen = play(buffer, seed=0)
    assert buffer.retired
    assert buffer.num_questions > 20
    return buffer, seen


@pytest.mark.parametrize(("size", "members"), LAYOUTS)
def test_every_number_of_ranks_does_what_one_does(size: int, members: int, alone: Any):
    def work(comm: ThreadRank) -> Any:
        buffer = buffer_of(comm)
        return play(buffer, seed=0), replicated(buffer), kept(buffer)

    buffer, seen = alone
    results = on_ranks(size, members, work)
    assert all(result[0] == seen for result in results)
    assert all(result[1] == replicated(buffer) for result in results)
    assert union([part for _, _, part in results]) == kept(buffer)
    for process, (_, _, part) in enumerate(results):
        rank, member = divmod(process, members)
        assert all(member == 0 and owner_of(shard_of(name), size) == rank for name in part)
    assert size == 1 or sum(bool(part) for _, _, part in results) == size


@pytest.mark.parametrize(("before", "after"), [((1, 1), (3, 2)), ((2, 1), (5, 1)), ((3, 2), (1, 1)), ((2, 2), (2, 1))])
def test_what_some_ranks_saved_others_go_on_from(before: Any, after: Any, alone: Any, tmp_path: Path):
    def save(comm: ThreadRank) -> None:
        buffer = buffer_of(comm)
        play(buffer, seed=0)
        buffer.save(tmp_path / "experience")

    def load(comm: ThreadRank) -> Any:
        buffer = buffer_of(comm)
        buffer.load(tmp_path / "experience")
        begun = replicated(buffer), kept(buffer)
        return begun, play(buffer, seed=1), replicated(buffer), kept(buffer)

    on_ranks(*before, save)
    names = sorted(path.name for path in (tmp_path / "experience").glob("*.parquet"))
    assert names == [f"answers-{rank:05d}-of-{before[0]:05d}.parquet" for rank in range(before[0])]
    results = on_ranks(*after, load)
    alone_again = buffer_of(SingleProcess())
    play(alone_again, seed=0)
    assert all(index == replicated(alone_again) for (index, _), *_ in results)
    assert union([part for (_, part), *_ in results]) == kept(alone_again)
    seen = play(alone_again, seed=1)
    assert all(result[1] == seen for result in results)
    assert all(result[2] == replicated(alone_again) for result in results)
    assert union([result[3] for result in results]) == kept(alone_again)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_single_file_of_the_first_format_still_loads(as_file: bool, alone: Any, tmp_path: Path):
    """Its rows stood bucket by bucket in the order of the lists, without a position."""
    buffer, _ = alone
    write_first_format(buffer, tmp_path)

    def work(comm: ThreadRank) -> Any:
        loaded = buffer_of(comm)
        if as_file:
            report = loaded.merge_file(tmp_path / "experience.parquet")
            assert (report.questions, report.answers) == (buffer.num_questions, buffer.num_answers)
        else:
            loaded.load(tmp_path)
        return list(loaded.questions()), kept(loaded)

    results = on_ranks(2, 1, work)
    assert all(order == list(buffer.questions()) for order, _ in results)
    assert {name: len(answers) for name, answers in union([part for _, part in results]).items()} == {
        name: len(answers) for name, answers in kept(buffer).items()
    }


def write_first_format(buffer: ExperienceBuffer, folder: Path) -> None:
    rows = [
        {
            "question_id": name, "bucket": bucket, "answer_index": index, "token_ids": answer.token_ids,
            "logprobs": answer.logprobs, "policy_version": answer.policy_version, "step": answer.step,
        }
        for name, bucket in buffer.questions()
        for index, answer in enumerate(buffer.answers(name))
    ]  # fmt: skip
    types = [pa.string(), pa.int32(), pa.int32(), pa.list_(pa.int32()), pa.list_(pa.float32()), pa.int64(), pa.int64()]
    schema = pa.schema(list(zip(rows[0], types, strict=True)), {"exgrpo.group_size": str(K)})
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "experience.parquet")
    summary = {"format": 1, "group_size": K, "num_questions": buffer.num_questions, "num_answers": buffer.num_answers}
    (folder / "experience.json").write_text(json.dumps({**summary, "retired": sorted(buffer.retired)}))


def test_merging_on_several_ranks_is_merging_on_one(alone: Any, tmp_path: Path):
    buffer, _ = alone
    buffer.save(tmp_path)

    def merge(comm: Communicator) -> Any:
        other = buffer_of(comm)
        play(other, seed=3, steps=4)
        report = other.merge_file(tmp_path)
        forgotten = other.keep_only({f"q{i}" for i in range(40)})
        return report, forgotten, replicated(other), kept(other)

    expected = merge(SingleProcess())
    report = expected[0]
    assert min(report.questions, report.answers, report.duplicates, report.retired, expected[1]) > 0
    results = on_ranks(3, 2, merge)
    assert all(result[:3] == expected[:3] for result in results)
    assert union([result[3] for result in results]) == expected[3]


def test_a_bad_answer_is_refused_on_every_process_and_changes_nothing(alone: Any, tmp_path: Path):
    """Only its owner reads the answer; all must stop."""
    on_ranks(2, 1, lambda comm: saved_by(comm, tmp_path))
    path = tmp_path / "answers-00001-of-00002.parquet"
    table = pq.read_table(path)
    rows = table.to_pydict()
    rows["logprobs"][2] = [float("nan")] * len(rows["token_ids"][2])
    pq.write_table(pa.table(rows, schema=table.schema), path)

    def work(comm: ThreadRank) -> str:
        buffer = buffer_of(comm)
        play(buffer, seed=5, steps=3)
        before = replicated(buffer), kept(buffer)
        messages = []
        for read in (buffer.load, buffer.merge_file):
            with pytest.raises(CheckpointError) as caught:
                read(tmp_path)
            messages.append(str(caught.value))
        assert (replicated(buffer), kept(buffer)) == before
        assert messages[0] == messages[1]
        return messages[0]

    messages = on_ranks(3, 2, work)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{path}: row 2, question ")
    assert "log-prob 0 of" in messages[0]


def saved_by(comm: Communicator, folder: Path) -> ExperienceBuffer:
    buffer = buffer_of(comm)
    play(buffer, seed=0)
    buffer.save(folder)
    return buffer


def test_files_that_do_not_belong_together_are_refused_by_name(alone: Any, tmp_path: Path):
    on_ranks(3, 1, lambda comm: saved_by(comm, tmp_path))
    buffer = buffer_of(SingleProcess())
    part = tmp_path / "answers-00001-of-00003.parquet"
    with pytest.raises(CheckpointError, match=r"answers-00001-of-00003\.parquet: one of 3 files .* name their folder"):
        buffer.merge_file(part)
    content = part.read_bytes()
    part.unlink()
    with pytest.raises(CheckpointError, match=r"answers-00001-of-00003\.parquet is missing"):
        buffer.load(tmp_path)
    part.write_bytes((tmp_path / "answers-00002-of-00003.parquet").read_bytes())
    with pytest.raises(CheckpointError, match=r"answers-00002-of-00003\.parquet: row 0, .* do not stand together"):
        buffer.load(tmp_path)
    part.write_bytes(content)
    (tmp_path / "answers-00000-of-00001.parquet").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"answers-00000-of-00001\.parquet belongs to another save"):
        buffer.load(tmp_path)


@pytest.mark.parametrize(
    ("position", "message"),
    [(10**6, r"position is \d+ where \d+ is due in bucket \d"), (-1, "position is -1 where 0 is due in bucket")],
)
def test_a_wrong_place_in_a_bucket_is_named(position: int, message: str, alone: Any, tmp_path: Path):
    alone[0].save(tmp_path)
    path = tmp_path / "answers-00000-of-00001.parquet"
    table = pq.read_table(path)
    rows = table.to_pydict()
    first = rows["question_id"][0]
    rows["position"] = [
        position if name == first else old for name, old in zip(rows["question_id"], rows["position"], strict=True)
    ]
    pq.write_table(pa.table(rows, schema=table.schema), path)
    with pytest.raises(CheckpointError, match=message):
        buffer_of(SingleProcess()).load(tmp_path)


def test_a_process_that_cannot_write_stops_all(tmp_path: Path):
    (tmp_path / "answers-00001-of-00002.parquet").mkdir()

    def work(comm: ThreadRank) -> str:
        with pytest.raises(OSError, match="answers-00001") as caught:
            buffer_of(comm).save(tmp_path)
        return type(caught.value).__name__

    assert len(on_ranks(2, 2, work)) == 4


def test_an_owner_reads_only_the_row_groups_it_has_rows_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows stand shard by shard: of four row groups, the second of two ranks needs the last two or three."""
    alone = buffer_of(SingleProcess())
    answers = [Trajectory(np.array([i], np.int32), np.array([-1.0], np.float32), float(i < 2), False, "stop", 0)
               for i in range(K)]  # fmt: skip
    groups = [Group(Question(f"q{i}", np.array([1], np.int32), "1"), tuple(answers)) for i in range(2000)]
    alone.record(groups, step=0, collect=True)
    alone.save(tmp_path)
    read: list[list[int]] = []
    plain_batches = pq.ParquetFile.iter_batches

    def watched(file: Any, *args: Any, row_groups: list[int], columns: list[str], **keys: Any) -> Any:
        if "token_ids" in columns:
            read.append(list(row_groups))
        return plain_batches(file, *args, row_groups=row_groups, columns=columns, **keys)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)

    def load(comm: Communicator) -> int:
        buffer = buffer_of(comm)
        buffer.load(tmp_path)
        return buffer.num_own_answers

    class Second(SingleProcess):
        """The second of two ranks, alone: enough to see what it reads."""

        rank, size = 1, 2

    held = load(Second())
    assert pq.ParquetFile(tmp_path / "answers-00000-of-00001.parquet").num_row_groups == 4
    assert 1900 < held < 2100
    assert read in ([[1], [2], [3]], [[2], [3]])


def test_values_of_all_processes_come_in_the_order_of_their_index():
    def work(comm: ThreadRank) -> Any:
        process = comm.rank * comm.members + comm.member
        return gather_everyone(comm, process), gather_parts(comm, [(9 - process, f"p{process}"), (9, "last")])

    for everyone, parts in on_ranks(2, 2, work):
        assert everyone == [0, 1, 2, 3]
        assert parts == ["p3", "p2", "p1", "p0", "last", "last", "last", "last"]


def test_together_raises_everywhere_what_one_process_met():
    def work(comm: ThreadRank) -> str:
        with pytest.raises(CheckpointError) as caught:
            failing(comm)
        with together(comm):
            pass
        return str(caught.value)

    def failing(comm: ThreadRank) -> None:
        with together(comm):
            if (comm.rank, comm.member) == (1, 1):
                raise CheckpointError("damaged")

    assert on_ranks(2, 2, work) == ["damaged"] * 4
