"""What the trainer asks of a rollout engine; `torch_engine` is the reference implementation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exgrpo_megatron.types import Logprobs, StopReason, TokenIds


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `temperature=0` is greedy; recorded log-probs are those of the sampled distribution.

    With temperature T > 0 the log-probs are of softmax(logits / T); greedy log-probs are of softmax(logits).
    """

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SampleRequest:
    """Samples wanted for one prompt: one for each seed (so K for a new question, K-1 for a replayed one)."""

    prompt_ids: TokenIds
    seeds: tuple[int, ...]
    """One seed a sample. The same prompt, weights and seed give the same sample whatever else is in the batch."""


@dataclass(slots=True)
class SampledResponse:
    """One sampled response."""

    token_ids: TokenIds
    logprobs: Logprobs
    stop_reason: StopReason
    policy_version: int


class EngineFailure(RuntimeError):
    """The engine died, or was left in a state nobody knows: it must be closed and another one made."""


class RolloutEngine(Protocol):
    """Samples responses from weights it was given."""

    @property
    def num_restarts(self) -> int:
        """How often in this run a failed engine was replaced."""

    @property
    def shared_by_members(self) -> bool:
        """Whether the processes of a data-parallel rank run one engine together.

        If so, all of them call every method together and `sample` with the same requests. If not, each has an engine
        of its own, with all weights, and samples what others do not.
        """

    @property
    def policy_version(self) -> int:
        """Version of the weights last loaded."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by HF-named tensors; a missing, unknown or misshapen tensor raises ValueError
        and leaves the old weights in force."""

    def sample(self, requests: list[SampleRequest], params: SamplingParams) -> list[list[SampledResponse]]:
        """Responses by request, in the order of its seeds."""

    def close(self) -> None: ...
