"""A trainer with everything real but the rollouts: an engine that answers from a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_megatron import build
from exgrpo_megatron.comm import Communicator, SingleProcess
from exgrpo_megatron.config import Config
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.rollout.protocol import SampledResponse
from exgrpo_megatron.trainer import Trainer

Script = Callable[[str, int], list[str]]
"""(question id, number of samples) to the responses."""


class ScriptedEngine:
    """Answers each request by `script(question text, number of samples) -> responses`; a real engine's protocol."""

    def __init__(self, tokenizer: Any, questions: Any, script: Script) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.by_prompt = {tuple(question.prompt_ids): question for question in questions}
        self.policy_version = -1
        self.calls: list[tuple[str, int]] = []

    def load_weights(self, weights, version):
        self.num_tensors = sum(1 for _ in weights)
        self.policy_version = version

    def sample(self, requests, params):
        return [self._responses(request) for request in requests]

    def close(self):
        pass

    def _responses(self, request):
        question = self.by_prompt[tuple(request.prompt_ids)]
        self.calls.append((question.id, len(request.seeds)))
        texts = self.script(question.id, len(request.seeds))
        assert len(texts) == len(request.seeds)
        return [self._response(text) for text in texts]

    def _response(self, text):
        ids = np.array([*self.tokenizer.encode(text), self.tokenizer.eos_id], dtype=np.int32)
        return SampledResponse(ids, np.full(len(ids), -0.5, dtype=np.float32), "stop", self.policy_version)


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
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values} if isinstance(values, dict) else values
    return parse_recipe(raw)


def build_trainer(tmp_path: Path, script: Script, *, comm: Communicator | None = None, **sections: Any) -> Trainer:
    """A trainer whose engine follows `script`; see `make_config`."""
    comm = comm or SingleProcess()
    config = make_config(tmp_path, **sections)
    inputs = build.load_inputs(config, comm)
    actor = build.build_rl_actor(config, inputs.model_dir, comm)
    parts = build.build_parts(config, inputs, actor, comm)
    engine = ScriptedEngine(inputs.tokenizer, inputs.train.questions, script)
    trainer = Trainer(replace(parts, engine=engine))
    trainer.push_weights()
    return trainer
