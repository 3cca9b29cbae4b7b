"""The history of a run's questions: its file, and what a run writes into it."""

import json
import math

import pytest

from exgrpo_megatron.errors import DataError
from exgrpo_megatron.experience.history import Event, HistoryWriter, read_history, read_history_table

FIRST = [
    Event("q1", "tried", count=2, of=4),
    Event('eine "Frage" ±', "tried", count=0, of=4),
    Event("q1", "stored", answer=7),
    Event("q1", "left_out", count=1, reason="duplicate"),
]
SECOND = [
    Event("q1", "replayed", answer=7, mean_ratio=0.123456, max_ratio=math.inf),
    Event("q1", "evicted", answer=7, reason="max_answers"),
    Event("q2", "retired"),
]


@pytest.fixture
def path(tmp_path):
    writer = HistoryWriter(tmp_path / "experience_history.jsonl")
    writer.write(1, FIRST)
    writer.write(2, SECOND)
    writer.write(3, [])
    return writer.path


def test_what_was_written_is_read_question_by_question(path):
    """A question's events keep their order; ratios keep four digits, and what is not finite is NaN."""
    steps = dict(read_history(path))
    assert list(steps) == [1, 2, 3]
    assert steps[1] == [FIRST[0], FIRST[2], FIRST[3], FIRST[1]]
    assert [event for _, events in read_history(path, "q2") for event in events] == [SECOND[2]]
    assert dict(read_history(path, FIRST[1].question_id))[1] == [FIRST[1]]
    replayed = steps[2][0]
    assert (replayed.answer, replayed.mean_ratio, math.isnan(replayed.max_ratio)) == (7, 0.1235, True)


def test_the_table_has_a_row_an_event(path):
    table = read_history_table(path)
    assert table.question_ids == ["q1", FIRST[1].question_id, "q2"]
    assert table.step.tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert table.question.tolist() == [0, 0, 0, 1, 0, 0, 2]
    assert table.count[table.of_kind("tried")].tolist() == [2, 0]
    assert table.answer[table.of_kind("stored") | table.of_kind("replayed")].tolist() == [7, 7]
    assert [reason for reason in table.reason if reason] == ["duplicate", "max_answers"]
    assert table.steps == [1, 2, 3]


def test_later_steps_and_a_half_written_line_are_cut_off(path):
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":4,"questions":{"q1":[["tri')
    assert list(dict(read_history(path))) == [1, 2, 3]
    writer = HistoryWriter(path)
    assert path.read_bytes() == whole
    writer.truncate_after(3)
    assert path.read_bytes() == whole
    writer.truncate_after(1)
    writer.write(2, SECOND[2:])
    assert list(read_history(path, "q2")) == [(1, []), (2, [SECOND[2]])]
    writer.truncate_after(0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["[]", '{"step":1}', '{"step":1,"questions":{"q1":[["flown",1]]}}', "{"])
def test_a_line_of_something_else_is_named(path, line):
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"experience_history\.jsonl, line 4"):
        list(read_history(path))


def test_a_step_of_the_paper_s_batch_takes_sixteen_kilobytes(path):
    """128 questions of 8 answers with ids of 16 characters: half of them replayed, half of the new answers stored."""
    ids = [f"{number:016x}" for number in range(128)]
    events = [Event(name, "tried", count=4, of=8) for name in ids]
    events += [Event(name, "replayed", answer=50_000, mean_ratio=0.9871, max_ratio=12.34) for name in ids[:64]]
    events += [Event(name, "stored", answer=100_000 + number) for name in ids for number in range(4)]
    HistoryWriter(path.with_name("one")).write(1000, events)
    size = path.with_name("one").stat().st_size
    assert json.loads(path.with_name("one").read_text())["step"] == 1000
    assert size < 18_000, size


def test_any_changed_bit_of_a_line_is_found(tmp_path):
    path = tmp_path / "history.jsonl"
    HistoryWriter(path).write(3, [Event("q", "tried", count=2, of=4), Event("q", "stored", answer=17)])
    sound = path.read_bytes()
    for place in range(len(sound) - 1):  # without the newline that ends it, a line is one that is being written
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(DataError, match="line 1"):
            list(read_history(path))
    path.write_bytes(b'{"step":3,"questions":{"q":[["stored",17]]}}\n')  # as earlier versions wrote it
    assert list(read_history(path)) == [(3, [Event("q", "stored", answer=17)])]
