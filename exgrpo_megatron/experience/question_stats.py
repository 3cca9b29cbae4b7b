"""What is known of every attempted question, stored or not: columns beside the index, alike on every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.experience.columns import Columns
from exgrpo_megatron.experience.ids import ABSENT, IdTable
from exgrpo_megatron.types import Group

MAX_WINDOW = 128
"""Results a question that can be kept; a bit each."""
Rows = NDArray[np.int64]
"""Questions, by their rows in the table of ids."""
Values = NDArray[np.float64]

_MOST_REPLAYS = int(np.iinfo(np.uint16).max)
_NAN_AT_FIRST = {"pass_rate", "reward_mean", "reward_variance"}
_ALWAYS = {"attempts": np.uint32, "last_step": np.int32, "replays": np.uint16}


@dataclass(frozen=True)
class StatsKept:
    """Which columns are kept beside the three that always are (attempts, last step, replays: 10 bytes a question)."""

    pass_rate_decay: float | None = None
    """How much of the running pass rate stays when a group is added; None: none is kept (4 bytes)."""
    window: int = 0
    """Results of this many attempts are kept, up to `MAX_WINDOW` (a bit each and 2 bytes)."""
    rewards: bool = False
    """Mean and variance of the last group's rewards (8 bytes)."""

    def __post_init__(self) -> None:
        assert 0 <= self.window <= MAX_WINDOW, f"a window of {self.window} attempts is not in 0..{MAX_WINDOW}"

    @property
    def types(self) -> dict[str, np.dtype[np.generic]]:
        """Columns by name."""
        types: dict[str, type | str] = {**_ALWAYS}
        if self.pass_rate_decay is not None:
            types["pass_rate"] = np.float32
        if self.window:
            types |= {"results": f"V{self.window_bytes}", "known": np.uint8, "right": np.uint8}
        if self.rewards:
            types |= {"reward_mean": np.float32, "reward_variance": np.float32}
        return {name: np.dtype(kind) for name, kind in types.items()}

    @property
    def window_bytes(self) -> int:
        return (self.window + 7) // 8


class QuestionStats:
    """Statistics of questions by id, and, for many at once, by row.

    An attempt is one new answer: the stored member of a group is none. Where a question was never attempted, rates and
    moments of rewards are NaN.
    """

    def __init__(self, kept: StatsKept, ids: IdTable) -> None:
        self.kept, self.ids = kept, ids
        self._columns = Columns(**kept.types)

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self._columns.nbytes

    def observe(self, row: int, group: Group, step: int) -> None:
        """Take in a rewarded group of the question."""
        self.reach(row)
        columns, kept = self._columns, self.kept
        results = [member.correct for member in group.trajectories if not member.replayed]
        columns["last_step"][row] = step
        columns["attempts"][row] += len(results)
        if kept.pass_rate_decay is not None and results:
            old, new = float(columns["pass_rate"][row]), sum(results) / len(results)
            mixed = kept.pass_rate_decay * old + (1 - kept.pass_rate_decay) * new
            columns["pass_rate"][row] = new if np.isnan(old) else mixed
        if kept.window:
            self._remember(row, results)
        if kept.rewards:
            rewards = np.array([member.reward for member in group.trajectories], np.float64)
            columns["reward_mean"][row], columns["reward_variance"][row] = rewards.mean(), rewards.var()

    def count_replay(self, row: int) -> None:
        """One of the question's answers is replayed."""
        self.reach(row)
        replays = self._columns["replays"]
        replays[row] = min(int(replays[row]) + 1, _MOST_REPLAYS)

    def running_pass_rate(self, question_id: str) -> float:
        """Of one question; NaN where it was never attempted."""
        return float(self.pass_rates(self.rows([question_id]))[0])

    def attempts(self, question_id: str) -> int:
        """New answers so far."""
        return int(self.column("attempts", self.rows([question_id]))[0])

    def last_step(self, question_id: str) -> int | None:
        """The step in which it was last attempted; None: never."""
        attempted = self.attempts(question_id)
        return int(self.column("last_step", self.rows([question_id]))[0]) if attempted else None

    def replays(self, question_id: str) -> int:
        """How often one of its stored answers was replayed, up to 65535."""
        return int(self.column("replays", self.rows([question_id]))[0])

    def recent_results(self, question_id: str) -> list[bool]:
        """Whether each of its last attempts was right, newest first, at most as many as are kept."""
        row = int(self.rows([question_id])[0])
        if row == ABSENT or row >= len(self._columns) or not self.kept.window:
            return []
        bits = int.from_bytes(self._columns["results"][row].tobytes(), "little")
        return [bool(bits >> age & 1) for age in range(int(self._columns["known"][row]))]

    def rows(self, question_ids: Sequence[str]) -> Rows:
        """Rows of questions, ABSENT for those that nobody met."""
        return np.array([self.ids.find(name) for name in question_ids], np.int64)

    def column(self, name: str, rows: Rows) -> NDArray[np.generic]:
        """Values of one column; for rows without an attempt 0, or NaN for rates and moments of rewards."""
        # As unsigned numbers rows below 0 are beyond every end, too.
        if len(rows) and int(rows.view(np.uint64).max()) < len(self._columns):
            return self._columns[name].take(rows)
        values = np.zeros(len(rows), self._columns[name].dtype)
        if name in _NAN_AT_FIRST:
            values[:] = np.nan
        there = (rows >= 0) & (rows < len(self._columns))
        values[there] = self._columns[name][rows[there]]
        return values

    def pass_rates(self, rows: Rows) -> Values:
        """Running pass rates over new answers: the first group's, then decay * old + (1 - decay) * the group's."""
        assert self.kept.pass_rate_decay is not None, "no running pass rate is kept"
        return self.column("pass_rate", rows).astype(np.float64)

    def window_rates(self, rows: Rows) -> Values:
        """Shares of right answers among the last attempts, as many as there are up to the window."""
        assert self.kept.window, "no results are kept"
        with np.errstate(invalid="ignore"):
            return np.divide(self.column("right", rows), self.column("known", rows), dtype=np.float64)

    def reward_moments(self, rows: Rows) -> tuple[Values, Values]:
        """Mean and variance (of the members, not an estimate) of the last group's rewards, its stored answer's too."""
        assert self.kept.rewards, "no rewards are kept"
        mean, variance = (self.column(name, rows).astype(np.float64) for name in ("reward_mean", "reward_variance"))
        return mean, variance

    def known_rows(self) -> Rows:
        """Questions with anything to say."""
        return np.flatnonzero((self._columns["attempts"] > 0) | (self._columns["replays"] > 0))

    def reach(self, row: int) -> None:
        """Have room for the row."""
        if row >= len(self._columns):
            first = self._columns.extend(row + 1 - len(self._columns))
            for name in _NAN_AT_FIRST & self.kept.types.keys():
                self._columns[name][first:] = np.nan

    def put(self, name: str, rows: Rows, values: NDArray[np.generic]) -> None:
        """Set a column, of rows for which there is room."""
        self._columns[name][rows] = values

    def _remember(self, row: int, results: list[bool]) -> None:
        """The newest result is the lowest bit."""
        columns, size = self._columns, self.kept.window
        bits = int.from_bytes(columns["results"][row].tobytes(), "little")
        for result in results:
            bits = bits << 1 | result
        bits &= (1 << size) - 1
        columns["results"][row] = np.void(bits.to_bytes(self.kept.window_bytes, "little"))
        columns["known"][row] = min(int(columns["known"][row]) + len(results), size)
        columns["right"][row] = bits.bit_count()
