"""Batches of supervised fine-tuning, each a function of the seed and the step alone."""

from __future__ import annotations

import logging
import random

import numpy as np

from exgrpo_megatron.config import Config, DataSourceConfig
from exgrpo_megatron.data.embedded_tasks import task_of
from exgrpo_megatron.data.order import permutation
from exgrpo_megatron.data.questions import check_prompt_texts
from exgrpo_megatron.data.solutions import read_solutions
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.errors import DataError
from exgrpo_megatron.types import TokenIds

Example = tuple[TokenIds, TokenIds]
"""Prompt, and the response to learn with its end-of-sequence token."""

_LOG = logging.getLogger(__name__)
_REDRAWS_PER_EXAMPLE = 100


class SFTBatches:
    """Prompts with solutions from `sft.data`, or `data.train` where that is null.

    A file's rows come in whole epochs, each reshuffled. A generator writes new questions for every step, none of them
    held out: a share of `sft.generator_worked_share` with the working, the others with a bare guess.
    """

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        """Read and tokenise the rows of a file or function.

        Raises:
            ConfigError: no solution column is named.
            DataError: at the first row that cannot be used, or where no row is left.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._key = "data.train" if config.sft.data is None else "sft.data"
        self._source = config.data.train if config.sft.data is None else config.sft.data
        self.num_too_long = 0
        """Examples dropped so far for data.max_input_seq_length (prompt) or policy.max_total_sequence_length (all)."""
        self.num_unwritable = 0
        """Examples dropped so far: characters the vocabulary lacks, or the name of a special token."""
        check_prompt_texts(config.data, tokenizer)
        self._examples = self._read(self._source) if self._source.has_rows else []
        if self.num_too_long or self.num_unwritable:
            _LOG.warning(
                "%s: left out %d examples that are too long, and %d that the tokenizer cannot write",
                self._key, self.num_too_long, self.num_unwritable,
            )  # fmt: skip

    @property
    def num_examples(self) -> int | None:
        """Usable rows of the file; None for a generator, which has no end."""
        return len(self._examples) if self._source.has_rows else None

    def batch(self, step: int) -> list[Example]:
        """The sft.train_global_batch_size examples of a step (from 0), whatever was asked before."""
        size, seed = self._config.sft.train_global_batch_size, self._config.sft.seed
        if not self._source.has_rows:
            rng = random.Random(f"{seed}:{step}")
            return [self._generated(rng) for _ in range(size)]
        return [self._examples[index] for index in _epoch_slice(len(self._examples), step * size, size, seed)]

    def _read(self, source: DataSourceConfig) -> list[Example]:
        examples: list[Example] = []
        for solution in read_solutions(source, self._key):
            example = self._example(solution.question, solution.text)
            if example is not None:
                examples.append(example)
            if len(examples) == source.max_questions:
                break
        if not examples:
            raise DataError(f"{self._key}: no row of {source.described} is left: {self._dropped()}")
        return examples

    def _generated(self, rng: random.Random) -> Example:
        for _ in range(_REDRAWS_PER_EXAMPLE):
            example = self._example(
                *task_of(self._source).solution(rng, self._source, self._config.sft.generator_worked_share)
            )
            if example is not None:
                return example
        raise DataError(f"{self._key}: no generated solution can be used: {self._dropped()}")

    def _example(self, question: str, solution: str) -> Example | None:
        """The tokens, or None (counted) where they cannot be used."""
        if not (self._tokenizer.can_write(question) and self._tokenizer.can_write(solution)):
            self.num_unwritable += 1
            return None
        data = self._config.data
        prompt = self._tokenizer.encode_prompt(question, data.system_prompt, data.prompt_template)
        response = np.asarray([*self._tokenizer.encode(solution), self._tokenizer.eos_id], dtype=np.int32)
        total = len(prompt) + len(response)
        if len(prompt) > data.max_input_seq_length or total > self._config.policy.max_total_sequence_length:
            self.num_too_long += 1
            return None
        return prompt, response

    def _dropped(self) -> str:
        return (
            f"{self.num_too_long} are too long (data.max_input_seq_length = {self._config.data.max_input_seq_length}, "
            f"policy.max_total_sequence_length = {self._config.policy.max_total_sequence_length}: raise them), "
            f"{self.num_unwritable} have characters that the tokenizer of {self._tokenizer.folder} cannot write"
        )


def _epoch_slice(num_rows: int, start: int, size: int, seed: int) -> list[int]:
    """Rows at the positions [start, start + size) of the epochs laid end to end."""
    first, last = start // num_rows, (start + size - 1) // num_rows
    epochs = np.concatenate([permutation(num_rows, seed, epoch) for epoch in range(first, last + 1)])
    offset = start - first * num_rows
    return epochs[offset : offset + size].tolist()
