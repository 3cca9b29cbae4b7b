"""When a loop replays, and what."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, get_args

from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.replay.buffer import Scorer, TrajectoryBuffer
from exgrpo_megatron.replay.strategies import DEFAULT_RANGE, Strategy, check_range
from exgrpo_megatron.replay.trajectories import ReplayedTrajectory

Guide = Literal["entropy_guided", "difficulty_guided", "random"]
_STRATEGIES: dict[str, Strategy] = {
    "entropy_guided": "medium_difficulty_low_entropy",
    "difficulty_guided": "medium_difficulty",
    "random": "uniform",
}


class SelectiveReplay:
    """Replays in some of a loop's steps, and draws from a buffer what is replayed in them."""

    def __init__(
        self,
        strategy: Guide = "entropy_guided",
        replay_probability: float = 0.3,
        medium_difficulty_range: tuple[float, float] | None = None,
        *,
        entropy_percentile: float | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            strategy: `entropy_guided`: questions of medium difficulty, of each the answer of lowest entropy;
                `difficulty_guided`: such questions, and any answer; `random`: any question and answer.
            replay_probability: with which a step replays, 0 to 1; drawn from seed and number of the step alone, as the
                trainer draws it (`experience.replay_probability`).
            medium_difficulty_range: lowest and highest rate of a question, both included; (0.3, 0.7) if not given.
            entropy_percentile: as for `TrajectoryBuffer.sample`.
            seed: of the steps that replay.

        Raises:
            ValueError: an argument is out of range, or has no effect on the strategy.
        """
        if strategy not in _STRATEGIES:
            raise ValueError(f"strategy = {strategy!r}: must be one of {', '.join(get_args(Guide))}")
        if not 0 <= replay_probability <= 1:
            raise ValueError(f"replay_probability = {replay_probability}: must be from 0 to 1")
        self._check_effects(strategy, medium_difficulty_range, entropy_percentile)
        self.strategy, self.replay_probability = strategy, replay_probability
        medium = medium_difficulty_range or DEFAULT_RANGE
        self._limits: dict[str, Any] = {} if strategy == "random" else {"difficulty_range": medium}
        if entropy_percentile is not None:
            self._limits["entropy_percentile"] = entropy_percentile
        self._seed, self._step = seed, 0

    def select(
        self,
        buffer: TrajectoryBuffer,
        size: int,
        *,
        exclude: Collection[str] = frozenset(),
        score: Scorer | None = None,
    ) -> list[ReplayedTrajectory]:
        """What the next step replays: nothing, or answers of `size` different questions, as many as there are to choose
        from. Each call is a step; `exclude` and `score` as for `TrajectoryBuffer.sample`.

        Raises:
            ValueError: as `sample`.
        """
        self._step += 1
        if generator(self._seed, self._step, "replay").random() >= self.replay_probability:
            return []
        return buffer.sample(_STRATEGIES[self.strategy], size=size, exclude=exclude, score=score, **self._limits)

    def state_dict(self) -> dict[str, int]:
        """The number of steps asked for so far, which with the seed decides the next ones."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the step where another stopped."""
        self._step = state["step"]

    @staticmethod
    def _check_effects(strategy: str, medium: tuple[float, float] | None, percentile: float | None) -> None:
        if strategy == "random" and medium is not None:
            raise ValueError("medium_difficulty_range has no effect with strategy = 'random': leave it out")
        if strategy != "entropy_guided" and percentile is not None:
            raise ValueError(f"entropy_percentile has no effect with strategy = {strategy!r}: leave it out")
        if medium is not None:
            check_range("medium_difficulty_range", medium)
