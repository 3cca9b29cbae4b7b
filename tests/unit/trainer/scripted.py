"""A trainer with everything real but the rollouts: an engine that answers from a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.comm import Communicator, SingleProcess
from exgrpo_megatron.config import Config
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.rollout.protocol import SampledResponse
from exgrpo_megatron.trainer import StepResult, Trainer
from exgrpo_megatron.types import Group, Logprobs, Question, TokenIds, Trajectory

Script = Callable[[str, int], list[str]]
"""(question id, number of samples) to the responses."""
Recorder = Callable[[Question, TokenIds], Logprobs]
"""The log-probs an engine reports of a response."""


class ScriptedEngine:
    """Answers each request by `script(question id, number of samples) -> responses`; a real engine's protocol.

    It reports log-probs of -0.5 a token, unless `recorder` is set, and cuts a response at its longest length.
    """

    shared_by_members = False

    def __init__(self, tokenizer: Any, questions: Any, script: Script) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.by_prompt = {tuple(question.prompt_ids): question for question in questions}
        self.policy_version = -1
        self.recorder: Recorder = lambda _, ids: np.full(len(ids), -0.5, dtype=np.float32)
        self.calls: list[tuple[str, int]] = []
        self.num_restarts = 0

    def load_weights(self, weights, version):
        self.num_tensors = sum(1 for _ in weights)
        self.policy_version = version

    def sample(self, requests, params):
        return [self._responses(request, params.max_new_tokens) for request in requests]

    def close(self):
        pass

    def _responses(self, request, longest):
        question = self.by_prompt[tuple(request.prompt_ids)]
        self.calls.append((question.id, len(request.seeds)))
        texts = self.script(question.id, len(request.seeds))
        assert len(texts) == len(request.seeds)
        return [self._response(question, text, longest) for text in texts]

    def _response(self, question, text, longest):
        ids = np.array([*self.tokenizer.encode(text), self.tokenizer.eos_id], dtype=np.int32)
        reason = "stop" if len(ids) <= longest else "length"
        ids = ids[:longest]
        return SampledResponse(ids, self.recorder(question, ids), reason, self.policy_version)


def write_questions(path: Path, count: int) -> None:
    """Question i is `i+1`, with id `q<i>` and answer i + 1."""
    rows = [{"id": f"q{i}", "question": f"{i}+1", "answer": str(i + 1)} for i in range(1, count + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def right(question_id: str, style: int = 0) -> str:
    """A correct answer; each style is another token sequence."""
    number = int(question_id[1:])
    working = f"{number}+1={number + 1}\n" * style
    return f"{working}\\boxed{{{number + 1}}}"


def wrong(question_id: str) -> str:
    return f"\\boxed{{{int(question_id[1:]) + 50}}}"


def all_wrong(question_id: str, samples: int) -> list[str]:
    return [wrong(question_id)] * samples


def half_right(question_id: str, samples: int) -> list[str]:
    """Two different right answers, then wrong ones."""
    return [right(question_id), right(question_id, 1), wrong(question_id), wrong(question_id)][:samples]


def make_config(tmp_path: Path, num_questions: int = 12, **sections: Any) -> Config:
    """B = 4, K = 4, replay from the first step, on a file of questions; `sections` are merged over it."""
    write_questions(tmp_path / "questions.jsonl", num_questions)
    raw: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 50, "seed": 10},
        "data": {"train": {"path": str(tmp_path / "questions.jsonl"), "id_key": "id"}, "max_input_seq_length": 16},
        "policy": {
            "model_name": "embedded:chain-qwen2",
            "train_global_batch_size": 16,
            "max_total_sequence_length": 128,
            "megatron_cfg": {"optimizer": {"lr": 1e-4}},
        },
        "experience": {"start_pass_rate": None},
        "logger": {"log_dir": str(tmp_path / "run"), "tensorboard_enabled": False},
    }
    return parse_recipe(_merged(raw, sections))


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    inner = {
        name: _merged(below[name], value)
        for name, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(name), dict)
    }
    return {**below, **above, **inner}


def build_trainer(
    tmp_path: Path, script: Script | None, *, comm: Communicator | None = None, **sections: Any
) -> Trainer:
    """A trainer whose engine follows `script`, or with the embedded engine where it is None; see `make_config`."""
    comm = comm or SingleProcess()
    config = make_config(tmp_path, **sections)
    inputs = run_inputs.load_inputs(config, comm)
    actor = build.build_rl_actor(config, inputs.model_dir, comm)
    parts = build.build_parts(config, inputs, actor, comm)
    if script is not None:
        parts = replace(parts, engine=ScriptedEngine(inputs.tokenizer, inputs.train.questions, script))
    trainer = Trainer(parts)
    trainer.push_weights()
    return trainer


def token_ids(trainer: Trainer, text: str) -> TokenIds:
    """The response that says `text` and stops."""
    return np.array([*trainer.parts.tokenizer.encode(text), trainer.parts.tokenizer.eos_id], dtype=np.int32)


def logprobs_at_ratio(trainer: Trainer, question: Question, ids: TokenIds, ratio: float) -> Logprobs:
    """Denominators that give every token of the response the ratio w = `ratio` under the policy as it is now."""
    return all_logprobs_at_ratio(trainer, question, [ids], ratio)[0]


def all_logprobs_at_ratio(
    trainer: Trainer, question: Question, responses: Sequence[TokenIds], ratio: float
) -> list[Logprobs]:
    """`logprobs_at_ratio` of several responses, scored together."""
    pairs = [(question.prompt_ids, ids) for ids in responses]
    scored = trainer.parts.policy.score(pairs, trainer.parts.sampling.temperature)
    return [each.logprobs - np.float32(np.log(ratio)) for each in scored]


def plant(
    trainer: Trainer, question_id: str, answers: Sequence[str | TokenIds], *, k: int = 0, ratio: float = 1.0
) -> None:
    """Store correct answers, in bucket `k` (default: their number), by recording a group that has them.

    Their recorded log-probs are such that the ratio is `ratio` under the policy as it is now.
    """
    question = trainer.questions[question_id]
    size = trainer.config.grpo.num_generations_per_prompt
    responses = [token_ids(trainer, answer) if isinstance(answer, str) else answer for answer in answers]
    responses += responses[:1] * (k - len(responses))
    rewards = [1.0] * len(responses) + [0.0] * (size - len(responses))
    responses += [token_ids(trainer, wrong(question_id))] * (size - len(responses))
    recorded = all_logprobs_at_ratio(trainer, question, responses, ratio)
    members = [
        Trajectory(ids, logprobs, reward, False, "stop", 0)
        for ids, logprobs, reward in zip(responses, recorded, rewards, strict=True)
    ]
    trainer.parts.experience.record([Group(question, tuple(members))], step=0, collect=True)


def replayed_members(groups: Sequence[Group]) -> dict[str, Trajectory]:
    """Question id -> the stored answer in its group."""
    return {group.question.id: member for group in groups for member in group.trajectories if member.replayed}


def fresh_ids(result: StepResult) -> list[str]:
    """The new questions of a step, in order."""
    return [group.question.id for group in result.groups if not group.replayed]
