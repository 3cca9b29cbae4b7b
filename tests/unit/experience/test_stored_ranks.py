"""Checkpoints, caps and damage on several ranks: what happens does not depend on how many there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ThreadRank, on_ranks
from test_ranks import K, kept, play, random_group, replicated, union

from exgrpo_megatron.comm import Communicator, SingleProcess
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.recovery import find_segments
from exgrpo_megatron.types import Group, Question, Trajectory

CAPS = [
    {"max_answers_per_question": 2},
    {"max_answers": 40},
    {"max_answers": 40, "eviction": "highest_entropy"},
    {"max_answers": 40, "eviction": "least_recently_replayed"},
    {"max_bytes": 3000},
    {"max_answers_per_question": 3, "max_answers": 50, "max_bytes": 3000, "eviction": "highest_entropy"},
]


def buffer_of(comm: Communicator, folder: Path | None = None, **keys: Any) -> ExperienceBuffer:
    config = ExperienceConfig.model_validate({"bucket_weight": "counts", **keys})
    return ExperienceBuffer(config, K, comm, folder)


def everything(buffer: ExperienceBuffer) -> Any:
    return replicated(buffer), buffer.num_bytes, buffer.num_damaged


@pytest.mark.parametrize("caps", CAPS, ids=lambda caps: "+".join(map(str, caps.values())))
def test_every_number_of_ranks_evicts_what_one_does(caps: dict[str, Any], tmp_path: Path):
    def work(comm: Communicator, folder: Path) -> Any:
        buffer = buffer_of(comm, folder, **caps)
        return play(buffer, seed=0), everything(buffer), kept(buffer)

    seen, state, mine = work(SingleProcess(), tmp_path / "one")
    reports = [part for part in seen if hasattr(part, "evicted_of_answers")]
    gone = [sum(getattr(report, name) for report in reports)
            for name in ("evicted_of_question", "evicted_of_answers", "evicted_of_bytes")]  # fmt: skip
    assert [count > 0 for count in gone] == [
        "max_answers_per_question" in caps,
        "max_answers" in caps,
        "max_bytes" in caps and len(caps) == 1,
    ] or len(caps) > 3
    events = [event for report in reports for event in report.events]
    stored_at, gone_at = ([event.answer for event in events if event.kind == kind] for kind in ("stored", "evicted"))
    assert len(gone_at) == sum(gone)
    assert set(gone_at) < set(stored_at)
    assert len(set(stored_at)) == len(stored_at)
    stored = sum(len(answers) for answers in mine.values())
    assert stored == sum(state[0][1]) <= caps.get("max_answers", stored)
    assert max(map(len, mine.values())) <= caps.get("max_answers_per_question", 99)
    assert state[1] <= caps.get("max_bytes", state[1])
    results = on_ranks(3, 2, lambda comm: work(comm, tmp_path / "three"))
    assert all(result[0] == seen for result in results)
    for result in results:
        theirs = [part.events for part in result[0] if hasattr(part, "evicted_of_answers")]
        assert theirs == [report.events for report in reports]
    assert all(result[1] == state for result in results)
    assert union([result[2] for result in results]) == mine


def test_a_replayed_answer_outlives_those_that_are_not(tmp_path: Path):
    """Both on one rank and on three: the caller's step is what counts, not who keeps the answer."""

    def work(comm: Communicator) -> Any:
        buffer = buffer_of(comm, max_answers=30, eviction="least_recently_replayed")
        play(buffer, seed=0, steps=6)
        name = buffer.draw(1, np.random.default_rng(0))[0]
        (first,) = buffer.fetch([(name, 0)], replayed_in=10**6)
        play(buffer, seed=1, steps=8)
        return first.token_ids.tolist(), [answer.token_ids.tolist() for answer in buffer.answers(name)], name

    first, left, name = work(SingleProcess())
    assert first in left
    assert all(result == (first, left, name) for result in on_ranks(3, 1, work))


@pytest.fixture(scope="module")
def straight() -> Any:
    buffer = buffer_of(SingleProcess(), max_answers=60)
    before = play(buffer, seed=0)
    middle = everything(buffer), kept(buffer)
    after = play(buffer, seed=1)
    return before, middle, after, (everything(buffer), kept(buffer))


@pytest.mark.parametrize(("before", "after"), [((1, 1), (3, 2)), ((3, 1), (2, 1)), ((2, 2), (1, 1))])
def test_a_checkpoint_holds_its_moment_whatever_was_appended_later(
    before: Any, after: Any, straight: Any, tmp_path: Path
):
    """Taken in the middle, loaded elsewhere on another number of ranks after the run's own files are gone."""

    def first(comm: ThreadRank) -> None:
        buffer = buffer_of(comm, tmp_path / "run", max_answers=60)
        play(buffer, seed=0)
        snapshot = buffer.snapshot()
        play(buffer, seed=2)
        snapshot.save(tmp_path / "checkpoint")
        play(buffer, seed=3)
        buffer.close()

    def second(comm: ThreadRank) -> Any:
        buffer = buffer_of(comm, tmp_path / "again", max_answers=60)
        buffer.load(tmp_path / "moved")
        begun = everything(buffer), kept(buffer)
        return begun, play(buffer, seed=1), everything(buffer), kept(buffer)

    on_ranks(*before, first)
    assert not (tmp_path / "run").exists()
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    results = on_ranks(*after, second)
    _, middle, later, end = straight
    assert all(result[0][0] == middle[0] for result in results)
    assert union([result[0][1] for result in results]) == middle[1]
    assert all(result[1] == later for result in results)
    assert all(result[2] == end[0] for result in results)
    assert union([result[3] for result in results]) == end[1]


def saved(folder: Path, size: int = 1) -> None:
    def work(comm: ThreadRank) -> None:
        buffer = buffer_of(comm, folder.with_name("live"))
        for seed in range(3):
            play(buffer, seed=seed, steps=8)
            buffer.snapshot().save(folder.with_name("scratch"))
        buffer.snapshot().save(folder)
        buffer.close()

    on_ranks(size, 1, work)


def test_checkpoints_share_the_segments_they_have_in_common(tmp_path: Path):
    buffer = buffer_of(SingleProcess(), tmp_path / "live")
    for step, name in enumerate("ab"):
        play(buffer, seed=step, steps=8)
        buffer.snapshot().save(tmp_path / name)
    first, second = (sorted((tmp_path / name / "segments").iterdir()) for name in "ab")
    assert [len(first), len(second)] == [1, 2]
    assert first[0].stat().st_ino == second[0].stat().st_ino


def test_where_there_are_no_links_a_checkpoint_has_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    saved(tmp_path / "checkpoint")
    loaded = buffer_of(SingleProcess(), tmp_path / "again")
    loaded.load(tmp_path / "checkpoint")
    assert loaded.num_answers == sum(len(answers) for answers in kept(loaded).values()) > 20


DAMAGE = {"changed": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "cut off": lambda data: data[:-5]}


@pytest.mark.parametrize("damage", [*DAMAGE, "missing"])
def test_a_damaged_segment_is_refused_by_name_or_costs_its_answers_alone(damage: str, tmp_path: Path):
    saved(tmp_path / "checkpoint", 2)
    whole = buffer_of(SingleProcess())
    whole.load(tmp_path / "checkpoint")
    path = sorted((tmp_path / "checkpoint" / "segments").glob("00001-*"))[-1]
    content = path.read_bytes()
    path.unlink()
    if damage in DAMAGE:
        path.write_bytes(DAMAGE[damage](content))

    def work(comm: ThreadRank) -> Any:
        buffer = buffer_of(comm, tmp_path / "strict")
        with pytest.raises(CheckpointError) as caught:
            buffer.load(tmp_path / "checkpoint")
        assert buffer.num_questions == 0
        lenient = buffer_of(comm, tmp_path / "lenient", on_corruption="quarantine")
        lenient.load(tmp_path / "checkpoint")
        merged = buffer_of(comm, on_corruption="quarantine")
        report = merged.merge_file(tmp_path / "checkpoint")
        lenient.snapshot().save(tmp_path / "next")
        return str(caught.value), everything(lenient), kept(lenient), report, everything(merged)[0][0]

    results = on_ranks(3, 2, work)
    wrong = "is missing" if damage == "missing" else "is damaged"
    assert all(f"{path}: this segment of stored answers {wrong}" in result[0] for result in results)
    assert all("experience.on_corruption" in result[0] for result in results)
    (state,) = {repr(result[1]) for result in results}
    left, before = union([result[2] for result in results]), kept(whole)
    lost = results[0][1][2]
    assert lost == sum(map(len, before.values())) - sum(map(len, left.values())) > 0
    assert lost == 1 or damage == "missing"
    assert all(answer in before[name] for name, answers in left.items() for answer in answers)
    assert all(sorted(result[4]) == sorted(results[0][1][0][0]) for result in results)
    assert all(result[3].damaged == lost for result in results)
    again = buffer_of(SingleProcess())
    again.load(tmp_path / "next")
    assert repr(everything(again)) == state
    assert kept(again) == left


def test_damage_met_in_a_run_is_refused_everywhere_or_costs_itself_alone(tmp_path: Path):
    def work(comm: ThreadRank, on_corruption: str) -> Any:
        buffer = buffer_of(comm, tmp_path / on_corruption, on_corruption=on_corruption)
        play(buffer, seed=0)
        names = [name for name, _ in buffer.questions()]
        assert buffer.intact(names) == names
        comm.barrier()
        if comm.is_main:
            path = find_segments(tmp_path / on_corruption)[0]
            data = bytearray(path.read_bytes())
            data[60] ^= 1
            path.write_bytes(bytes(data))
        comm.barrier()
        before = kept(buffer) if on_corruption == "refuse" and comm.rank else {}
        try:
            left = buffer.intact(names)
        except CheckpointError as error:
            return str(error), before
        return left, play(buffer, seed=1, steps=4), everything(buffer)

    refused = on_ranks(2, 2, lambda comm: work(comm, "refuse"))
    assert all("rank-00000/segment-000000.seg: a stored answer is damaged" in result[0] for result in refused)
    results = on_ranks(2, 2, lambda comm: work(comm, "quarantine"))
    assert all(result == results[0] for result in results)
    assert results[0][2][2] == 1
    assert [path.name for path in (tmp_path / "quarantine").glob("*/quarantine/*")] == ["segment-000000.seg"]


def test_what_a_killed_run_left_can_be_begun_with(tmp_path: Path):
    """Its working folder, without any checkpoint: every answer, each question in the bucket of one correct answer."""

    def killed(comm: ThreadRank) -> Any:
        buffer = buffer_of(comm, tmp_path / "run")
        play(buffer, seed=0, steps=6)
        return kept(buffer), sorted(buffer.retired)

    parts = on_ranks(2, 1, killed)
    fresh = buffer_of(SingleProcess())
    report = fresh.merge_file(tmp_path / "run")
    there = {name: [answer[0] for answer in answers] for name, answers in union([part for part, _ in parts]).items()}
    mine = {name: [answer[0] for answer in answers] for name, answers in kept(fresh).items()}
    assert {name: mine[name] for name in there} == there
    assert set(mine) - set(there) <= set(parts[0][1])
    assert (report.questions, report.answers) == (fresh.num_questions, fresh.num_answers)
    assert fresh.bucket_sizes() == {1: fresh.num_questions, 2: 0, 3: 0}


def test_answers_that_a_killed_run_left_in_the_way_are_deleted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    play(buffer_of(SingleProcess(), tmp_path), seed=0, steps=2)
    assert find_segments(tmp_path)
    buffer = buffer_of(SingleProcess(), tmp_path)
    assert not find_segments(tmp_path)
    assert "1 files with answers of a run that was killed are deleted" in caplog.text
    assert buffer.num_answers == 0


def test_a_folder_that_cannot_be_written_is_named_everywhere(tmp_path: Path):
    (tmp_path / "rank-00001").write_text("in the way")

    def work(comm: ThreadRank) -> str:
        buffer = buffer_of(comm, tmp_path)
        with pytest.raises((CheckpointError, OSError)) as caught:
            play(buffer, seed=0)
        return str(caught.value)

    assert all("rank-00001" in message for message in on_ranks(2, 2, work))


def test_what_ranks_that_are_no_more_left_is_deleted_too(tmp_path: Path):
    def killed(comm: ThreadRank) -> None:
        play(buffer_of(comm, tmp_path), seed=0, steps=4)

    on_ranks(4, 1, killed)
    assert len({path.parent for path in find_segments(tmp_path)}) == 4
    on_ranks(2, 2, lambda comm: (buffer_of(comm, tmp_path), None)[1])
    assert not list(tmp_path.glob("rank-*"))


def test_damage_met_while_a_checkpoint_is_written_does_not_take_its_file_away(tmp_path: Path):
    """The snapshot is taken first, the file set aside next, and linked last: as in a background save."""
    buffer = buffer_of(SingleProcess(), tmp_path / "live", on_corruption="quarantine")
    play(buffer, seed=0)
    snapshot = buffer.snapshot()
    before, path = buffer.num_answers, find_segments(tmp_path / "live")[0]
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    buffer.intact([name for name, _ in buffer.questions()])
    snapshot.save(tmp_path / "checkpoint")
    assert not path.exists()
    again = buffer_of(SingleProcess(), on_corruption="quarantine")
    again.load(tmp_path / "checkpoint")
    assert (before - again.num_answers, again.num_damaged) == (1, 1)


@pytest.mark.parametrize("damage", ["missing", "cut off"])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_live_segment_that_is_gone_when_a_checkpoint_is_taken_follows_the_setting(
    sealed: bool, damage: str, tmp_path: Path
):
    """Of three ranks, one; refused by name everywhere, or the checkpoint and the run go on with all other answers."""

    def work(comm: ThreadRank, on_corruption: str) -> Any:
        buffer = buffer_of(comm, tmp_path / on_corruption, on_corruption=on_corruption)
        play(buffer, seed=0)
        if sealed:
            buffer._state.keeper.store.seal()
        before = kept(buffer)
        comm.barrier()
        path = tmp_path / on_corruption / "rank-00001" / "segment-000000.seg"
        if comm.rank == 1:
            if damage == "missing":
                path.unlink()
            else:
                os.truncate(path, path.stat().st_size - 12)  # into the last answer
        comm.barrier()
        if on_corruption == "refuse":
            with pytest.raises(CheckpointError, match=f"{path}: this segment of stored answers is missing or cut off"):
                buffer.snapshot()
            return None
        buffer.snapshot().save(tmp_path / "checkpoint")
        after = everything(buffer), kept(buffer)
        lost = sum(map(len, before.values())) - sum(map(len, after[1].values()))
        return lost, after, buffer.num_damaged

    on_ranks(3, 1, lambda comm: work(comm, "refuse"))
    results = on_ranks(3, 1, lambda comm: work(comm, "quarantine"))
    losses = [result[0] for result in results]
    assert losses[0] == losses[2] == 0
    assert losses[1] > 3 if damage == "missing" else losses[1] == 1
    assert all(result[2] == losses[1] for result in results)
    again = buffer_of(SingleProcess())
    again.load(tmp_path / "checkpoint")
    assert everything(again) == results[0][1][0]
    assert kept(again) == union([result[1][1] for result in results])


def test_a_run_goes_on_storing_where_the_segment_it_writes_to_is_deleted(tmp_path: Path):
    buffer = buffer_of(SingleProcess(), tmp_path / "live", on_corruption="quarantine")
    play(buffer, seed=0)
    first, (active,) = buffer.num_answers, find_segments(tmp_path / "live")
    active.unlink()
    # The second of two equal answers is compared with the first, before anything of the step is on the disk.
    ids, logprobs = np.array([7, 2], np.int32), np.full(2, -0.5, np.float32)
    members = [Trajectory(ids, logprobs, float(i < 2), False, "stop", 0) for i in range(K)]
    twins = Group(Question("twins", np.array([1], np.int32), "42"), tuple(members))
    report = buffer.record([twins], step=0, collect=True)
    assert (report.stored, report.duplicates) == (1, 1)
    first += 1
    rng, reports = np.random.default_rng(1), []
    for step in range(5):
        reports.append(buffer.record([random_group(rng) for _ in range(8)], step=step, collect=True))
    buffer.snapshot().save(tmp_path / "checkpoint")
    retired = sum(report.stored for report in reports) - buffer.num_answers
    assert 0 <= retired < 40, "of the later answers, those of questions retired since then are gone"
    assert 3 < buffer.num_damaged <= first
    assert not active.exists()
    again = buffer_of(SingleProcess())
    again.load(tmp_path / "checkpoint")
    assert everything(again) == everything(buffer)


def test_the_index_of_a_checkpoint_is_no_experience_file_by_itself(tmp_path: Path):
    saved(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "index-00000-of-00001.parquet"
    with pytest.raises(CheckpointError, match=f"does not hold them: name its folder, {path.parent}"):
        buffer_of(SingleProcess()).merge_file(path)


@pytest.mark.parametrize("changed", ["payload", "name of the format"])
def test_damage_in_what_a_killed_run_left_costs_one_answer_and_is_told(
    changed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    buffer = buffer_of(SingleProcess(), tmp_path)
    play(buffer, seed=0, steps=6)
    whole = buffer_of(SingleProcess()).merge_file(tmp_path).answers
    assert "no whole answers" not in caplog.text
    (path,) = find_segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[60 if changed == "payload" else 3] ^= 1
    path.write_bytes(data)
    left = buffer_of(SingleProcess()).merge_file(tmp_path).answers
    assert left == (whole - 1 if changed == "payload" else 0)
    assert f"{path}: " in caplog.text
    assert "are no whole answers" in caplog.text


def test_a_lower_cap_a_question_holds_from_the_resume_on(tmp_path: Path):
    """Everywhere alike, questions that no step touches included."""
    buffer = buffer_of(SingleProcess(), tmp_path / "live")
    play(buffer, seed=0)
    buffer.snapshot().save(tmp_path / "checkpoint")
    newest = {name: answers[-2:] for name, answers in kept(buffer).items()}
    assert max(map(len, kept(buffer).values())) > 2

    def resumed(comm: ThreadRank) -> Any:
        capped = buffer_of(comm, max_answers_per_question=2)
        capped.load(tmp_path / "checkpoint")
        return everything(capped), kept(capped)

    results = on_ranks(2, 2, resumed)
    assert all(result[0] == results[0][0] for result in results)
    assert union([part for _, part in results]) == newest
    assert results[0][0][0][1] == [len(newest[name]) for name, _ in results[0][0][0][0]]


def test_what_was_left_and_cannot_be_deleted_is_named_everywhere(tmp_path: Path):
    (tmp_path / "rank-00001" / "segment-000000.seg" / "in the way").mkdir(parents=True)

    def work(comm: ThreadRank) -> str:
        with pytest.raises(OSError, match="rank-00001/segment-000000") as caught:
            buffer_of(comm, tmp_path)
        return str(caught.value)

    assert len(on_ranks(2, 2, work)) == 4
