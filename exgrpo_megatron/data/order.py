"""The order in which fresh questions are used: none twice in a batch, none thrown away, exact after a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.errors import CheckpointError, DataError
from exgrpo_megatron.types import Question


class QuestionOrder:
    """A line of questions that is filled up with a whole epoch whenever it runs out.

    `reshuffle` orders every epoch anew; `same` repeats the order of the first one. The order follows from the seed and
    the epoch alone, and is the same on every machine.
    """

    def __init__(self, questions: Sequence[Question], seed: int, epoch_order: Literal["reshuffle", "same"]) -> None:
        self._questions = tuple(questions)
        self._index = {question.id: index for index, question in enumerate(self._questions)}
        assert len(self._index) == len(self._questions), "question ids are not unique"
        self._seed = seed
        self._epoch_order = epoch_order
        self._removed: set[int] = set()
        self._epoch = 0
        self._line = deque(self._order_of(0))

    @property
    def epoch(self) -> int:
        """The epoch, from 0, to which the questions taken last belong."""
        return self._epoch

    @property
    def next_epoch(self) -> int:
        """The epoch to which the next question in line belongs."""
        return self._epoch + (not self._line)

    @property
    def num_active(self) -> int:
        """Questions that the next epoch will have."""
        return len(self._questions) - len(self._removed)

    def take(self, n: int, exclude: Container[str] = ()) -> list[Question]:
        """The next `n` different questions in line whose ids are not in `exclude`.

        Those passed over keep their place at the head of the line.

        Raises:
            DataError: there are not as many; the line is then as before.
        """
        taken: dict[int, Question] = {}
        passed_over: list[int] = []
        line, epoch = self._line, self._epoch
        looked_at: list[int] = []
        while len(taken) < n:
            if not line:
                # The second time the line runs out, every question has been looked at.
                if epoch > self._epoch:
                    line.extend(looked_at)
                    raise self._too_few(n, exclude)
                epoch += 1
                line.extend(self._order_of(epoch))
                passed_over = [index for index in passed_over if index not in self._removed]
                continue
            index = line.popleft()
            if epoch == self._epoch:
                looked_at.append(index)
            if index in taken or self._questions[index].id in exclude:
                passed_over.append(index)
            else:
                taken[index] = self._questions[index]
        line.extendleft(reversed(passed_over))
        self._epoch = epoch
        return list(taken.values())

    def discard(self, n: int) -> int:
        """Throw the next `n` questions of this epoch away, or what is left of them; returns how many there were."""
        count = min(n, len(self._line))
        for _ in range(count):
            self._line.popleft()
        return count

    def remove(self, ids: Iterable[str], min_remaining: int) -> list[str]:
        """Leave questions out from the next epoch on, one by one while more than `min_remaining` would remain.

        Ids of other question sets, and of questions already out, are passed over. Returns the ids that had to stay.
        """
        stay = []
        # By index: the caller may hand in a set, whose order differs between processes.
        for index in sorted({self._index[name] for name in ids if name in self._index} - self._removed):
            if self.num_active - 1 > min_remaining:
                self._removed.add(index)
            else:
                stay.append(self._questions[index].id)
        return stay

    def bring_back(self, ids: Iterable[str], generator: np.random.Generator) -> int:
        """Take questions that were left out in again: in every epoch from the next one on, and at random places in what
        is left of this one. Ids that are not left out are passed over; returns how many were."""
        back = sorted({self._index[name] for name in ids if name in self._index} & self._removed)
        self._removed.difference_update(back)
        waiting = set(self._line)
        joining = deque(index for index in back if index not in waiting)
        length = len(self._line) + len(joining)
        places = set(generator.choice(length, size=len(joining), replace=False).tolist())
        # Where all who join stand is as likely as any other choice of places; among themselves they are shuffled.
        joining = deque(joining[i] for i in generator.permutation(len(joining)))
        self._line = deque((joining if place in places else self._line).popleft() for place in range(length))
        return len(back)

    def state_dict(self) -> dict[str, Any]:
        """Everything the future depends on, as JSON types."""
        return {
            "seed": self._seed,
            "epoch_order": self._epoch_order,
            "num_questions": len(self._questions),
            "epoch": self._epoch,
            "line": [self._questions[index].id for index in self._line],
            "removed": [self._questions[index].id for index in sorted(self._removed)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: it is of another order (seed, kind) or of other questions.
        """
        self._check_same("grpo.seed", state["seed"], self._seed)
        self._check_same("data.epoch_order", state["epoch_order"], self._epoch_order)
        self._check_same("number of questions", state["num_questions"], len(self._questions))
        unknown = [name for name in (*state["line"], *state["removed"]) if name not in self._index]
        if unknown:
            raise CheckpointError(
                f"the question order of the checkpoint names {len(unknown)} questions that data.train does not have "
                f"(first: {unknown[0]!r}); resume with the questions of that run, or start a new run"
            )
        self._line = deque(self._index[name] for name in state["line"])
        self._removed = {self._index[name] for name in state["removed"]}
        self._epoch = state["epoch"]

    def _order_of(self, epoch: int) -> list[int]:
        drawn_for = epoch if self._epoch_order == "reshuffle" else 0
        # The whole set is ordered first, so that removing a question does not move the others.
        order = permutation(len(self._questions), self._seed, drawn_for).tolist()
        return [index for index in order if index not in self._removed]

    def _too_few(self, n: int, exclude: Container[str]) -> DataError:
        usable = {*self._line, *self._order_of(self._epoch + 1)}
        excluded = sum(self._questions[index].id in exclude for index in usable)
        return DataError(
            f"a step needs {n} different fresh questions, but data.train has only {len(usable) - excluded}: "
            f"{len(self._questions)} questions, {len(self._removed)} of them retired, {excluded} of the others "
            f"replayed in this step; lower grpo.num_prompts_per_step, or use more questions"
        )

    @staticmethod
    def _check_same(name: str, saved: Any, present: Any) -> None:
        if saved != present:
            raise CheckpointError(
                f"the question order of the checkpoint has {name} = {saved!r}, this run {present!r}; resume with the "
                f"saved value, or start a new run"
            )


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """An order of `range(n)` that depends on nothing but the arguments."""
    # Sorting raw PCG64 output: numpy promises these bits for good, but not those of Generator.permutation.
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(np.asarray(raw, dtype=np.uint64), kind="stable")
