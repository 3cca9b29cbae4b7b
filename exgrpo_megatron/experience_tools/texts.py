"""Texts of questions and answers, as far as the data and the tokenizer are at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from exgrpo_megatron.config import Config
from exgrpo_megatron.data.embedded_model import is_embedded
from exgrpo_megatron.data.questions import questions_as_written
from exgrpo_megatron.data.tokenizer import PromptTokenizer, load_tokenizer
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.experience.files import VocabularyName
from exgrpo_megatron.experience_tools.sources import Source
from exgrpo_megatron.types import StoredAnswer


@dataclass
class Texts:
    """Read when they are first asked for; `notes` says what could not be."""

    source: Source
    recipe: Path | None = None
    """Instead of the recipe of the run."""
    tokenizer_dir: Path | None = None
    """Instead of the folder that the recipe names."""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def config(self) -> Config | None:
        found = self.source.config(self.recipe)
        if found is None and self.tokenizer_dir is None:
            self.notes.append("no recipe beside the answers: texts and the tokenizer are not at hand")
        return found

    @cached_property
    def questions(self) -> dict[str, str]:
        """Question id -> text, of data.train."""
        if self.config is None:
            return {}
        try:
            return {question.id: question.text for question in questions_as_written(self.config.data.train)}
        except (ConfigError, DataError, OSError) as error:
            self.notes.append(f"texts of questions are not at hand: {error}")
            return {}

    @cached_property
    def tokenizer(self) -> PromptTokenizer | None:
        folder = self.tokenizer_dir or (tokenizer_folder(self.config) if self.config else None)
        if folder is None:
            return None
        try:
            return load_tokenizer(folder)
        except ConfigError as error:
            if self.tokenizer_dir:
                raise
            self.notes.append(f"the tokenizer is not at hand: {error}")
            return None

    def of_answer(self, answer: StoredAnswer) -> str | None:
        """With its special tokens; None without a tokenizer, or with ids that it lacks."""
        if self.tokenizer is None or int(answer.token_ids.max(initial=0)) >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode(answer.token_ids.tolist(), special_tokens=True)

    def vocabulary(self) -> VocabularyName | None:
        """What the files say their token ids are of, or else the tokenizer at hand."""
        summary = self.source.summary()
        if summary and summary.tokenizer:
            return summary.tokenizer
        return vocabulary_name(self.tokenizer, self._name()) if self.tokenizer else None

    def _name(self) -> str:
        if self.tokenizer_dir or self.config is None:
            return str(self.tokenizer_dir)
        return self.config.policy.tokenizer.name or self.config.policy.model_name


def vocabulary_name(tokenizer: PromptTokenizer, name: str) -> VocabularyName:
    return VocabularyName(name, tokenizer.vocab_size, tokenizer.fingerprint)


def tokenizer_folder(config: Config) -> Path:
    """Where a recipe's tokenizer is; an embedded model lies in the run's folder."""
    if config.policy.tokenizer.name:
        return Path(config.policy.tokenizer.name)
    name = config.policy.model_name
    return Path(config.logger.log_dir) / "model" if is_embedded(name) else Path(name)
