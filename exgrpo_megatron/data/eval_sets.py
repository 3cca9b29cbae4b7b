"""Question sets of `exgrpo eval`: free answers as in training, and multiple choice with lettered choices."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.config import DataConfig, DataSourceConfig, EvalSetConfig
from exgrpo_megatron.data.questions import CollectedQuestions, Entry, QuestionSet, entry_of_row
from exgrpo_megatron.data.rows import Row, read_rows
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.errors import ConfigError, DataError

LETTERS = string.ascii_uppercase


def load_eval_set(
    name: str,
    config: EvalSetConfig,
    data: DataConfig,
    tokenizer: PromptTokenizer,
    seed: int,
    on_row: Callable[[], None] = lambda: None,
) -> QuestionSet:
    """The questions of a set; those of multiple choice end in their choices, and their answer is the letter of one.

    `data` has the system prompt, the longest prompt, and the template where the set has none. `on_row` is called a row.

    Raises:
        DataError: at the first row that cannot be used, or where no question is left.
        ConfigError: the tokenizer cannot write the set's prompt template.
    """
    key = f"eval.sets.{name}"
    template = data.prompt_template if config.prompt_template is None else config.prompt_template
    if not tokenizer.can_write(template.replace("{question}", ""), special_tokens=True):
        raise ConfigError(
            f"{key}.prompt_template = {template!r} has characters that the tokenizer of {tokenizer.folder} cannot write"
        )
    prompts = data.model_copy(update={"prompt_template": template})
    collected = CollectedQuestions(prompts, tokenizer, lambda _: True)
    for entry in _entries(config, f"{key}.path", seed):
        on_row()
        collected.add(entry)
        if len(collected.questions) == config.max_questions:
            break
    return collected.finish(key, config.path)


def _entries(config: EvalSetConfig, key: str, seed: int) -> Iterator[Entry]:
    columns = ("question_key", "answer_key", "answer_marker", "id_key", "category_key")
    source = DataSourceConfig(path=config.path, **{column: getattr(config, column) for column in columns})
    optional = [column for column in (config.id_key, config.category_key) if column is not None]
    wanted = [config.question_key, config.answer_key, *optional, *config.choice_columns]
    for row in read_rows(config.path, wanted, key):
        if config.choices_key is None:
            yield entry_of_row(row, source)
        else:
            yield _choice_entry(row, config, source, seed)


def _choice_entry(row: Row, config: EvalSetConfig, source: DataSourceConfig, seed: int) -> Entry:
    texts, labels = _choices(row, config)
    right = _right_choice(row, config, texts, labels)
    entry = entry_of_row(row, source)
    # Without an id in the file, the same question with other choices is another question.
    as_written = _with_choices(entry.text, texts)
    question_id = hashlib.sha256(as_written.encode()).hexdigest()[:16] if config.id_key is None else entry.id
    order = np.arange(len(texts))
    if config.shuffle_choices:
        order = np.random.default_rng(stable_seed(seed, question_id, "choices")).permutation(len(texts))
    return Entry(
        id=question_id,
        text=_with_choices(entry.text, [texts[i] for i in order]),
        answer=LETTERS[order.tolist().index(right)],
        category=entry.category,
        place=entry.place,
    )


def _with_choices(question: str, texts: list[str]) -> str:
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    return "\n".join([f"{question}\n", *lines])


def _choices(row: Row, config: EvalSetConfig) -> tuple[list[str], list[str]]:
    """Texts and labels; where the file has no labels, the letters."""
    columns = config.choice_columns
    value: Any = row.values[columns[0]]
    labels = None
    if not isinstance(config.choices_key, str):
        value = [row.values[name] for name in columns]
    if isinstance(value, Mapping):
        value, labels = value.get("text"), value.get("label")
    texts = _texts(row, columns[0], value)
    named = list(LETTERS[: len(texts)]) if labels is None else _texts(row, columns[0], labels)
    if not 2 <= len(texts) <= len(LETTERS) or len(named) != len(texts) or len(set(named)) < len(named):
        raise DataError(
            f'{row.place}: "{columns[0]}" must be 2 to {len(LETTERS)} choices with as many different labels, if any; '
            f"found {len(texts)} choices and the labels {named}"
        )
    return texts, named


def _texts(row: Row, column: str, values: object) -> list[str]:
    if not isinstance(values, list | tuple):
        raise DataError(
            f'{row.place}: "{column}" must be a list of choices, or an object with the lists "text" and "label"; '
            f"found {type(values).__name__}"
        )
    return [Row(row.place, {column: value}).text_or_number(column) for value in values]


def _right_choice(row: Row, config: EvalSetConfig, texts: list[str], labels: list[str]) -> int:
    gold = row.text_or_number(config.answer_key)
    form = config.answer_form or "label"
    among = {"label": labels, "text": texts, "index": [str(place) for place in range(len(texts))]}[form]
    places = [place for place, name in enumerate(among) if name == gold]
    if len(places) != 1:
        raise DataError(
            f'{row.place}: "{config.answer_key}" = {gold!r} is the {form} of {len(places)} choices, must be that of '
            f"one of {among}; correct the row, or answer_form in the recipe"
        )
    return places[0]
