"""A prompt that no engine could sample from is left out of the questions, by id: it ends neither a batch nor a run."""

from __future__ import annotations

import json

import pytest
import torch

from exgrpo_megatron import run_inputs
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.rollout import vllm_checks
from exgrpo_megatron.rollout.protocol import SampleRequest
from exgrpo_megatron.rollout.vllm_engine import VLLMEngine
from exgrpo_megatron.rollout.vllm_process import VLLMSettings

# Around a question the chat template of the embedded model writes 4 tokens.
LONGEST = 10
QUESTIONS = {
    "short": "1+2",
    "longest that fits": "1+2+31"[: LONGEST - 4],
    "one too long": "1+2+313",
    "far too long": "1+" * 300 + "1",
    "control token": "1<eos>2",
    "no such character": "1 & 2",
}


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_checks, "is_installed", lambda: True)
    path = tmp_path / "questions.jsonl"
    rows = [{"id": name, "question": text, "answer": "3"} for name, text in QUESTIONS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(path), "id_key": "id"}
    config = parse_recipe(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
            "data": {"train": source, "validation": source, "max_input_seq_length": LONGEST},
            "policy": {
                "model_name": "embedded:chain-qwen2",
                "train_global_batch_size": 4,
                "max_total_sequence_length": LONGEST + 8,
                "generation": {"backend": "vllm", "max_new_tokens": 8},
            },
            "logger": {"log_dir": str(tmp_path / "run")},
        }
    )
    return config, run_inputs.load_inputs(config, SingleProcess())


def test_what_does_not_fit_is_named_and_every_engine_takes_what_is_left(inputs):
    config, found = inputs
    for questions in (found.train, found.validation):
        assert [question.id for question in questions.questions] == ["short", "longest that fits"]
        assert questions.dropped_too_long == ("one too long", "far too long")
        assert questions.dropped_unwritable == ("control token", "no such character")
    requests = [SampleRequest(question.prompt_ids, (1, 2)) for question in found.train.questions]
    assert max(len(request.prompt_ids) for request in requests) == LONGEST
    settings = VLLMSettings(
        found.model_dir, config.policy.generation.vllm_cfg, torch.float32, config.max_model_len, 2, None
    )
    VLLMEngine(found.architecture, settings)._check(requests, found.sampling)
