"""A small project to run commands in, and what a refusal must look like."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import yaml

RECIPE = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2, "val_period": 0},
    "data": {
        "train": {"path": "train.jsonl", "id_key": "id"},
        "validation": {"path": "held_out.jsonl", "id_key": "id"},
        "max_input_seq_length": 16,
    },
    "policy": {
        "model_name": "embedded:chain-qwen2",
        "train_global_batch_size": 4,
        "max_total_sequence_length": 24,
        "generation": {"max_new_tokens": 8},
    },
    "sft": {"max_num_steps": 2, "train_global_batch_size": 4, "scheduler": {"lr_warmup_iters": 0}},
    "env": {"math": {"num_workers": 1}},
    "checkpointing": {"save_period": 1},
    "logger": {"log_dir": "run", "tensorboard_enabled": False},
}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def write_lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def rows(first, count):
    return [{"id": f"q{n}", "question": f"{n}+1", "answer": n + 1} for n in range(first, first + count)]


def write_inputs(folder):
    """Two sets of small sums and the recipe for them."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    write_lines(folder / "train.jsonl", *rows(1, 4))
    write_lines(folder / "held_out.jsonl", *rows(10, 2))


def contents(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def assert_refused(result, before, *texts):
    """One message with all of `texts`, no traceback, exit code 2, and every file that was there unchanged."""
    assert result.code == 2, result
    assert "Traceback" not in result.err
    assert result.err.count("error:") == 1, result.err
    for text in texts:
        assert text in result.err, result.err
    after = contents(Path.cwd())
    assert {path: after.get(path) for path in before} == before
