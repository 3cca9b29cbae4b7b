"""What a run has spent so far."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exgrpo_megatron.types import Group

logger = logging.getLogger(__name__)


@dataclass
class Budget:
    """Cumulative over training steps, on all ranks; evaluations are not in it."""

    answers: int = 0
    """New answers generated."""
    tokens: int = 0
    """Tokens of these."""
    stored_answers: int = 0
    """Stored answers trained on, each time it is: as members of groups and in replay steps."""

    def add(self, groups: Sequence[Group], num_replay_step_answers: int) -> None:
        """Take in a step."""
        members = [member for group in groups for member in group.trajectories]
        new = [member for member in members if not member.replayed]
        self.answers += len(new)
        self.tokens += sum(len(member.token_ids) for member in new)
        self.stored_answers += len(members) - len(new) + num_replay_step_answers

    def metrics(self, optimizer_steps: int) -> dict[str, float]:
        return {**{f"budget/{name}": value for name, value in asdict(self).items()},
                "budget/optimizer_steps": optimizer_steps}  # fmt: skip

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def resumed(cls, state: dict[str, Any] | None) -> Budget:
        """What was saved; anew, with a warning, from a checkpoint that has none."""
        if state is None:
            logger.warning("the checkpoint is of a version that counted no budget: budget/... begins anew")
            return cls()
        return cls(**state)
