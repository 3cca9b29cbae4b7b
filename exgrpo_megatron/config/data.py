"""Questions, and how they become prompts."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from exgrpo_megatron.config.section import Name, PositiveInt, Section, Seed, key


class DataSourceConfig(Section):
    """One set of questions: a file, or a generator."""

    path: Name | None = key(None, "JSONL or Parquet file with one question a row", "path")
    generator: Literal["chain_arithmetic"] | None = key(None, "embedded task instead of a file")
    generator_size: PositiveInt = key(400, "questions to generate", "questions")
    generator_seed: Seed = key(0, "seed of the generated questions")
    generator_difficulties: Annotated[tuple[Annotated[int, Field(ge=2, le=8)], ...], Field(min_length=1)] = key(
        (2, 3, 4, 5, 6), "numbers of terms in a generated chain"
    )
    question_key: Name = key("question", "column with the question")
    answer_key: Name = key("answer", "column with the gold answer")
    answer_marker: Name | None = key(None, "take the gold answer after the last occurrence of this (GSM8K: '####')")
    id_key: Name | None = key(None, "column with a unique id; null: a hash of the question text")
    category_key: Name | None = key(None, "column with a category to report pass rates by")
    solution_key: Name | None = key(None, "column with a worked solution (supervised fine-tuning, `exgrpo prefill`)")
    solution_remove: str | None = key(
        None, "regular expression: what it matches is cut from solutions (GSM8K: <<.*?>>)"
    )
    max_questions: PositiveInt | None = key(None, "use only the first questions of the set", "questions")

    @model_validator(mode="after")
    def _one_source(self) -> DataSourceConfig:
        if (self.path is None) == (self.generator is None):
            rule = f"set exactly one of path ({self.path!r}) and generator ({self.generator!r})"
            raise ValueError(f"{rule}; generator: null beside a path replaces a generator" if self.path else rule)
        return self

    @field_validator("solution_remove")
    @classmethod
    def _is_regular_expression(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        return value


class DataConfig(Section):
    """Questions, and how they become prompts."""

    train: DataSourceConfig = key(..., "training questions")
    validation: DataSourceConfig | None = key(None, "held-out questions")
    system_prompt: str | None = key(None, "system message put before every question")
    prompt_template: str = key("{question}", "user message; {question} is replaced")
    max_input_seq_length: PositiveInt = key(512, "longer prompts are dropped, counted and reported", "tokens")
    epoch_order: Literal["reshuffle", "same"] | None = key(
        None, "order of the questions in later epochs; null: as the variant says"
    )

    @model_validator(mode="after")
    def _template_has_question(self) -> DataConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError(f"prompt_template must contain {{question}}, found {self.prompt_template!r}")
        return self
