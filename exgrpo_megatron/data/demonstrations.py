"""Worked solutions of others, ready to be members of groups (`demonstrations:`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.embedded_tasks import task_of
from exgrpo_megatron.data.solutions import Solution, closed_solutions, read_solutions
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.types import Question, StoredAnswer, TokenIds


class Demonstrations:
    """Token ids of the usable demonstrations of each training question, the same on every process."""

    def __init__(self, config: Config, questions: Sequence[Question], tokenizer: PromptTokenizer) -> None:
        """Read and tokenise them.

        Raises:
            ConfigError: there is no solution column, or the generator has no solutions.
            DataError: at the first row that cannot be used, or where none is left.
        """
        self._config, self._tokenizer = config, tokenizer
        self._seed = config.grpo.seed
        self._left_out: Counter[str] = Counter()
        self._num_questions = len(questions)
        self._by_question: dict[str, list[TokenIds]] = defaultdict(list)
        by_text = {question.text: question for question in questions}
        for question, token_ids in self._read(by_text):
            self._by_question[question.id].append(token_ids)
        if not self._by_question:
            raise DataError(f"{self._key}: no demonstration is left: {self.describe()}")

    def of(self, question: Question, step: int) -> StoredAnswer | None:
        """The demonstration of a question in a step, any of those it has; None where it has none.

        Its recorded log-probs are 0: the ratio against them is the policy's own probability.
        """
        found = self._by_question.get(question.id)
        if not found:
            return None
        index = generator(self._seed, step, f"demonstration/{question.id}").integers(len(found)) if found[1:] else 0
        token_ids = found[index]
        return StoredAnswer(token_ids, np.zeros(len(token_ids), np.float32), policy_version=0, step=step)

    def describe(self) -> str:
        """One line for people."""
        left_out = ", ".join(f"{count} {why}" for why, count in sorted(self._left_out.items()))
        return (
            f"demonstrations: {sum(map(len, self._by_question.values()))} of {len(self._by_question)} of the "
            f"{self._num_questions} training questions; left out: {left_out or 'none'}"
        )

    @property
    def _key(self) -> str:
        return "data.train" if self._config.demonstrations.data is None else "demonstrations.data"

    def _read(self, by_text: Mapping[str, Question]) -> Iterator[tuple[Question, TokenIds]]:
        source = self._config.demonstrations.data or self._config.data.train
        longest = self._config.policy.generation.max_new_tokens
        for solution in self._solutions(by_text):
            question = by_text.get(solution.question)
            if question is None:
                self._left_out["of questions that are not used"] += 1
                continue
            for text in closed_solutions(source, solution.text, question.answer, [self._config.demonstrations.ending]):
                token_ids = np.array([*self._tokenizer.encode(text), self._tokenizer.eos_id], dtype=np.int32)
                if not self._tokenizer.can_write(text):
                    self._left_out["the tokenizer cannot write"] += 1
                elif len(token_ids) > longest:
                    self._left_out[f"longer than policy.generation.max_new_tokens = {longest}"] += 1
                else:
                    yield question, token_ids

    def _solutions(self, by_text: Mapping[str, Question]) -> Iterator[Solution]:
        source = self._config.demonstrations.data or self._config.data.train
        if source.has_rows:
            yield from read_solutions(source, self._key)
            return
        worked = task_of(source).worked
        if worked is None:
            raise ConfigError(
                f"{self._key}.generator = {source.generator!r} has no demonstrations: give a file of them"
            )
        yield from (Solution(text, worked(text)) for text in by_text)
