"""Statistics of questions: numbers by hand, memory, and checkpoints on any number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ranks import ThreadRank, on_ranks
from test_ranks import random_group

from exgrpo_megatron.comm import Communicator, SingleProcess
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.question_stats import MAX_WINDOW, QuestionStats, StatsKept
from exgrpo_megatron.types import Group, Question, Trajectory

K = 4


def group(name: str, rewards: list[float], *, replayed: bool = False) -> Group:
    """Members of one token each; `replayed`: the last one is."""
    last = len(rewards) - 1
    members = [
        Trajectory(np.array([i], np.int32), np.array([-1.0], np.float32), reward, replayed and i == last, "stop", 0)
        for i, reward in enumerate(rewards)
    ]
    return Group(Question(name, np.array([1], np.int32), "42"), tuple(members))


def buffer_of(comm: Communicator, decay: float | None = 0.5, folder: Path | None = None) -> ExperienceBuffer:
    return ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), K, comm, folder, pass_rate_decay=decay)


def stats_of(**kept: Any) -> QuestionStats:
    stats = buffer_of(SingleProcess()).stats
    return QuestionStats(StatsKept(**kept), stats.ids)


@pytest.mark.parametrize(("decay", "rate"), [(0.5, 0.5 * (0.5 * 0.25 + 0.5 * 1.0)), (0.0, 0.0), (1.0, 0.25)])
def test_a_running_pass_rate_begins_with_the_first_group_and_mixes_in_the_later_ones(decay: float, rate: float):
    """1 of 4 right, then 3 of 3 new ones (the wrong one is replayed), then none of 4."""
    buffer = buffer_of(SingleProcess(), decay)
    buffer.record([group("a", [1, 0, 0, 0])], step=1, collect=True)
    assert buffer.running_pass_rate("a") == 0.25
    buffer.record([group("a", [1, 1, 1, 0], replayed=True)], step=2, collect=True)
    buffer.record([group("a", [0, 0, 0, 0]), group("b", [0, 0, 0, 0])], step=3, collect=True)
    assert buffer.running_pass_rate("a") == rate
    assert buffer.running_pass_rates(["b", "a", "nobody"]).tolist() == [0, rate, 0]
    assert (buffer.stats.attempts("a"), buffer.stats.attempts("b"), buffer.stats.attempts("nobody")) == (11, 4, 0)
    assert (buffer.stats.last_step("b"), buffer.stats.last_step("nobody")) == (3, None)


def test_questions_are_known_whether_stored_retired_or_never_solved():
    buffer = buffer_of(SingleProcess())
    buffer.record(
        [group("solved", [1] * 4), group("never", [0] * 4), group("half", [1, 0, 1, 0])], step=1, collect=True
    )
    buffer.record([group("solved", [1, 1, 0, 0])], step=2, collect=True)
    assert buffer.running_pass_rates(["solved", "never", "half"]).tolist() == [0.75, 0, 0.5]
    assert [name for name, _ in buffer.questions()] == ["half"]


def test_replays_are_counted_when_answers_are_fetched_for_one():
    buffer = buffer_of(SingleProcess())
    buffer.record([group("a", [1, 0, 1, 0])], step=1, collect=True)
    buffer.fetch([("a", 0)])
    assert buffer.stats.replays("a") == 0
    for step in (2, 3):
        buffer.fetch([("a", 1)], replayed_in=step)
    assert buffer.stats.replays("a") == 2


@pytest.mark.parametrize("window", [1, 5, 8, 13, MAX_WINDOW])
def test_the_last_results_are_those_of_a_plain_list(window: int):
    """As many as the window has, newest first; the reference keeps them all."""
    stats, rng, seen = stats_of(window=window), np.random.default_rng(0), []
    row = stats.ids.intern("a")
    for step in range(60):
        rewards = rng.integers(0, 2, K).tolist()
        replayed = bool(rng.random() < 0.3)
        stats.observe(row, group("a", rewards, replayed=replayed), step)
        seen += rewards[: K - replayed]
        expected = seen[::-1][:window]
        assert stats.recent_results("a") == expected
        assert stats.window_rates(np.array([row]))[0] == np.mean(expected)
    assert np.isnan(stats.window_rates(stats.rows(["nobody"]))).all()


def test_moments_of_rewards_are_those_of_the_last_group_with_its_stored_answer():
    stats = stats_of(rewards=True)
    row = stats.ids.intern("a")
    stats.observe(row, group("a", [0.1, 0.2, 0.3, 0.9]), 1)
    stats.observe(row, group("a", [0.2, 0.4, 0.0, 1.0], replayed=True), 2)
    mean, variance = stats.reward_moments(stats.rows(["a", "nobody"]))
    # Mean 0.4; squared distances .04 0 .16 .36, their mean .14.
    np.testing.assert_allclose([mean[0], variance[0]], [0.4, 0.14], rtol=1e-6)
    assert np.isnan([mean[1], variance[1]]).all()


def test_only_the_columns_asked_for_take_memory():
    """10 bytes a question always; 4, 8 and 16 + 2 more. Each has room for a tenth more."""
    count = 100_000
    for kept, each in [
        ({}, 10),
        ({"pass_rate_decay": 0.5}, 14),
        ({"rewards": True}, 18),
        ({"window": 20}, 15),
        ({"window": MAX_WINDOW, "pass_rate_decay": 0.5, "rewards": True}, 40),
    ]:
        stats = stats_of(**kept)
        stats.reach(count - 1)
        assert stats.nbytes == each * count


def play(buffer: ExperienceBuffer, steps: range) -> None:
    for step in steps:
        rng = np.random.default_rng(step)
        buffer.record([random_group(rng) for _ in range(6)], step=step, collect=True)
        drawn = buffer.draw(3, rng)
        buffer.fetch([(name, 0) for name in drawn], replayed_in=step)


def known(buffer: ExperienceBuffer) -> dict[str, tuple[Any, ...]]:
    stats = buffer.stats
    rows = stats.known_rows()
    values = [[value.tobytes() for value in stats.column(name, rows)] for name in stats.kept.types]
    return dict(zip(map(stats.ids.name, rows.tolist()), zip(*values, strict=True), strict=True))


@pytest.mark.parametrize(("before", "after"), [((1, 1), (2, 2)), ((3, 1), (1, 1))])
def test_statistics_are_the_same_on_every_process_and_go_on_on_any_other_number(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
):
    straight = buffer_of(SingleProcess())
    play(straight, range(20))

    def save(comm: ThreadRank) -> Any:
        buffer = buffer_of(comm, folder=tmp_path / "store")
        play(buffer, range(10))
        buffer.snapshot().save(tmp_path / "checkpoint")
        return known(buffer)

    def load(comm: ThreadRank) -> Any:
        buffer = buffer_of(comm, folder=tmp_path / "store")
        buffer.load(tmp_path / "checkpoint")
        begun = known(buffer)
        play(buffer, range(10, 20))
        return begun, known(buffer)

    saved = on_ranks(*before, save)
    for begun, ended in on_ranks(*after, load):
        assert all(begun == part for part in saved)
        assert ended == known(straight)


def test_an_older_checkpoint_begins_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    buffer = buffer_of(SingleProcess(), decay=None)
    buffer.record([group("a", [1, 0, 0, 0])], step=1, collect=True)
    written = buffer.snapshot().save(tmp_path)
    with caplog.at_level(logging.WARNING):
        again = buffer_of(SingleProcess())
        again.load(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'questions.parquet'}: no pass_rate of questions: they begin anew"
    ]
    assert again.stats.attempts("a") == 4
    assert again.running_pass_rate("a") == 0
    written[-1].unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again.load(tmp_path)
    assert "has no statistics of questions: they begin anew" in caplog.text
    assert again.stats.attempts("a") == 0
    again.record([group("a", [1, 1, 0, 0])], step=2, collect=True)
    assert again.running_pass_rate("a") == 0.5


@pytest.mark.parametrize(
    ("damage", "message"), [("twice", "'a' stands there twice"), ("type", "`attempts` is of type")]
)
def test_a_wrong_file_is_refused_by_name(damage: str, message: str, tmp_path: Path):
    buffer = buffer_of(SingleProcess())
    buffer.record([group("a", [1, 0, 0, 0]), group("b", [1, 0, 0, 0])], step=1, collect=True)
    path = buffer.snapshot().save(tmp_path)[-1]
    table = pq.read_table(path)
    if damage == "twice":
        changed = table.set_column(0, "question_id", pa.array(["a", "a"]))
    else:
        changed = table.set_column(1, "attempts", pa.array(["4", "4"]))
    pq.write_table(changed, path)
    before = known(buffer)
    with pytest.raises(CheckpointError, match=message):
        buffer.load(tmp_path)
    assert known(buffer) == before
