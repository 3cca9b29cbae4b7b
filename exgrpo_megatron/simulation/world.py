"""The parts that a simulated run has in place of model, engine, verifier and tokenizer; the rest of it is real.

A question's prompt is its number. An answer is two tokens: which answer of its question it is, and whether it is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.algorithm.importance import replayed_answers
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.rewards.verifier import Graded, Verdict
from exgrpo_megatron.rollout.protocol import SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.simulation.learner import Learner
from exgrpo_megatron.types import Logprobs, LossTerms, Question, ScoredSequence, TokenIds, TrainSequence, UpdateResult

WRONG, RIGHT = 0, 1
TOKENS = 2
"""Of an answer."""
_TEXTS = (str(WRONG), str(RIGHT))
_RIGHT_VERDICT, _WRONG_VERDICT = Verdict(1.0, "correct"), Verdict(0.0, "wrong")
FIRST_SERIAL = 2**30
"""Serials and log-probs have one number of bits each, so that all records of right answers are of one size."""


class SimulatedEngine:
    """Bernoulli draws in place of samples."""

    shared_by_members = False
    num_restarts = 0

    def __init__(self, learner: Learner, rng: np.random.Generator, distinct: int | None) -> None:
        """`distinct`: how many different right answers a question has, all equally likely; None: no two are alike."""
        self._learner, self._rng, self._distinct = learner, rng, distinct
        self._next_serial = 0
        self._step = 0
        self.policy_version = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        del weights
        self.policy_version = version

    def sample(self, requests: list[SampleRequest], params: SamplingParams) -> list[list[SampledResponse]]:
        """One call is one step."""
        del params
        self._step += 1
        counts = [len(request.seeds) for request in requests]
        rows = np.array([request.prompt_ids[0] for request in requests], dtype=np.int64)
        self._learner.follow(self._step, rows, counts)
        rates = np.repeat(self._learner.rates(rows), counts)
        answers = np.stack([self._serials(len(rates)), self._rng.random(len(rates)) < rates], axis=1).astype(np.int32)
        responses = [
            SampledResponse(token_ids, logprobs, "stop", self.policy_version)
            for token_ids, logprobs in zip(answers, _logprobs(answers), strict=True)
        ]
        ends = np.cumsum(counts).tolist()
        return [responses[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def close(self) -> None:
        return None

    def _serials(self, count: int) -> TokenIds:
        if self._distinct is not None:
            return (FIRST_SERIAL + self._rng.integers(self._distinct, size=count)).astype(np.int32)
        first, self._next_serial = self._next_serial, self._next_serial + count
        return (FIRST_SERIAL + np.arange(first, first + count) % FIRST_SERIAL).astype(np.int32)


class SimulatedPolicy:
    """Learns what `Growth` says from the sequences it is trained on."""

    def __init__(self, learner: Learner, config: Config) -> None:
        self._learner = learner
        self._group_size = config.grpo.num_generations_per_prompt
        self._answers_of_a_step = config.grpo.num_prompts_per_step * self._group_size
        self.version = 0

    def score(self, sequences: list[tuple[TokenIds, TokenIds]], temperature: float) -> list[ScoredSequence]:
        """An answer's entropy never changes."""
        del temperature
        logprobs = [_logprobs(answer[None])[0] for _, answer in sequences]
        return [ScoredSequence(listed, -listed) for listed in logprobs]

    def update(
        self,
        sequences: list[TrainSequence],
        objective: Objective,
        *,
        temperature: float,
        micro_batch_entropy_coeff: float = 0.0,
        lr_multiplier: float = 1.0,
    ) -> UpdateResult:
        """The learner's step; every ratio is 1, and loss and gradient norm are 0."""
        del objective, temperature, micro_batch_entropy_coeff
        useful = [sequence for sequence in sequences if sequence.advantage]
        self._learner.train(
            np.array([sequence.prompt_ids[0] for sequence in useful], dtype=np.int64),
            np.array([sequence.replayed for sequence in useful], dtype=np.bool_),
            self._group_size,
            self._answers_of_a_step,
            lr_multiplier,
        )
        self.version += 1
        terms = _terms(sequences)
        return UpdateResult(
            loss=0.0,
            grad_norm=0.0,
            skipped=False,
            learning_rate=0.0,
            num_positions=TOKENS * len(sequences),
            num_padding=0,
            terms=terms,
            replayed=replayed_answers(sequences, terms),
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def save(self, folder: Path) -> None:
        raise AssertionError(f"a simulated run is not saved ({folder})")

    def load(self, folder: Path) -> None:
        raise AssertionError(f"a simulated run is not loaded ({folder})")


class SimulatedVerifier:
    """Reads whether the answer is right off its last token."""

    def grade(self, items: Sequence[Graded]) -> list[Verdict]:
        return [_RIGHT_VERDICT if item[0] == _TEXTS[RIGHT] else _WRONG_VERDICT for item in items]

    def check_gold(self, answers: Sequence[str]) -> list[int]:
        del answers
        return []

    def close(self) -> None:
        return None


class SimulatedTokenizer(PromptTokenizer):
    """Text is what the verifier looks at: the last token, which says whether the answer is right."""

    def __init__(self) -> None:
        self.folder = Path()

    @property
    def eos_id(self) -> int:
        return RIGHT

    @property
    def eos_text(self) -> str:
        return str(RIGHT)

    def encode(self, text: str) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, token_ids: Iterable[int], *, special_tokens: bool = False) -> str:
        del special_tokens
        return _TEXTS[int(np.asarray(token_ids)[-1])]


def simulated_question(number: int) -> Question:
    """Question `number` of a simulated set."""
    return Question(f"q{number:06d}", np.array([number], dtype=np.int32), answer=str(RIGHT))


def simulated_answer(serial: int) -> tuple[TokenIds, Logprobs]:
    """The right answer with this serial."""
    answers = np.array([[FIRST_SERIAL + serial, RIGHT]], dtype=np.int32)
    return answers[0], _logprobs(answers)[0]


def _logprobs(answers: TokenIds) -> Logprobs:
    """Of answers of shape [answers, tokens]: the same for the same answer, spread evenly from -2 to -1."""
    spread = ((answers[:, :1] - FIRST_SERIAL) * 0.6180339887498949) % 1.0
    return np.broadcast_to(-1.0 - spread, answers.shape).astype(np.float32)


def _terms(sequences: list[TrainSequence]) -> LossTerms:
    zeros = np.zeros(TOKENS * len(sequences), dtype=np.float32)
    advantages = np.repeat([sequence.advantage for sequence in sequences], TOKENS).astype(np.float32)
    replayed = np.repeat(np.array([sequence.replayed for sequence in sequences], dtype=np.bool_), TOKENS)
    return LossTerms(zeros, zeros, advantages, replayed, zeros.astype(np.bool_))
