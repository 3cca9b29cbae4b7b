"""Question sets of `eval.sets`: their graded answers, and what they come to while a run trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exgrpo_megatron.algorithm.estimates import question_values
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import EVAL_GROUPS, EvalConfig
from exgrpo_megatron.data.questions import QuestionSet
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.evaluator import Evaluator, sample_seed
from exgrpo_megatron.parts import Verifier
from exgrpo_megatron.rewards.choice import ChoiceVerifier, chosen_letter
from exgrpo_megatron.rewards.rules import boxed_answer
from exgrpo_megatron.rollout.protocol import RolloutEngine, SamplingParams
from exgrpo_megatron.types import Question

AnswerRow = dict[str, Any]
"""One graded answer."""


@dataclass(frozen=True)
class SetEvaluator:
    """Samples and grades answers to the questions of a set, with the weights an engine holds."""

    config: EvalConfig
    engine: RolloutEngine
    tokenizer: PromptTokenizer
    sampling: SamplingParams
    comm: Communicator

    def answers(self, name: str, questions: Sequence[Question], verifier: Verifier) -> list[list[AnswerRow]]:
        """All samples of each question, in order, the same on every process; collective.

        `verifier` grades free answers; those of multiple choice are compared by their letter.
        """
        chosen, temperature = self.config.sets[name], self.config.temperature_of(name)
        grader = ChoiceVerifier() if chosen.choices_key else verifier
        asked = Evaluator(self.config, questions, self.engine, grader, self.tokenizer, self.sampling, self.comm)
        n = chosen.num_samples
        graded = asked.graded("greedy" if temperature == 0 else "sampled", temperature, n)
        rows = [self._row(name, row, place % n) for place, (row, _) in enumerate(graded)]
        return [rows[first : first + n] for first in range(0, len(rows), n)]

    def _row(self, name: str, row: dict[str, object], sample: int) -> AnswerRow:
        find = chosen_letter if self.config.sets[name].choices_key else boxed_answer
        return {
            "set": name,
            **row,
            "sample": sample,
            "seed": sample_seed(self.config.seed, str(row["question_id"]), sample),
            "correct": row["status"] == "correct",
            "extracted": find(str(row["response"])),
        }


@dataclass(frozen=True)
class SetsInTraining:
    """The sets that are evaluated while a run trains (`eval.sets.<name>.in_training`)."""

    evaluator: SetEvaluator
    sets: Mapping[str, QuestionSet]
    verifier: Verifier

    def run(self) -> dict[str, float]:
        """Metrics by name, of `metrics.METRICS`; collective. The samples depend on eval.seed and the weights only."""
        metrics: dict[str, float] = {}
        for name, questions in self.sets.items():
            metrics |= self._of_set(name, questions.questions)
        for group in EVAL_GROUPS:
            names = [name for name in self.sets if self.evaluator.config.sets[name].group == group]
            if names:
                metrics[f"validation/macro_avg/{group}"] = sum(metrics[f"validation/avg/{n}"] for n in names) / len(
                    names
                )
        return metrics

    def _of_set(self, name: str, questions: Sequence[Question]) -> dict[str, float]:
        chosen, config = self.evaluator.config.sets[name], self.evaluator.config
        size = max(1, config.save_every // chosen.num_samples)
        answers = [
            group
            for first in range(0, len(questions), size)
            for group in self.evaluator.answers(name, questions[first : first + size], self.verifier)
        ]
        values = question_values(chosen, answers)
        return {metric: float(values[of].mean()) for metric, of in chosen.training_metrics(name).items()}
