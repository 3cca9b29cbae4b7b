"""When replay is on, which steps replay, and how many of their questions."""

from __future__ import annotations

from collections import deque
from typing import Any

from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.config import ExperienceConfig, whole_share


class ReplaySchedule:
    """Replay's start, by pass rate, epoch or step, or at once; its stop, where the recipe has one; and, while it is on,
    the draw that says which steps replay.

    Two pass rates make a switch with a gap: above `start_pass_rate` replay goes on, below `stop_pass_rate` off, and
    between them it stays as it is, so that a rate that wavers does not turn it over every step. Both are compared with
    the mean of `pass_rate_steps` steps, which begins anew when replay goes on or off.
    """

    def __init__(self, experience: ExperienceConfig, seed: int = 0) -> None:
        self._experience, self._seed = experience, seed
        self._on = experience.in_groups and self._at_once
        self._rates: deque[float] = deque(maxlen=experience.pass_rate_steps)

    @property
    def on(self) -> bool:
        """Whether stored answers join groups: the run is in its mixed phase."""
        return self._on

    @property
    def collecting(self) -> bool:
        """Whether correct answers of the next step are to be stored."""
        return self._experience.enabled and (self._on or self._experience.collect_from == "start")

    def begin(self, step: int, epoch: int) -> bool:
        """Turn replay on where this step (from 1), or the epoch (from 0) its new questions begin in, is the one to
        start with; returns whether the step replays."""
        start_step, start_epoch = self._experience.start_step, self._experience.start_epoch
        reached = (start_step is not None and step >= start_step) or (start_epoch is not None and epoch >= start_epoch)
        if self._experience.in_groups and reached:
            self._on = True
        return self._on and self.drawn(step)

    def drawn(self, step: int) -> bool:
        """Whether chance lets the step replay; of seed and step alone, and also for replay steps."""
        return generator(self._seed, step, "replay").random() < self._experience.replay_probability

    def observe(self, pass_rate: float | None) -> bool:
        """Take in the pass rate of new questions in the step just done; returns whether replay is on from now on.

        None: the step had no new questions, and changes nothing.
        """
        start, stop = self._experience.start_pass_rate, self._experience.stop_pass_rate
        if not self._experience.in_groups or start is None or pass_rate is None:
            return self._on
        self._rates.append(pass_rate)
        if len(self._rates) < self._experience.pass_rate_steps:
            return self._on
        mean = sum(self._rates) / len(self._rates)
        turns = (stop is not None and mean < stop) if self._on else mean > start
        if turns:
            self._on = not self._on
            self._rates.clear()
        return self._on

    def state_dict(self) -> dict[str, Any]:
        return {"on": self._on, "rates": list(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another schedule stopped, unless the recipe has since turned replay off, or on from the start."""
        self._on = self._experience.in_groups and (state["on"] or self._at_once)
        self._rates = deque(state.get("rates", ()), maxlen=self._experience.pass_rate_steps)

    @property
    def _at_once(self) -> bool:
        experience = self._experience
        return (experience.start_pass_rate, experience.start_epoch, experience.start_step) == (None, None, None)


class ReplayStepSchedule:
    """The delayed start of replay steps, likewise for good; none where there are no replay steps."""

    def __init__(self, experience: ExperienceConfig) -> None:
        self._experience = experience
        self._on = experience.in_steps and experience.replay_step.start_pass_rate is None

    @property
    def on(self) -> bool:
        """Whether a step has replay steps, once something is stored."""
        return self._on

    def observe(self, pass_rate: float | None) -> None:
        """Take in the pass rate of new questions in the step just done; None: there were none."""
        threshold = self._experience.replay_step.start_pass_rate
        if not self._experience.in_steps or threshold is None or pass_rate is None:
            return
        self._on = self._on or pass_rate > threshold

    def state_dict(self) -> dict[str, bool]:
        return {"on": self._on}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """As `ReplaySchedule.load_state_dict`."""
        self._on = self._experience.in_steps and (state["on"] or self._experience.replay_step.start_pass_rate is None)


def num_replayed(share: float, num_prompts: int, available: int) -> int:
    """`min(floor(share * num_prompts), available)`."""
    return min(whole_share(share, num_prompts), available)
