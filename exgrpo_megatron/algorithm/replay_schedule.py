"""When replay is on, and how many questions of a step are replayed."""

from __future__ import annotations

from exgrpo_megatron.config import ExperienceConfig, whole_share


class ReplaySchedule:
    """The delayed start: plain on-policy until one step's pass rate is high enough, replay from the next step on."""

    def __init__(self, experience: ExperienceConfig) -> None:
        self._experience = experience
        self._on = experience.in_groups and experience.start_pass_rate is None

    @property
    def on(self) -> bool:
        """Whether stored answers join groups in the next step (which is therefore of the mixed phase)."""
        return self._on

    @property
    def collecting(self) -> bool:
        """Whether correct answers of the next step are to be stored."""
        return self._experience.enabled and (self._on or self._experience.collect_from == "start")

    def observe(self, pass_rate: float) -> bool:
        """Take in the pass rate of the step just done; returns whether replay is on from now on.

        Replay turns on when the rate is strictly above `experience.start_pass_rate`, and never off again.
        """
        threshold = self._experience.start_pass_rate
        if self._experience.in_groups and threshold is not None and pass_rate > threshold:
            self._on = True
        return self._on

    def state_dict(self) -> dict[str, bool]:
        return {"on": self._on}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Go on where another schedule stopped, unless the recipe has since turned replay off, or on from the start."""
        self._on = self._experience.in_groups and (state["on"] or self._experience.start_pass_rate is None)


class ReplayStepSchedule:
    """The delayed start of replay steps, likewise for good; none where there are no replay steps."""

    def __init__(self, experience: ExperienceConfig) -> None:
        self._experience = experience
        self._on = experience.in_steps and experience.replay_step.start_pass_rate is None

    @property
    def on(self) -> bool:
        """Whether a step has replay steps, once something is stored."""
        return self._on

    def observe(self, pass_rate: float) -> None:
        """Take in the pass rate of the step just done."""
        threshold = self._experience.replay_step.start_pass_rate
        if self._experience.in_steps and threshold is not None and pass_rate > threshold:
            self._on = True

    def state_dict(self) -> dict[str, bool]:
        return {"on": self._on}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """As `ReplaySchedule.load_state_dict`."""
        self._on = self._experience.in_steps and (state["on"] or self._experience.replay_step.start_pass_rate is None)


def num_replayed(share: float, num_prompts: int, available: int) -> int:
    """`min(floor(share * num_prompts), available)`."""
    return min(whole_share(share, num_prompts), available)
