"""The vocabulary of the training loop: question, trajectory, group, and what the policy trains on.

Nothing of it is ever changed. What a step makes by the thousand is not `frozen`, which would take five times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
"""Token ids of one sequence, shape [tokens]."""
Logprobs = NDArray[np.float32]
"""Natural-log probabilities, one per response token, shape [tokens]."""

StopReason = Literal["stop", "length"]
"""`stop`: the stop token was sampled (it is the last token id). `length`: the answer was truncated."""


@dataclass(frozen=True)
class Question:
    """One training or evaluation question, already rendered by the chat template."""

    id: str
    """Unique within its set and stable between runs."""
    prompt_ids: TokenIds
    answer: str
    """The gold answer the verifier compares with."""
    text: str = ""
    """The question as the user wrote it."""
    category: str | None = None
    """Difficulty or topic by which pass rates are also reported."""


@dataclass(slots=True)
class StoredAnswer:
    """A correct answer kept for replay."""

    token_ids: TokenIds
    logprobs: Logprobs
    """Recorded log-probs under the policy that wrote the answer: one finite value a token."""
    policy_version: int
    """Version of the weights that wrote it."""
    step: int
    """Training step at which it was stored."""
    serial: int = -1
    """Its place in the order in which the run met its correct answers; below 0: it is not stored (yet)."""


@dataclass(frozen=True)
class Slot:
    """One question of a batch: new, or replayed with the stored answer that joins its group."""

    question: Question
    stored: StoredAnswer | None


@dataclass(slots=True)
class Trajectory:
    """One member of a group: a response to its question, new or replayed."""

    token_ids: TokenIds
    """Response tokens; the stop token, if one was sampled, is included."""
    logprobs: Logprobs
    """Log-probs under the policy that wrote the response (the denominators of the ratio)."""
    reward: float
    replayed: bool
    stop_reason: StopReason
    policy_version: int
    engine_logprobs: Logprobs | None = None
    """What the rollout engine said of a new response whose `logprobs` the policy recomputed; None for any other."""
    serial: int = -1
    """Of a replayed one: that of the stored answer."""
    passed: bool | None = None
    """Whether the verifier counts it as correct; None: it does where the reward is above 0."""

    @property
    def correct(self) -> bool:
        """Whether it counts in k, may be stored, and helps to retire its question."""
        return self.reward > 0 if self.passed is None else self.passed

    def graded(self, reward: float, passed: bool) -> Trajectory:
        """The same with a verdict; `dataclasses.replace` takes four times as long."""
        return Trajectory(
            self.token_ids,
            self.logprobs,
            reward,
            self.replayed,
            self.stop_reason,
            self.policy_version,
            self.engine_logprobs,
            self.serial,
            passed,
        )


@dataclass(frozen=True)
class Group:
    """All K members answering one question in one step; a replayed member, if any, comes last."""

    question: Question
    trajectories: tuple[Trajectory, ...]

    @property
    def size(self) -> int:
        return len(self.trajectories)

    @cached_property
    def num_correct(self) -> int:
        """k, the replayed member included."""
        return sum([member.correct for member in self.trajectories])

    def solved(self, above: float | None) -> bool:
        """Whether every member is correct, and its reward above `above` if that is given."""
        return all(member.correct and (above is None or member.reward > above) for member in self.trajectories)

    @property
    def replayed(self) -> bool:
        return any([member.replayed for member in self.trajectories])


class AnswerName(NamedTuple):
    """Which stored answer."""

    question_id: str
    serial: int


@dataclass(slots=True)
class TrainSequence:
    """One sequence of an optimiser step, with every constant of its loss already divided by global counts."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    old_logprobs: Logprobs
    """Denominators of the ratio, shape [response tokens]."""
    advantage: float
    replayed: bool
    policy_weight: float
    """Multiplies each response token's policy term: 1 / normaliser (global, hence layout-independent)."""
    entropy_weight: float
    """Multiplies each response token's entropy: coefficient / number of response tokens in the global batch."""
    token_weights: Logprobs | None = None
    """A further constant factor of each response token's policy term, shape [response tokens]; None: 1."""
    stored: AnswerName | None = None
    """The stored answer that is replayed; None: another sequence."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class ScoredSequence:
    """Per response token: log-prob of the token and entropy (nats) of the distribution it was drawn from."""

    logprobs: Logprobs
    entropies: Logprobs


@dataclass(frozen=True)
class LossTerms:
    """What an update reports per response token of this rank's sequences, each of shape [tokens]."""

    log_ratio: Logprobs
    """log pi_new - log pi_old before the update."""
    entropy: Logprobs
    advantage: Logprobs
    replayed: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    """True where the PPO clip removed the token's gradient."""


class ReplayedAnswer(NamedTuple):
    """What the ratio w of a stored answer was when it was replayed, over its tokens and before the optimiser step."""

    name: AnswerName
    mean_ratio: float
    max_ratio: float


@dataclass(frozen=True)
class UpdateResult:
    """One optimiser step."""

    loss: float
    """Sum of the weighted per-token terms over the global batch."""
    grad_norm: float
    """Global L2 norm before clipping."""
    skipped: bool
    """Loss or norm was not finite, or the norm above the bound: weights and optimiser state are unchanged."""
    learning_rate: float
    num_positions: int
    """Of this data-parallel rank's micro-batches, padding included."""
    num_padding: int
    terms: LossTerms = field(repr=False)
    replayed: tuple[ReplayedAnswer, ...] = ()
    """The stored answers among this data-parallel rank's sequences."""
