"""Questions, and how they become prompts."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from exgrpo_megatron.config.section import FunctionName, Name, PositiveInt, Section, Seed, Share, key

GeneratorName = Literal["chain_arithmetic", "unknown_symbols"]
PassRateBand = Literal["easy", "medium", "hard"]
ADMITTED_DIFFICULTIES: dict[GeneratorName, range] = {"chain_arithmetic": range(2, 9), "unknown_symbols": range(1, 4)}
"""Terms of a chain, letters of a question."""
DEFAULT_DIFFICULTIES: dict[GeneratorName, tuple[int, ...]] = {
    "chain_arithmetic": (2, 3, 4, 5, 6),
    "unknown_symbols": (2,),
}


class DataSourceConfig(Section):
    """One set of questions: a file, a function of the user's, or a generator."""

    path: Name | None = key(None, "JSONL or Parquet file with one question a row", "path")
    source_function: FunctionName | None = key(
        None,
        "package.module:function or file.py:function of your own instead of a file, called without arguments; gives "
        "one question a row, a mapping of columns (docs/data.md)",
    )
    generator: GeneratorName | None = key(None, "embedded task instead of a file")
    generator_size: PositiveInt = key(400, "questions to generate", "questions")
    generator_seed: Seed = key(0, "seed of the generated questions")
    generator_difficulties: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = key(
        None,
        "difficulties of the generated questions, in turn; chain_arithmetic: terms of a chain, 2 to 8 (null: 2 to 6); "
        "unknown_symbols: letters of a question, 1 to 3 (null: 2)",
    )
    generator_meaning_seed: Seed | None = key(
        None, "seed of the hidden meanings of the letters (unknown_symbols only); null: 0"
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
    max_questions: PositiveInt | None = key(
        None, "use only the first questions of the set (of those that pass_rate_band or _range leaves)", "questions"
    )
    pass_rates_path: Name | None = key(
        None,
        "measured pass rates of the questions, as `exgrpo eval --questions` writes them (JSONL or Parquet)",
        "path",
    )
    pass_rate_band: PassRateBand | None = key(
        None,
        "use only questions of this band. easy: from 75% to below 100%; medium: above 25% to 75%; hard: above 0 to 25%",
    )
    pass_rate_range: tuple[Share, Share] | None = key(
        None, "use only questions whose pass rate is from the first to the second number, both included"
    )

    @model_validator(mode="after")
    def _one_source(self) -> DataSourceConfig:
        given = {"path": self.path, "source_function": self.source_function, "generator": self.generator}
        if sum(value is not None for value in given.values()) != 1:
            shown = ", ".join(f"{name} ({value!r})" for name, value in given.items())
            several = "; generator: null beside another one replaces a generator" if self.generator else ""
            raise ValueError(f"set exactly one of {shown}{several}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_difficulties(cls, raw: Any) -> Any:
        name = raw.get("generator") if isinstance(raw, dict) else None
        if name in DEFAULT_DIFFICULTIES and raw.get("generator_difficulties") is None:
            return {**raw, "generator_difficulties": DEFAULT_DIFFICULTIES[name]}
        return raw

    @model_validator(mode="after")
    def _generator_admits_keys(self) -> DataSourceConfig:
        if self.generator is not None:
            admitted = ADMITTED_DIFFICULTIES[self.generator]
            if not set(self.difficulties) <= set(admitted):
                raise ValueError(
                    f"generator_difficulties = {list(self.difficulties)}: {self.generator} has {admitted[0]} to "
                    f"{admitted[-1]}"
                )
        if self.generator_meaning_seed is not None and self.generator != "unknown_symbols":
            raise ValueError(
                f"generator_meaning_seed = {self.generator_meaning_seed} has no effect with generator = "
                f"{self.generator!r}: only unknown_symbols has hidden meanings; set it to null"
            )
        return self

    @model_validator(mode="after")
    def _pass_rates_are_used(self) -> DataSourceConfig:
        path, band, limits = self.pass_rates_path, self.pass_rate_band, self.pass_rate_range
        if band is not None and limits is not None:
            raise ValueError(f"pass_rate_band = {band!r} and pass_rate_range = {list(limits)}: set one of them to null")
        name = f"pass_rate_band = {band!r}" if band is not None else f"pass_rate_range = {limits and list(limits)}"
        if (band or limits) and path is None:
            raise ValueError(
                f"{name}, but pass_rates_path is null: set it to measured pass rates (`exgrpo eval` writes them)"
            )
        if path is not None and band is None and limits is None:
            raise ValueError(
                f"pass_rates_path = {path!r} has no effect while pass_rate_band and pass_rate_range are null: "
                "set one of them"
            )
        if limits is not None and limits[0] > limits[1]:
            raise ValueError(f"{name}: the first number must not be above the second")
        return self

    @property
    def has_rows(self) -> bool:
        """Whether the questions are rows with columns, of a file or function, and not a generator's."""
        return self.generator is None

    @property
    def described(self) -> str:
        """The file, function or generator, for people."""
        if self.path is not None:
            return self.path
        return f"function {self.source_function}" if self.source_function else f"generator {self.generator}"

    @property
    def difficulties(self) -> tuple[int, ...]:
        """Those of a generator."""
        assert self.generator_difficulties is not None
        return self.generator_difficulties

    @property
    def meaning_seed(self) -> int:
        """Seed of the hidden meanings in force."""
        return self.generator_meaning_seed or 0

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
    def _letters_mean_the_same(self) -> DataConfig:
        if self.validation is None or {self.train.generator, self.validation.generator} != {"unknown_symbols"}:
            return self
        train, held_out = self.train.meaning_seed, self.validation.meaning_seed
        if train != held_out:
            raise ValueError(
                f"train.generator_meaning_seed = {train}, but validation.generator_meaning_seed = {held_out}: what is "
                "learned would not hold for the held-out questions; give both the same"
            )
        return self

    @model_validator(mode="after")
    def _template_has_question(self) -> DataConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError(f"prompt_template must contain {{question}}, found {self.prompt_template!r}")
        return self
