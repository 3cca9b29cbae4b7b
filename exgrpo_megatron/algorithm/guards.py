"""Guards of the unclipped mixed phase: limits on a step's ratios, and what steps do for a while once one is crossed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exgrpo_megatron.config import GUARD_LIMITS, GuardsConfig


class Guards:
    """Watches the ratios of steps that replay, and holds later steps to a clip or to on-policy training.

    A step's ratios are known when its updates are done, so that the next step is the first that can be held. A limit
    crossed while steps are held holds `hold_steps` more from there.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self._config = config
        self._hold_until = 0
        self._crossings = 0

    def held(self, step: int) -> bool:
        """Whether the step is held."""
        return self._config.action != "warn" and step <= self._hold_until

    def clips(self, step: int) -> bool:
        """Whether new tokens of the step are clipped, and replayed ones capped."""
        return self._config.action == "clip" and self.held(step)

    def forbids_replay(self, step: int) -> bool:
        """Whether the step must be on-policy."""
        return self._config.action == "on_policy" and self.held(step)

    def crossed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What of the metrics of a step that replays is beyond a limit, by metric; NaN is beyond any."""
        return {
            metric: metrics[metric]
            for name in self._config.limits
            for metric in GUARD_LIMITS[name]
            if metric in metrics and not self._within(name, metrics[metric])
        }

    def observe(self, step: int, crossed: Mapping[str, float]) -> list[str]:
        """Take in what of the step just done was beyond a limit; returns the warning, if there is one to give."""
        if not crossed:
            return []
        self._crossings += 1
        self._hold_until = step + self._config.hold_steps
        listed = "; ".join(
            f"{metric} = {crossed[metric]:.4g} (experience.guards.{name} = {limit:g})"
            for name, limit in self._config.limits.items()
            for metric in GUARD_LIMITS[name]
            if metric in crossed
        )
        return [f"guard of replay crossed: {listed}. {self._what_is_done(step)}"]

    def metrics(self, crossed: Mapping[str, float], *, held: bool) -> dict[str, float]:
        """Of the step just observed, which was `held` or not; nothing where no limit is set."""
        if not self._config.limits:
            return {}
        return {
            "guards/crossed": sum(not crossed.keys().isdisjoint(GUARD_LIMITS[name]) for name in self._config.limits),
            "guards/crossings": self._crossings,
            "guards/held": float(held),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"hold_until": self._hold_until, "crossings": self._crossings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hold_until, self._crossings = state["hold_until"], state["crossings"]

    def _within(self, name: str, value: float) -> bool:
        limit = self._config.limits[name]
        return value >= limit if name.startswith("min_") else value <= limit

    def _what_is_done(self, step: int) -> str:
        first, last = step + 1, self._hold_until
        match self._config.action:
            case "clip":
                return f"Steps {first} to {last} clip new tokens, cap replayed ones (experience.guards.action = 'clip')"
            case "on_policy":
                return f"Steps {first} to {last} replay nothing (experience.guards.action = 'on_policy')"
        return (
            "Nothing is done about it (experience.guards.action = 'warn'): see docs/operations.md, or set it to 'clip' "
            "or 'on_policy'"
        )
