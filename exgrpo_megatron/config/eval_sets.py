"""Question sets of `exgrpo eval` (`eval.sets`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from exgrpo_megatron.config.section import Name, PositiveInt, Section, key

EvalGroup = Literal["ID", "OOD"]
EVAL_GROUPS: tuple[EvalGroup, ...] = ("ID", "OOD")
GoldForm = Literal["label", "text", "index"]
MIN_TEMPERATURE = 1e-3
"""Of sampling; 0 is greedy decoding."""


class EvalSetConfig(Section):
    """One question set: where it is, how it is asked, and how often."""

    path: Name = key(..., "JSONL or Parquet file with one question a row", "path")
    group: EvalGroup | None = key(
        None,
        "macro average that the set is part of: in (ID) or out of the training distribution (OOD); null: of none",
    )
    question_key: Name = key("question", "column with the question")
    answer_key: Name = key("answer", "column with the gold answer")
    answer_marker: Name | None = key(None, "take the gold answer after the last occurrence of this (GSM8K: '####')")
    id_key: Name | None = key(None, "column with a unique id; null: a hash of question and choices")
    category_key: Name | None = key(None, "column with a category to report avg@k by")
    max_questions: PositiveInt | None = key(None, "use only the first questions of the set", "questions")
    num_samples: PositiveInt = key(1, "answers sampled a question: the k of avg@k and maj@k", "answers")
    pass_at: tuple[PositiveInt, ...] | None = key(
        None, "the k of pass@k; null: 2, 4, 8 and so on below num_samples, and num_samples"
    )
    temperature: Annotated[float, Field(ge=0, le=1e3)] | None = key(
        None, "sampling temperature, 0: greedy decoding; null: eval.temperature"
    )
    prompt_template: str | None = key(
        None, "user message; {question} is replaced, by question and choices; null: data.prompt_template"
    )
    choices_key: Name | Annotated[tuple[Name, ...], Field(min_length=2)] | None = key(
        None,
        "multiple choice: the column with the list of choices (texts, or {label: [...], text: [...]} as in ARC), or a "
        "list of columns with one choice each (GPQA); null: a free answer, graded as env says",
    )
    answer_form: GoldForm | None = key(
        None,
        "what answer_key holds of a choice. label: its letter, or its label in the file; text: its text; index: its "
        "place, counted from 0; null: label (multiple choice only)",
    )
    shuffle_choices: bool = key(False, "put the choices into an order that eval.seed and the question's id give")

    in_training: bool = key(
        False,
        "evaluate the set in training too, when data.validation is (grpo.val_period), as validation/avg/<set>",
    )

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> EvalSetConfig:
        if self.choices_key is None and (self.answer_form is not None or self.shuffle_choices):
            name, value = ("shuffle_choices", "true") if self.shuffle_choices else ("answer_form", self.answer_form)
            raise ValueError(f"{name} = {value} has no effect while choices_key is null: set it, or leave {name} out")
        if self.choices_key is not None and self.answer_marker is not None:
            raise ValueError(f"answer_marker = {self.answer_marker!r} is for free answers, but choices_key is set")
        return self

    @model_validator(mode="after")
    def _samples_fit(self) -> EvalSetConfig:
        beyond = [k for k in self.pass_at or () if k > self.num_samples]
        if beyond:
            raise ValueError(
                f"pass_at = {list(self.pass_at or ())}: {beyond[0]} is above num_samples = {self.num_samples}"
            )
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"temperature = 0 with num_samples = {self.num_samples}: greedy answers to one question are all the "
                "same; set num_samples to 1, or raise the temperature"
            )
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature}: must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        return self

    @model_validator(mode="after")
    def _template_has_question(self) -> EvalSetConfig:
        if self.prompt_template is not None and "{question}" not in self.prompt_template:
            raise ValueError(f"prompt_template must contain {{question}}, found {self.prompt_template!r}")
        return self

    @property
    def choice_columns(self) -> tuple[str, ...]:
        """Columns of the choices, none where answers are free."""
        if self.choices_key is None:
            return ()
        return (self.choices_key,) if isinstance(self.choices_key, str) else self.choices_key

    @property
    def pass_ks(self) -> tuple[int, ...]:
        """The k of pass@k in force, ascending; pass@1 is avg@k unless it is asked for."""
        if self.pass_at is not None:
            return tuple(sorted(set(self.pass_at)))
        powers = [2**n for n in range(1, self.num_samples.bit_length()) if 2**n < self.num_samples]
        return (*powers, self.num_samples) if self.num_samples > 1 else ()

    def training_metrics(self, name: str) -> dict[str, str]:
        """Names of what is measured of the set in training, each with that of its value in a result."""
        passes = {f"validation/pass/{name}/{k}": f"pass@{k}" for k in self.pass_ks}
        majority = {f"validation/maj/{name}": f"maj@{self.num_samples}"} if self.num_samples > 1 else {}
        return {f"validation/avg/{name}": f"avg@{self.num_samples}", **passes, **majority}
