"""The store of one process: records, segments, caps, compaction, damage, and a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from store_writer import SEGMENT_BYTES, answer_number

from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.encoding import HEADER_BYTES, decode, encode, is_whole, rounded
from exgrpo_megatron.experience.ids import ABSENT, IdTable
from exgrpo_megatron.experience.keeper import Keeper
from exgrpo_megatron.experience.recovery import Recovery, find_segments
from exgrpo_megatron.experience.soundness import answer_fault
from exgrpo_megatron.types import StoredAnswer

WRITER = Path(__file__).with_name("store_writer.py")


def keeper(folder: Path | None, **keys: object) -> Keeper:
    config = ExperienceConfig.model_validate({"bucket_weight": "counts", **keys})
    return Keeper(config, folder, SEGMENT_BYTES)


def fill(target: Keeper, ids: IdTable, serials: range) -> None:
    for serial in serials:
        name, answer = answer_number(serial)
        target.keep(ids.intern(name), name, [answer], serial)
    target.tidy()


def same(one: StoredAnswer, other: StoredAnswer) -> bool:
    """With the log-probs as they are stored."""
    return (
        np.array_equal(one.token_ids, other.token_ids)
        and np.array_equal(one.logprobs, rounded(other.logprobs))
        and (one.policy_version, one.step) == (other.policy_version, other.step)
    )


def serials(target: Keeper) -> set[int]:
    return set(target.store.column("serial")[target.store.live()].tolist())


@pytest.mark.parametrize("largest", [-1e-9, -1.0, -900.0, -3e4])
def test_rounding_changes_an_importance_ratio_by_less_than_half_a_millionth(largest: float):
    """w = exp(new - old): a multiple of 2^-20 is at most 2^-21 = 4.8e-7 from the old log-prob."""
    logprobs = (np.random.default_rng(0).random(1000) * largest).astype(np.float32)
    kept = rounded(logprobs)
    assert np.abs(np.exp(kept.astype(np.float64) - logprobs) - 1).max() <= 2.0**-21 * 1.001
    assert np.array_equal(rounded(kept), kept)
    again = decode(encode("q", 7, StoredAnswer(np.arange(1000, dtype=np.int32), logprobs, 2, 5)))
    assert np.array_equal(again.answer.logprobs, kept)
    assert (again.question_id, again.serial, again.answer.policy_version, again.answer.step) == ("q", 7, 2, 5)


@pytest.mark.parametrize("highest", [0, 255, 256, 65_536, 2**31 - 1])
def test_token_ids_of_any_size_come_back(highest: int):
    ids = np.array([0, highest, highest // 2], np.int32)
    answer = StoredAnswer(ids, np.array([0.0, -0.5, 1.0], np.float32), 2**40, 0)
    back = decode(encode("eine Frage 7 ±", 0, answer))
    assert back.question_id == "eine Frage 7 ±"
    assert same(back.answer, answer)


def test_no_changed_bit_of_a_record_goes_unnoticed():
    record = bytearray(encode("q", 1, answer_number(5)[1]))
    assert is_whole(bytes(record))
    for place in range(len(record)):
        record[place] ^= 1 << (place % 8)
        assert not is_whole(bytes(record)), place
        record[place] ^= 1 << (place % 8)
    assert not is_whole(bytes(record[:-1]))
    assert not is_whole(bytes(record[: HEADER_BYTES - 1]))


def test_ids_are_found_again_and_told_apart():
    names = [f"question {i}" for i in range(5000)]
    one, other = IdTable(), IdTable()
    assert [one.intern(name) for name in names] == list(range(5000))
    assert other.extend(names).tolist() == list(range(5000))
    for table in (one, other):
        assert [table.find(name) for name in names] == list(range(5000))
        assert table.find("question 5000") == ABSENT
        assert [table.name(row) for row in (0, 4999)] == ["question 0", "question 4999"]
        assert table.intern("question 17") == 17


@pytest.mark.parametrize("on_disk", [True, False])
def test_answers_come_back_as_they_were_rounded_once(tmp_path: Path, on_disk: bool):
    target, ids = keeper(tmp_path if on_disk else None), IdTable()
    fill(target, ids, range(200))
    assert len(target.store.segments) > 3
    for name in {answer_number(serial)[0] for serial in range(200)}:
        expected = [answer_number(serial) for serial in range(200)]
        mine = [answer for question, answer in expected if question == name]
        assert all(map(same, target.store.get(ids.find(name)), mine))
    assert any(tmp_path.iterdir()) is on_disk
    target.close()
    assert not tmp_path.exists() or not on_disk


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, ids = keeper(tmp_path), IdTable()
    fill(target, ids, range(200))
    read: list[int] = []
    plain = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or plain(*args))
    slots = target.store.slots(ids.find("q3"))
    target.store.get(ids.find("q3"))
    assert read == target.store.column("length")[slots].tolist()


@pytest.mark.parametrize(
    ("policy", "left"),
    [("oldest", [2, 3]), ("highest_entropy", [1, 3]), ("least_recently_replayed", [0, 3])],
)
def test_a_question_keeps_as_many_answers_as_it_may(policy: str, left: list[int]):
    """Four answers with mean -log-prob 3, 1, 4, 2, of which the first was replayed in step 9 and stored in step 0."""
    target, ids = keeper(None, max_answers_per_question=3, eviction=policy), IdTable()
    row, means = ids.intern("q"), [3.0, 1.0, 4.0, 2.0]
    for serial, mean in enumerate(means):
        answer = StoredAnswer(np.array([serial], np.int32), np.array([-mean], np.float32), 0, serial)
        kept = target.keep(row, "q", [answer], serial)
        if serial == 2:
            target.store.touch(target.store.slots(row)[0], 9)
    assert (kept.stored, len(kept.evicted), kept.num_answers) == ((3,), 1, 3)
    target._config = target._config.model_copy(update={"max_answers_per_question": 2})
    target.keep(row, "q", [], 4)
    assert [int(answer.token_ids[0]) for answer in target.store.get(row)] == left


def test_compaction_gives_room_back_and_changes_no_answer(tmp_path: Path):
    target, ids = keeper(tmp_path, max_answers_per_question=2), IdTable()
    for first in range(0, 1200, 40):
        fill(target, ids, range(first, first + 40))
        target._compactor.wait()
    alive = target.store.num_bytes
    assert serials(target) == set(range(1120, 1200))
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert on_disk == target.store.segment_bytes
    # At most half of each sealed segment is dead, and the one that is written and one being compacted come on top.
    assert on_disk <= 2 * alive + 3 * SEGMENT_BYTES
    for serial in range(1120, 1200):
        name, answer = answer_number(serial)
        assert any(same(stored, answer) for stored in target.store.get(ids.find(name)))


def test_the_answers_of_a_compaction_that_are_dropped_meanwhile_stay_dropped(tmp_path: Path):
    target, ids = keeper(tmp_path), IdTable()
    fill(target, ids, range(400))
    target.store.seal()
    for number in range(0, 30):
        target.forget(ids.find(f"q{number}"))
    target.tidy()
    target.forget(ids.find("q35"))
    target._compactor.wait()
    target.tidy()
    expected = {serial for serial in range(400) if serial % 40 >= 30 and serial % 40 != 35}
    assert serials(target) == expected
    assert all(segment.live_bytes > 0 for segment in target.store.segments.values() if segment.sealed)
    assert sum(len(target.store.get(ids.find(f"q{n}"))) for n in range(30, 40)) == len(expected)


def test_memory_is_at_most_40_bytes_an_answer_and_100_a_question(tmp_path: Path):
    """Counted as allocated: arrays with their room to grow, hash table, ids as bytes."""
    from exgrpo_megatron.experience.index import QuestionIndex

    target, index = keeper(tmp_path), QuestionIndex(8)
    questions, each = 6_000, 3
    tokens = np.array([1, 2], np.int32)
    for number in range(questions):
        name = f"gsm8k-train-{number:07d}"
        index.put(name, 1 + number % 7, each)
        answers = [StoredAnswer(tokens + i, np.float32([-1, -1]), 0, 0) for i in range(each)]
        target.keep(index.row(name), name, answers, each * number)
    per_answer = target.store._table.nbytes / (questions * each)
    per_question = (index.nbytes + target.store._first.nbytes) / questions
    assert per_answer <= 40
    assert per_question <= 100


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def test_a_damaged_record_ends_the_run_or_costs_itself_alone(tmp_path: Path):
    target, ids = keeper(tmp_path / "a"), IdTable()
    fill(target, ids, range(200))
    slot = target.store.slots(ids.find("q7"))[1]
    segment = target.store.segments[int(target.store.column("segment")[slot])]
    serial = int(target.store.column("serial")[slot])
    flip(segment.path, int(target.store.column("offset")[slot]) + 40)
    assert not target.damage([ids.find("q8")], ids)
    with pytest.raises(CheckpointError, match=rf"{segment.path}: a stored answer is damaged.*on_corruption"):
        target.damage([ids.find("q7")], ids)

    target._config = target._config.model_copy(update={"on_corruption": "quarantine"})
    assert target.damage([ids.find("q7")], ids) == {"q7": 1}
    assert serials(target) == set(range(200)) - {serial}
    assert [path.name for path in (tmp_path / "a" / "quarantine").iterdir()] == [segment.path.name]
    assert not segment.path.exists()
    for other in sorted(serials(target)):
        name, answer = answer_number(other)
        assert any(same(stored, answer) for stored in target.store.get(ids.find(name)))


def test_a_file_that_is_gone_costs_its_answers(tmp_path: Path):
    target, ids = keeper(tmp_path, on_corruption="quarantine"), IdTable()
    fill(target, ids, range(200))
    number = min(target.store.segments)
    live = target.store.live()
    gone = set(target.store.column("serial")[live[target.store.column("segment")[live] == number]].tolist())
    target.store.segments[number].path.unlink()
    lost = target.damage([ids.find(f"q{n}") for n in range(40)], ids)
    assert lost.total() == len(gone) > 0
    assert serials(target) == set(range(200)) - gone


def test_after_a_kill_at_any_instant_exactly_a_prefix_of_whole_records_is_there(tmp_path: Path):
    """Fifty times: without evictions the records are number 0 to n - 1; with them, among these are all that live."""
    rng, most = np.random.default_rng(0), 0
    writer = subprocess.Popen([sys.executable, str(WRITER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdin is not None
    assert writer.stdout is not None
    for number in range(50):
        capped = number % 2 == 1
        folder = tmp_path / str(number) / "rank-00000"
        writer.stdin.write(f"{folder} {4 if capped else 0}\n")
        writer.stdin.flush()
        child = int(writer.stdout.readline())
        time.sleep(float(rng.uniform(0, 0.2)))
        os.kill(child, signal.SIGKILL)
        while psutil.pid_exists(child):
            time.sleep(0.001)
        found = list(Recovery(find_segments(folder.parent)))
        for record in found:
            name, answer = answer_number(record.serial)
            assert record.question_id == name
            assert same(record.answer, answer)
        got, end = [record.serial for record in found], max((record.serial for record in found), default=-1) + 1
        assert got == sorted(set(got))
        alive = [n for n in range(end) if not capped or n + 4 * 40 >= end]
        assert set(alive) <= set(got)
        most = max(most, end)
    writer.stdin.close()
    assert writer.wait(60) == 0
    assert most > 100


def test_compaction_that_finds_no_room_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, ids = keeper(tmp_path), IdTable()
    fill(target, ids, range(200))
    target.store.seal()
    for number in range(30):
        target.forget(ids.find(f"q{number}"))
    before = target.store.segment_bytes
    with monkeypatch.context() as full:
        full.setattr(os, "write", _no_room)
        target.tidy()
        target._compactor.wait()
    for _ in range(4):
        target.tidy()
        target._compactor.wait()
    assert target.store.segment_bytes < before / 2
    assert serials(target) == {serial for serial in range(200) if serial % 40 >= 30}


def _no_room(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_question_may_have_thousands_of_answers(tmp_path: Path):
    """Removed from the middle, forgotten, and their slots used again."""
    target, ids = keeper(None), IdTable()
    rows = [ids.intern(name) for name in "ab"]
    for serial in range(3000):
        answer = StoredAnswer(np.array([serial // 2], np.int32), np.array([-1.0], np.float32), 0, 0)
        target.keep(rows[serial % 2], "ab"[serial % 2], [answer], serial)
    target.drop(rows[0], 1000)
    assert target.store.forget(rows[1])[0] == 1500
    assert [int(answer.token_ids[0]) for answer in target.store.get(rows[0])] == [n for n in range(1500) if n != 500]
    for serial in range(3000, 4000):
        target.keep(rows[1], "b", [StoredAnswer(np.array([serial], np.int32), np.float32([-1]), 0, 0)], serial)
    assert len(target.store._table) == 3000
    assert target.store.num_answers == 1499 + 1000
    assert len(target.store.slots(rows[1])) == 1000


def test_a_negative_token_id_is_refused_by_name():
    assert answer_fault(np.array([3, -1], np.int32), np.float32([-1, -1])) == "it has token id -1"
