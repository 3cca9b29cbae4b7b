"""The last answers of every question, right and wrong, with their rewards (`repo`), spread over data-parallel ranks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.algorithm.repo import choose_answers
from exgrpo_megatron.comm import Communicator, all_gather_union, together
from exgrpo_megatron.config import RepoConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.files import REMEDY, numbered_files
from exgrpo_megatron.experience.restore import Owner
from exgrpo_megatron.experience.soundness import answer_fault
from exgrpo_megatron.types import Group, Trajectory

SCHEMA = pa.schema(
    [
        pa.field("question_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("passed", pa.bool_(), nullable=False),
        pa.field("stop_reason", pa.string(), nullable=False),
        pa.field("policy_version", pa.int64(), nullable=False),
    ]
)
_REFUSED_KEY = b"exgrpo.refused"
"""In a file's metadata: answers that its writer had not kept."""
_FILE = re.compile(r"recent-(\d{5})-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class RecentSnapshot:
    """What a process kept at one moment, by question, oldest first."""

    rows: list[tuple[str, Trajectory]]
    num_refused: int


class RecentAnswers:
    """A queue of answers a question, kept by the process that owns the question; in memory."""

    def __init__(self, config: RepoConfig, seed: int, comm: Communicator) -> None:
        self._config, self._seed, self._comm = config, seed, comm
        self._owner = Owner(comm.rank, comm.size, keeps=comm.member == 0)
        self._kept: dict[str, deque[Trajectory]] = {}
        self.num_refused = 0
        """Answers of this process that were not kept, as they lack one finite log-prob a token; those of before a
        resume are counted by the processes that read their files."""

    def num_answers(self) -> int:
        """Kept by all processes. Collective."""
        return sum(self._comm.all_gather(sum(map(len, self._kept.values()))))

    def off_policy_groups(self, groups: Sequence[Group], step: int) -> list[Group]:
        """For each group whose question has `min_kept` answers, one of those that are chosen, marked as replayed.
        Collective, with all groups on every process."""
        mine = {
            group.question.id: self._chosen(group.question.id, step)
            for group in groups
            if len(self._kept.get(group.question.id, ())) >= self._config.min_kept
        }
        found = all_gather_union(self._comm, mine)
        return [Group(group.question, found[group.question.id]) for group in groups if group.question.id in found]

    def record(self, groups: Iterable[Group]) -> None:
        """Keep the new answers of the groups, the oldest of a question going beyond `max_kept`."""
        for group in groups:
            if self._owner.owns(group.question.id):
                self._keep(group.question.id, group.trajectories)

    def snapshot(self) -> RecentSnapshot:
        """What this process keeps, as it is now."""
        rows = [(name, answer) for name, kept in self._kept.items() for answer in kept]
        return RecentSnapshot(rows, self.num_refused)

    def save(self, snapshot: RecentSnapshot, folder: Path) -> list[Path]:
        """Write a snapshot into `folder`, one file a data-parallel rank; the paths. In any thread."""
        if not self._owner.keeps:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        rows = snapshot.rows
        columns = {
            "question_id": [name for name, _ in rows],
            "token_ids": [answer.token_ids for _, answer in rows],
            "logprobs": [answer.logprobs for _, answer in rows],
            "reward": [answer.reward for _, answer in rows],
            "passed": [answer.correct for _, answer in rows],
            "stop_reason": [answer.stop_reason for _, answer in rows],
            "policy_version": [answer.policy_version for _, answer in rows],
        }
        path = folder / _file_name(self._comm.rank, self._comm.size)
        schema = SCHEMA.with_metadata({_REFUSED_KEY: str(snapshot.num_refused)})
        pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")
        return [path]

    def load(self, folder: Path) -> None:
        """Become what was saved on any number of ranks; collective.

        Raises:
            CheckpointError: a file is missing or damaged; on every process.
        """
        self._kept, self.num_refused = {}, 0
        with together(self._comm):
            files = numbered_files(folder, _FILE, _file_name)
            if not files:
                raise CheckpointError(f"{folder}: no answers of `repo` are there. {REMEDY}")
            for number, path in enumerate(files):
                num_refused = self._read(path)
                # Counted by one of the processes: their sum is that of the run.
                if self._owner.keeps and number % self._comm.size == self._comm.rank:
                    self.num_refused += num_refused

    def _chosen(self, question_id: str, step: int) -> tuple[Trajectory, ...]:
        kept = list(self._kept[question_id])
        rng = generator(self._seed, step, f"repo/{question_id}")
        indices = choose_answers(self._config.choice, [answer.reward for answer in kept], self._config.num_answers, rng)
        return tuple(kept[index] for index in indices)

    def _keep(self, question_id: str, members: Iterable[Trajectory]) -> None:
        queue = self._kept.setdefault(question_id, deque(maxlen=self._config.max_kept))
        for member in members:
            if member.replayed:
                continue
            if answer_fault(member.token_ids, member.logprobs) is not None:
                self.num_refused += 1
                continue
            queue.append(
                Trajectory(
                    member.token_ids,
                    member.logprobs,
                    member.reward,
                    True,
                    member.stop_reason,
                    member.policy_version,
                    passed=member.correct,
                )
            )

    def _read(self, path: Path) -> int:
        """Take what this process owns; returns how many answers the file's writer had refused."""
        try:
            num_refused = int((pq.read_metadata(path).metadata or {}).get(_REFUSED_KEY, 0))
            rows = pq.read_table(path, schema=SCHEMA).to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CheckpointError(f"{path}: {error}. {REMEDY}") from None
        for row in rows:
            name = row["question_id"]
            if self._owner.owns(name):
                answer = Trajectory(
                    token_ids=np.array(row["token_ids"], np.int32),
                    logprobs=np.array(row["logprobs"], np.float32),
                    reward=row["reward"],
                    replayed=True,
                    stop_reason=row["stop_reason"],
                    policy_version=row["policy_version"],
                    passed=row["passed"],
                )
                self._kept.setdefault(name, deque(maxlen=self._config.max_kept)).append(answer)
        return num_refused


def _file_name(rank: int, num_ranks: int) -> str:
    return f"recent-{rank:05d}-of-{num_ranks:05d}.parquet"
