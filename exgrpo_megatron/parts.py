"""What the trainer is made of: protocols for the parts that have more than one implementation, and the bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.algorithm.batch import balanced_shares
from exgrpo_megatron.comm import Communicator, all_gather_concat, in_order
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.demonstrations import Demonstrations
from exgrpo_megatron.data.order import QuestionOrder
from exgrpo_megatron.data.questions import QuestionSet
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.recent_answers import RecentAnswers
from exgrpo_megatron.rewards.verifier import Graded, Verdict
from exgrpo_megatron.rollout.protocol import RolloutEngine, SamplingParams
from exgrpo_megatron.types import Group, Question, ScoredSequence, TokenIds, TrainSequence, UpdateResult


class Policy(Protocol):
    """The trained model, seen from one process. Every method is collective over the processes that share the model."""

    @property
    def version(self) -> int:
        """Optimiser steps applied so far."""

    def score(self, sequences: list[tuple[TokenIds, TokenIds]], temperature: float) -> list[ScoredSequence]:
        """Log-probs and entropies of this rank's (prompt, response) pairs."""

    def update(
        self,
        sequences: list[TrainSequence],
        objective: Objective,
        *,
        temperature: float,
        micro_batch_entropy_coeff: float = 0.0,
        lr_multiplier: float = 1.0,
    ) -> UpdateResult:
        """One optimiser step on every data-parallel rank's share; collective over all processes."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names; collective."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Verifier(Protocol):
    """Grades responses against gold answers."""

    def grade(self, items: Sequence[Graded]) -> list[Verdict]:
        """Verdicts of (response text, gold answer, question text), in order; the last may be left out where the
        verifier does not need it."""

    def check_gold(self, answers: Sequence[str]) -> list[int]:
        """Indices of the gold answers that earn nothing when they are given as the boxed answer to themselves."""

    def close(self) -> None: ...


class Reporter(Protocol):
    """Shows progress; only the main process has one that prints."""

    def step_line(self, metrics: Mapping[str, float]) -> None:
        """One training step is done."""

    def advance(self, text: str = "") -> None:
        """One supervised step is done."""

    def skip(self, steps: int) -> None:
        """So many supervised steps were done by an earlier run."""

    def note(self, text: str) -> None:
        """A line that stands by itself."""


class SilentReporter:
    """The reporter of the other processes."""

    def step_line(self, metrics: Mapping[str, float]) -> None: ...

    def advance(self, text: str = "") -> None: ...

    def skip(self, steps: int) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class UpdateGiven:
    """What an optimiser step is computed from, besides the weights."""

    sequences: list[TrainSequence]
    """Of all data-parallel ranks."""
    share: list[int]
    """Those of this one."""
    objective: Objective
    temperature: float
    micro_batch_entropy_coeff: float
    lr_multiplier: float
    version: int
    """Of the weights before it."""


class StepWatch(Protocol):
    """Looks on while a step runs."""

    def step(self, parts: Parts, step: int) -> AbstractContextManager[None]:
        """Around a step."""

    def groups(self, groups: Sequence[Group]) -> None:
        """The step's groups are graded."""

    def before(self, given: UpdateGiven) -> None:
        """An optimiser step begins."""

    def after(self, result: UpdateResult) -> None:
        """It is done."""

    def judge(self, parts: Parts, metrics: Mapping[str, float]) -> list[str]:
        """What is to be said of the step; collective."""


@dataclass(frozen=True)
class Parts:
    """Everything a run needs, built by `build.py`."""

    config: Config
    comm: Communicator
    policy: Policy
    engine: RolloutEngine
    verifier: Verifier
    tokenizer: PromptTokenizer
    order: QuestionOrder
    experience: ExperienceBuffer
    train: QuestionSet
    validation: tuple[Question, ...]
    sampling: SamplingParams
    model_dir: Path
    """Hugging Face folder the run started from; tokenizer and configuration of the export."""
    demonstrations: Demonstrations | None = None
    """Members of groups that do not come from the run."""
    recent: RecentAnswers | None = None
    """Answers of which off-policy groups are made."""
    watch: StepWatch | None = None
    """Keeps bad steps."""


def score_shared(parts: Parts, pairs: list[tuple[TokenIds, TokenIds]]) -> list[ScoredSequence]:
    """Scores of (prompt, response) pairs under the current policy, in their order; each data-parallel rank scores a
    share. Collective, with the same pairs on every process."""
    return score_by_all(parts.policy, parts.comm, pairs, parts.sampling.temperature)


def score_by_all(
    policy: Policy, comm: Communicator, pairs: list[tuple[TokenIds, TokenIds]], temperature: float
) -> list[ScoredSequence]:
    """`score_shared` of any policy at any temperature."""
    share = balanced_shares([len(prompt) + len(response) for prompt, response in pairs], comm.size)[comm.rank]
    scored = policy.score([pairs[i] for i in share], temperature)
    return in_order(all_gather_concat(comm, list(zip(share, scored, strict=True))))


def update_shared(
    parts: Parts,
    sequences: list[TrainSequence],
    objective: Objective,
    *,
    micro_batch_entropy_coeff: float = 0.0,
    lr_multiplier: float = 1.0,
) -> UpdateResult:
    """One optimiser step on the sequences; each data-parallel rank trains a token-balanced share. Collective, with the
    same sequences on every process."""
    share = balanced_shares([sequence.num_tokens for sequence in sequences], parts.comm.size)[parts.comm.rank]
    temperature, watch = parts.sampling.temperature, parts.watch
    if watch:
        given = (sequences, share, objective, temperature, micro_batch_entropy_coeff, lr_multiplier)
        watch.before(UpdateGiven(*given, version=parts.policy.version))
    result = parts.policy.update(
        [sequences[i] for i in share],
        objective,
        temperature=temperature,
        micro_batch_entropy_coeff=micro_batch_entropy_coeff,
        lr_multiplier=lr_multiplier,
    )
    if watch:
        watch.after(result)
    return result
