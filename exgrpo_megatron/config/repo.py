"""Replay without management: recent answers, right and wrong, as off-policy groups (RePO, arXiv:2506.09340)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from exgrpo_megatron.config.section import PositiveFloat, Section, key

RepoChoice = Literal["full_scope", "recent", "best_reward", "variance", "symmetric", "random"]
AtLeastTwo = Annotated[int, Field(ge=2)]


class RepoConfig(Section):
    """Off-policy groups; only without experience (`experience.enabled: false`)."""

    enabled: bool = key(
        False,
        "keep the last answers of every question, right and wrong; one that is sampled again has a second group, of "
        "those, whose rewards are compared with one another alone",
    )
    choice: RepoChoice = key(
        "best_reward",
        "which of a question's kept answers are in its second group. full_scope: all; recent: the newest; best_reward: "
        "those with the highest rewards, of equals the oldest; variance: those whose rewards vary most, of equals "
        "those with the highest; symmetric: half of the highest and half of the lowest rewards; random: any",
    )
    num_answers: AtLeastTwo = key(8, "answers of a second group, or as many as there are", "answers")
    max_kept: AtLeastTwo = key(16, "answers of a question that are kept, the newest", "answers")
    min_kept: AtLeastTwo = key(16, "a question has a second group once so many of its answers are kept", "answers")
    weight: PositiveFloat = key(1.0, "weight of the second groups' loss beside that of the new answers")

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> RepoConfig:
        for name, field in type(self).model_fields.items():
            if not self.enabled and getattr(self, name) != field.default:
                raise ValueError(f"{name} = {getattr(self, name)!r} has no effect with enabled = false: set one back")
        if self.choice == "full_scope" and self.num_answers != type(self).model_fields["num_answers"].default:
            raise ValueError(
                f"num_answers = {self.num_answers} has no effect with choice = 'full_scope', which takes all: set one "
                "of them back"
            )
        return self

    @model_validator(mode="after")
    def _enough_are_kept(self) -> RepoConfig:
        if self.min_kept > self.max_kept:
            raise ValueError(
                f"min_kept = {self.min_kept} is above max_kept = {self.max_kept}: no question would ever have so many"
            )
        return self
