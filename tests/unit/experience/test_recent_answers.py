"""The last answers of a question: which are kept, on whatever number of ranks, and through a checkpoint."""

from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks

from exgrpo_megatron.comm import Communicator, SingleProcess
from exgrpo_megatron.config import RepoConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.recent_answers import RecentAnswers
from exgrpo_megatron.types import Group, Question, Trajectory


def answer(number: int, reward: float = 0.0, *, replayed: bool = False) -> Trajectory:
    ids = np.array([number, 2], np.int32)
    return Trajectory(ids, -ids.astype(np.float32) / 10, reward, replayed, "stop", policy_version=number)


def group(name: str, *members: Trajectory) -> Group:
    return Group(Question(name, np.array([1], np.int32), "1"), members)


def config(**keys: object) -> RepoConfig:
    return RepoConfig(**{"enabled": True, "min_kept": 2, "max_kept": 4, "num_answers": 3, "choice": "recent", **keys})


def numbers(groups: list[Group]) -> dict[str, list[int]]:
    return {group.question.id: [int(member.token_ids[0]) for member in group.trajectories] for group in groups}


def filled(comm: Communicator) -> RecentAnswers:
    """Questions q0 to q9; q3 has answers 0 to 5 and the others three; one of q5 and one of q6 is refused."""
    recent = RecentAnswers(config(), 1, comm)
    recent.record([group(f"q{i}", answer(0, 1.0), answer(1), answer(2)) for i in range(10)])
    recent.record([group("q3", answer(3), answer(4, 0.5), answer(5, 1.0), answer(9, replayed=True))])
    broken = Trajectory(np.array([1, 2], np.int32), np.float32([-1]), 1.0, False, "stop", 0)
    recent.record([group("q5", broken), group("q6", broken)])
    return recent


ASKED = [group(name) for name in ("q3", "q1", "q9", "new")]
EXPECTED = {"q3": [3, 4, 5], "q1": [0, 1, 2], "q9": [0, 1, 2]}


def test_the_newest_are_kept_right_and_wrong_with_their_rewards_and_log_probs():
    recent = filled(SingleProcess())
    groups = recent.off_policy_groups(ASKED, step=7)
    assert numbers(groups) == EXPECTED  # q3 keeps four, of which the newest three are taken; what was replayed is not
    assert recent.num_answers() == 9 * 3 + 4
    members = groups[0].trajectories
    assert [(member.reward, member.correct, member.replayed) for member in members] == [
        (0.0, False, True),
        (0.5, True, True),
        (1.0, True, True),
    ]
    np.testing.assert_array_equal(members[0].logprobs, np.float32([-0.3, -0.2]))


def test_a_question_with_too_few_has_no_group():
    recent = RecentAnswers(config(min_kept=3), 1, SingleProcess())
    recent.record([group("q1", answer(0), answer(1))])
    assert recent.off_policy_groups([group("q1")], step=2) == []
    recent.record([group("q1", answer(2))])
    assert numbers(recent.off_policy_groups([group("q1")], step=3)) == {"q1": [0, 1, 2]}


def test_an_answer_without_one_finite_log_prob_a_token_is_refused_and_counted():
    recent = RecentAnswers(config(), 1, SingleProcess())
    sound, ids = answer(1), np.array([1, 2], np.int32)
    broken = [Trajectory(ids, np.float32(values), 1.0, False, "stop", 0) for values in ([-1], [-1, np.nan])]
    recent.record([group("q1", sound, *broken)])
    assert (recent.num_answers(), recent.num_refused) == (1, 2)


@pytest.mark.parametrize(("ranks", "others"), [((1, 1), (3, 1)), ((2, 2), (1, 1)), ((3, 1), (2, 1))])
def test_any_number_of_ranks_gives_the_same_groups_also_after_a_resume_on_another(
    tmp_path: Path, ranks: tuple[int, int], others: tuple[int, int]
):
    def found(recent: RecentAnswers, comm: Communicator) -> tuple[dict[str, list[int]], int, int]:
        refused = sum(comm.all_gather(recent.num_refused))
        return numbers(recent.off_policy_groups(ASKED, step=7)), recent.num_answers(), refused

    def save(comm: Communicator) -> tuple[dict[str, list[int]], int, int]:
        recent = filled(comm)
        recent.save(recent.snapshot(), tmp_path / "recent")
        comm.barrier()
        return found(recent, comm)

    def load(comm: Communicator) -> tuple[dict[str, list[int]], int, int]:
        recent = RecentAnswers(config(), 1, comm)
        recent.load(tmp_path / "recent")
        return found(recent, comm)

    for work, (size, members) in ((save, ranks), (load, others)):
        assert on_ranks(size, members, work) == [(EXPECTED, 31, 2)] * (size * members)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "recent").mkdir()
    recent = filled(SingleProcess())
    with pytest.raises(CheckpointError, match="no answers of `repo`"):
        recent.load(tmp_path / "recent")
    (path,) = recent.save(recent.snapshot(), tmp_path / "recent")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"recent-00000-of-00001\.parquet"):
        recent.load(tmp_path / "recent")
    path.rename(path.with_name("recent-00000-of-00002.parquet"))
    with pytest.raises(CheckpointError, match=r"recent-00001-of-00002\.parquet is missing"):
        recent.load(tmp_path / "recent")
