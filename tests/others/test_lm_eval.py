"""lm-evaluation-harness takes what we export, and its numbers are those of transformers and of `exgrpo eval`."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from other_tools import ROOT, needs

from exgrpo_megatron.data.chain_arithmetic import generate

pytestmark = needs("lm_eval")

TASK = ROOT / "examples" / "lm_eval" / "exgrpo_questions.yaml"
SMOLLM2 = ROOT / "models" / "smollm2-135m"
MAX_NEW_TOKENS = 32
RECIPE = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1, "val_period": 0},
    "data": {"train": {"path": "train.jsonl", "solution_key": "worked"}, "max_input_seq_length": 16},
    "policy": {
        "model_name": "embedded:chain-qwen2",
        "train_global_batch_size": 4,
        "max_total_sequence_length": 48,
        "generation": {"max_new_tokens": MAX_NEW_TOKENS},
    },
    "sft": {
        "warm_start": True,
        "max_num_steps": 60,
        "train_global_batch_size": 20,
        "optimizer": {"lr": 3e-3},
        "scheduler": {"lr_warmup_iters": 5},
    },
    "env": {"math": {"num_workers": 1}},
    "eval": {"sets": {"sums": {"path": "sums.jsonl", "temperature": 0}}},
    "checkpointing": {"enabled": False},
    "logger": {"log_dir": "run", "tensorboard_enabled": False},
}
COMMANDS = """
from exgrpo_megatron import cli
for args in (["train", "recipe.yaml"], ["eval", "recipe.yaml", "--checkpoint", "run/hf"]):
    try:
        cli.main(args)
    except SystemExit as ended:
        if ended.code:
            raise
"""
"""One process for both: importing torch takes longer than the run."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step after 60 supervised ones, exported, evaluated greedily on 24 sums, half of them new to it."""
    folder = tmp_path_factory.mktemp("lm_eval")
    seen, new = generate(40, 1, (2,), held_out=False), generate(12, 1, (2,), held_out=True)
    for name, chains in (("train.jsonl", seen), ("sums.jsonl", [*seen[:12], *new])):
        rows = [{"question": chain.text, "answer": chain.answer, "worked": chain.worked} for chain in chains]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    run([sys.executable, "-c", COMMANDS], folder)
    return folder


@pytest.fixture(scope="module")
def harness(trained):
    """What lm-eval says of the export: numbers, and samples of our task and of a choice between two solutions."""
    tasks = trained / "tasks"
    tasks.mkdir()
    task = yaml.safe_load(TASK.read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(trained / "sums.jsonl")
    task["generation_kwargs"]["max_gen_toks"] = MAX_NEW_TOKENS
    choice = {name: task[name] for name in ("dataset_path", "dataset_kwargs", "test_split", "doc_to_text")} | {
        "task": "worked_or_guessed",
        "output_type": "multiple_choice",
        "doc_to_choice": '{{[worked, "\\\\boxed{" + answer + "}"]}}',
        "doc_to_target": 0,
        "target_delimiter": "",
    }
    for content in (task, choice):
        (tasks / f"{content['task']}.yaml").write_text(yaml.safe_dump(content))
    return lm_eval(trained, trained / "run" / "hf", tasks, "exgrpo_questions", "worked_or_guessed")


def test_greedy_answers_and_their_share_of_right_ones_are_those_of_exgrpo_eval(trained, harness):
    """Three decoders: lm-eval's, transformers' own argmax, our engine's. Where the two best tokens are 1e-3 apart or
    less, rounding may choose between them: such an answer may differ, and the share with it."""
    numbers, samples = harness
    ours = {row["question"]: row for row in read_rows(trained, "run/eval/hf-sets/sums.generations.jsonl")}
    results = json.loads((trained / "run/eval/hf-sets/results.json").read_text())
    reference, close = Reference(trained / "run" / "hf"), 0
    for sample in samples["exgrpo_questions"]:
        question = sample["doc"]["question"]
        text, margin = reference.greedy(question)
        if margin > 1e-3:
            assert sample["resps"][0][0] == ours[question]["response"] == text
            assert sample["exact_match"] == ours[question]["correct"]
        close += margin <= 1e-3
    pass_rate = results["sets"]["sums"]["metrics"]["avg@1"]["value"]
    assert len(samples["exgrpo_questions"]) == len(ours) == 24
    assert close < 12
    assert 0 < pass_rate < 1
    assert numbers["exgrpo_questions"]["exact_match,boxed"] == pytest.approx(pass_rate, abs=close / 24 + 1e-9)


def test_log_likelihoods_are_those_of_transformers(trained, harness):
    numbers, samples = harness
    reference, right = Reference(trained / "run" / "hf"), []
    for sample in samples["worked_or_guessed"]:
        doc = sample["doc"]
        choices = (doc["worked"], f"\\boxed{{{doc['answer']}}}")
        expected = [reference.log_likelihood(doc["question"], choice) for choice in choices]
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(expected, abs=1e-3)
        right.append(expected[0] > expected[1])
    assert len(right) == 24
    assert numbers["worked_or_guessed"]["acc,none"] == pytest.approx(sum(right) / 24)


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="models/smollm2-135m is not there: python scripts/smollm2.py")
def test_a_converted_real_model_is_taken(tmp_path):
    """SmolLM2-135M-Instruct as scripts/smollm2.py converts it from GGUF: two facts, each with a wrong one beside it."""
    rows = [
        {"question": "What is the capital of France?", "choices": ["Paris", "Madrid"]},
        {"question": "Which animal barks?", "choices": ["The dog", "The fish"]},
    ]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "facts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "facts.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "target_delimiter": "",
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "facts.yaml").write_text(yaml.safe_dump(task))
    numbers, samples = lm_eval(tmp_path, SMOLLM2, tmp_path / "tasks", "facts")
    reference = Reference(SMOLLM2)
    for sample in samples["facts"]:
        doc = sample["doc"]
        expected = [reference.log_likelihood(doc["question"], choice) for choice in doc["choices"]]
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(expected, abs=5e-3)
    assert numbers["facts"]["acc,none"] == 1


def lm_eval(folder, model, tasks, *names):
    """Runs the command of docs/evaluation.md without a network; numbers and samples by task."""
    out = folder / "lm_eval"
    run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32",
         "--device", "cpu", "--batch_size", "8", "--include_path", str(tasks), "--tasks", ",".join(names),
         "--apply_chat_template", "--log_samples", "--output_path", str(out)],
        folder,
    )  # fmt: skip
    (results,) = out.rglob("results_*.json")
    samples = {name: read_rows(out, str(next(out.rglob(f"samples_{name}_*")).relative_to(out))) for name in names}
    return json.loads(results.read_text())["results"], samples


def run(command, folder):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf_home")}
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "conversion"))
    environment = {
        **os.environ,
        **offline,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def read_rows(folder, name):
    return [json.loads(line) for line in Path(folder, name).read_text(encoding="utf-8").splitlines()]


class Reference:
    """The folder as transformers reads it, one sequence at a time and without a cache."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, question):
        """The answer, and by how much the best token's log-prob was ahead of the next where it was least."""
        ids, answer, margin = self._ids(self._prompt(question)), [], math.inf
        while len(answer) < MAX_NEW_TOKENS:
            best = self._log_probs([*ids, *answer])[-1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            if best.indices[0] == self.tokenizer.eos_token_id:
                break
            answer.append(int(best.indices[0]))
        return self.tokenizer.decode(answer, skip_special_tokens=True), margin

    def log_likelihood(self, question, answer):
        """Of what follows the prompt without its last white space, which lm-eval counts to the answer."""
        prompt = self._prompt(question)
        ids, first = self._ids(prompt + answer), len(self._ids(prompt.rstrip()))
        log_probs = self._log_probs(ids)
        return sum(float(log_probs[place - 1, ids[place]]) for place in range(first, len(ids)))

    def _prompt(self, question):
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def _log_probs(self, ids):
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
