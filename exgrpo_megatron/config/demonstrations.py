"""Worked solutions of others as members of groups (LUFFY, arXiv:2504.14945)."""

from __future__ import annotations

from pydantic import model_validator

from exgrpo_megatron.config.data import DataSourceConfig
from exgrpo_megatron.config.section import PositiveFloat, Section, key


class DemonstrationsConfig(Section):
    """Off-policy answers that do not come from the run; only without experience (`experience.enabled: false`)."""

    enabled: bool = key(
        False,
        "a demonstration is the last member of each group whose question has one, beside K - 1 sampled answers, and is "
        "graded and compared as they are",
    )
    data: DataSourceConfig | None = key(
        None, "the questions with their solutions: a file with solution_key, or chain_arithmetic; null: data.train"
    )
    ending: str = key(
        "\\boxed{{answer}}",
        "line after a solution without a box; {answer} is replaced by the gold answer of data.train",
    )
    gamma: PositiveFloat = key(
        0.1,
        "a demonstrated token has f(p) = p / (p + gamma) in place of the ratio, p being its probability under the "
        "policy: how likely it was to who wrote it is not known",
    )

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> DemonstrationsConfig:
        for name, field in type(self).model_fields.items():
            if not self.enabled and getattr(self, name) != field.default:
                raise ValueError(f"{name} = {getattr(self, name)!r} has no effect with enabled = false: set one back")
        return self
