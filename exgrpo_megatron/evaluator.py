"""Pass rates on held-out questions: sampled at a temperature, and greedy; overall and by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.comm import Communicator, gather_parts
from exgrpo_megatron.config import EvalConfig
from exgrpo_megatron.data.tokenizer import PromptTokenizer
from exgrpo_megatron.parts import Verifier
from exgrpo_megatron.rewards.verifier import Verdict
from exgrpo_megatron.rollout.protocol import RolloutEngine, SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.sharing import sample_share
from exgrpo_megatron.types import Question, TokenIds


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name, and one row a graded answer."""

    metrics: dict[str, float]
    answers: list[dict[str, object]]
    token_ids: list[TokenIds]
    """Response tokens of each answer; empty unless they were asked for."""


class Evaluator:
    """Evaluates the weights an engine holds."""

    def __init__(
        self,
        config: EvalConfig,
        questions: Sequence[Question],
        engine: RolloutEngine,
        verifier: Verifier,
        tokenizer: PromptTokenizer,
        sampling: SamplingParams,
        comm: Communicator,
        *,
        report_rewards: bool = False,
    ) -> None:
        """`report_rewards`: also the mean reward, which is the pass rate where rewards are 0 and 1."""
        self.config, self.questions, self.comm = config, list(questions), comm
        self.engine, self.verifier, self.tokenizer = engine, verifier, tokenizer
        self.sampling, self.report_rewards = sampling, report_rewards

    def run(self, *, keep_tokens: bool = False) -> Evaluation:
        """Samples, grades and averages; every process evaluates its part and gets the whole result, with the response
        tokens if they are to be kept.

        The samples depend on eval.seed and the weights only, so two evaluations of one model are equal.
        """
        config = self.config
        graded = self.graded("t1", config.temperature, config.num_tests_per_prompt, keep_tokens=keep_tokens)
        if config.greedy:
            graded += self.graded("greedy", 0.0, 1, keep_tokens=keep_tokens)
        rows = [row for row, _ in graded]
        sampled = [row for row in rows if row["mode"] == "t1"]
        return Evaluation(
            metrics={
                **{name: value for mode in ("t1", "greedy") for name, value in _pass_rates(mode, rows).items()},
                **(_mean_rewards(rows) if self.report_rewards else {}),
                "validation/response_length": _mean([float(row["num_tokens"]) for row in sampled]),  # type: ignore[arg-type]
                "validation/truncated": sum(row["stop_reason"] == "length" for row in sampled),
            },
            answers=rows,
            token_ids=[token_ids for _, token_ids in graded if token_ids is not None],
        )

    def graded(
        self, mode: str, temperature: float, samples: int, *, keep_tokens: bool = False
    ) -> list[tuple[dict[str, object], TokenIds | None]]:
        """A row an answer, with its tokens if they are to be kept, question by question; each process samples and
        grades its part. Temperature 0 is greedy."""
        comm = self.comm
        mine = list(range(comm.rank, len(self.questions), comm.size))
        sampling = SamplingParams(self.sampling.max_new_tokens, temperature, self.sampling.stop_token_ids)
        requests = [
            SampleRequest(
                self.questions[i].prompt_ids,
                tuple(sample_seed(self.config.seed, self.questions[i].id, index) for index in range(samples)),
            )
            for i in mine
        ]
        with comm.places.inside(f"evaluation ({mode}): rollout"):
            sampled = sample_share(self.engine, requests, sampling, comm)
        pairs = [(mine[index], response) for index, responses in sampled.items() for response in responses]
        with comm.places.inside(f"evaluation ({mode}): reward"):
            return gather_parts(comm, self._rows(mode, pairs, keep_tokens))

    def _rows(
        self, mode: str, pairs: list[tuple[int, SampledResponse]], keep_tokens: bool
    ) -> list[tuple[int, tuple[dict[str, object], TokenIds | None]]]:
        """Of each (index of the question, response) the index, the row and the tokens, if kept."""
        texts = [self.tokenizer.decode(response.token_ids) for _, response in pairs]
        asked = [self.questions[i] for i, _ in pairs]
        verdicts = self.verifier.grade(
            [(text, question.answer, question.text) for text, question in zip(texts, asked, strict=True)]
        )
        return [
            (i, (_row(mode, self.questions[i], response, text, verdict), response.token_ids if keep_tokens else None))
            for (i, response), text, verdict in zip(pairs, texts, verdicts, strict=True)
        ]


def sample_seed(seed: int, question_id: str, index: int) -> int:
    """Of a question's answer `index` in every evaluation with eval.seed = `seed`."""
    return stable_seed(seed, question_id, index)


def _row(mode: str, question: Question, response: SampledResponse, text: str, verdict: Verdict) -> dict[str, object]:
    return {
        "mode": mode,
        "question_id": question.id,
        "category": question.category,
        "question": question.text,
        "answer": question.answer,
        "response": text,
        "reward": verdict.reward,
        "status": verdict.status,
        "stop_reason": response.stop_reason,
        "num_tokens": len(response.token_ids),
    }


def _pass_rates(mode: str, rows: list[dict[str, object]]) -> dict[str, float]:
    right: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["mode"] == mode:
            right[""].append(row["status"] == "correct")
            if row["category"] is not None:
                right[f"/{row['category']}"].append(row["status"] == "correct")
    return {f"validation/pass_rate_{mode}{suffix}": _mean(values) for suffix, values in sorted(right.items())}


def _mean_rewards(rows: list[dict[str, object]]) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        rewards[f"validation/reward_{row['mode']}"].append(float(row["reward"]))  # type: ignore[arg-type]
    return {name: _mean(values) for name, values in rewards.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
