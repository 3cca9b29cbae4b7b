"""The gate between engine and actor: the same tokens must have the same log-probs under both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.comm import gather_everyone
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.rollout.protocol import SampleRequest
from exgrpo_megatron.types import Logprobs, Question


@dataclass(frozen=True)
class Agreement:
    """One comparison, over the tokens of every process."""

    metrics: dict[str, float]
    fault: str | None
    """What is beyond which limit, with the advice that belongs to it; None where all is well."""


class AgreementGate:
    """Compares the engine's weights, as they are, with the actor's, by sampling some questions once more.

    Questions of the step before catch what other questions would not: prompts the engine still remembers under weights
    it had before.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config.policy.generation.vllm_cfg.agreement
        self._limits = self._config.limits(parts.config.engine_precision)

    def due(self, step: int) -> bool:
        """Whether a comparison follows this step."""
        return self._config.period > 0 and step % self._config.period == 0

    @property
    def stops(self) -> bool:
        """Whether a fault ends the run."""
        return self._config.action == "stop"

    def compare(self, step: int, questions: Sequence[Question]) -> Agreement:
        """Sample, score and compare; collective over all processes, each of which compares its own engine."""
        comm = self._parts.comm
        mine = list(questions)[comm.rank :: comm.size][: self._config.num_prompts]
        pairs = self._logprobs(mine, step)
        everyone = gather_everyone(comm, pairs)
        # One process's engine may be wrong where the mean over all is still small.
        summaries = [_summary(pairs) for pairs in everyone]
        # numpy's maximum of a NaN and a number is NaN, which is within no limit.
        worst = {name: float(np.max([summary[name] for summary in summaries])) for name in _LIMITED}
        metrics = _summary([pair for pairs in everyone for pair in pairs])
        within = all(worst[name] <= limit for name, limit in zip(_LIMITED, self._limits, strict=True))
        return Agreement(
            {**metrics, "agreement/beyond_limits": float(not within)}, None if within else self._describe(worst)
        )

    def _logprobs(self, questions: list[Question], step: int) -> list[tuple[Logprobs, Logprobs]]:
        """(engine's, actor's) log-probs of an answer to each question.

        Processes that share the model score the answers of the first of them. Where this process's engine chose
        another token, which rounding can do, the two have the tokens before it in common.
        """
        parts = self._parts
        seed = parts.config.grpo.seed
        requests = [
            SampleRequest(question.prompt_ids, (stable_seed(seed, "agreement", step, question.id),))
            for question in questions
        ]
        own = [answers[0] for answers in parts.engine.sample(requests, parts.sampling)]
        agreed = parts.comm.agreed(own)
        scored = parts.policy.score(
            [(question.prompt_ids, answer.token_ids) for question, answer in zip(questions, agreed, strict=True)],
            parts.sampling.temperature,
        )
        pairs = []
        for mine, shared, score in zip(own, agreed, scored, strict=True):
            width = min(len(mine.token_ids), len(shared.token_ids))
            differs = np.flatnonzero(mine.token_ids[:width] != shared.token_ids[:width])
            common = int(differs[0]) if len(differs) else width
            pairs.append((mine.logprobs[:common], score.logprobs[:common]))
        return pairs

    def _describe(self, worst: dict[str, float]) -> str:
        key = "policy.generation.vllm_cfg.agreement"
        found = "; ".join(
            f"{words} {worst[name]:.3g} ({limit_key} = {limit:g})"
            for (name, (words, limit_key)), limit in zip(_LIMITED.items(), self._limits, strict=True)
        )
        return (
            f"the rollout engine and the actor give the same tokens other log-probs: {found}; the limits are in {key}. "
            "Either the engine has not the actor's weights, or the two compute in different precision"
        )


_LIMITED = {
    "agreement/max_abs_difference": ("largest difference", "max_abs_difference"),
    "agreement/mean_abs_difference": ("mean difference", "max_mean_difference"),
    "agreement/kl": ("KL", "max_kl"),
}


def _summary(pairs: Sequence[tuple[Logprobs, Logprobs]]) -> dict[str, float]:
    """Differences over all tokens; KL(engine, actor) by the estimate exp(d) - 1 - d, d = actor - engine, of samples
    of the engine: it is never negative, and its mean is that of -d."""
    engine, actor = (
        np.concatenate([np.zeros(0), *[pair[side] for pair in pairs]]).astype(np.float64) for side in (0, 1)
    )
    difference = actor - engine
    some = len(difference) > 0
    return {
        "agreement/max_abs_difference": float(np.abs(difference).max()) if some else 0.0,
        "agreement/mean_abs_difference": float(np.abs(difference).mean()) if some else 0.0,
        "agreement/kl": float((np.expm1(difference) - difference).mean()) if some else 0.0,
        "agreement/tokens": float(len(difference)),
    }
