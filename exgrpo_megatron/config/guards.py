"""Limits on how far replayed and unclipped tokens may be from the policy that wrote them, and what is done beyond."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from exgrpo_megatron.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Share, key

GUARD_LIMITS = {
    "min_ess_replayed": ("ratio_replayed/ess", "ratio_replay_step/ess"),
    "min_ess_fresh": ("ratio_fresh/ess",),
    "max_ratio_replayed": ("ratio_replayed/max", "ratio_replay_step/max"),
    "max_ratio_fresh": ("ratio_fresh/max",),
    "max_kl_replayed": ("ratio_replayed/k3", "ratio_replay_step/k3"),
    "max_kl_fresh": ("ratio_fresh/k3",),
}
"""Key of each limit -> the metrics that it looks at, each by itself."""


class GuardsConfig(Section):
    """Guards of steps that replay: limits (null: none), and what is done from the next step on where one is crossed."""

    min_ess_replayed: Share | None = key(
        None,
        "least effective sample size / tokens of the ratios of replayed tokens, against their recorded log-probs: of "
        "those in groups, and of those in replay steps",
    )
    min_ess_fresh: Share | None = key(None, "the same of new response tokens, in steps that replay")
    max_ratio_replayed: PositiveFloat | None = key(None, "largest ratio w of a replayed token")
    max_ratio_fresh: PositiveFloat | None = key(None, "largest ratio w of a new response token, in steps that replay")
    max_kl_replayed: NonNegativeFloat | None = key(
        None, "largest KL of replayed tokens, mean of w - 1 - log w", "nats a token"
    )
    max_kl_fresh: NonNegativeFloat | None = key(
        None, "largest KL of new response tokens, in steps that replay", "nats a token"
    )
    action: Literal["warn", "clip", "on_policy"] = key(
        "warn",
        "warn: say so, no more; clip: for hold_steps steps new tokens have the PPO clip and replayed tokens whose w is "
        "above ratio_cap no gradient; on_policy: for hold_steps steps nothing is replayed. Both warn too",
    )
    hold_steps: PositiveInt = key(
        10, "how long a clip or on_policy lasts after the last step that crossed a limit", "steps"
    )
    ratio_cap: PositiveFloat | None = key(
        None, "largest w of a replayed token that has a gradient during a clip; null: 1 + loss_fn.ratio_clip_max"
    )

    @model_validator(mode="after")
    def _keys_belong_together(self) -> GuardsConfig:
        self._refuse_without(bool(self.limits), ("action", "hold_steps", "ratio_cap"), "every limit null")
        self._refuse_without(self.action != "warn", ("hold_steps",), "action = 'warn'")
        self._refuse_without(self.action == "clip", ("ratio_cap",), f"action = {self.action!r}")
        return self

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set, by key."""
        return {name: value for name in GUARD_LIMITS if (value := getattr(self, name)) is not None}

    def _refuse_without(self, given: bool, names: tuple[str, ...], otherwise: str) -> None:
        for name in () if given else names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {getattr(self, name)!r} has no effect with {otherwise}: set one of them")
