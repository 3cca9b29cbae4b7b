"""docs/metrics.md lists what runs emit: the names in the metrics files of runs of every kind, taken together, are those
of the list, but for what needs another machine; and the times of a step add up to it."""

from pathlib import Path

import pytest
from scripted import make_config, write_questions

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.metrics import METRICS, find_metric

NOT_HERE = {
    **dict.fromkeys(
        [name for name in METRICS if name.startswith("agreement/")] + ["time/compare_s"],
        "the gate compares vLLM with the actor; tests/vllm/test_vllm_run.py reads them",
    ),
}
"""Metrics that no run without vLLM writes, with the reason."""

GUARDED = {
    "guards": {"max_kl_replayed": 1e-6, "action": "clip"}, "return_retired": {"share": 0.5, "period": 1},
    "max_answers": 6,
}  # fmt: skip
CORRECTED = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
PENALTY = {
    "enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 0.5, "max_response_length": 8,
}  # fmt: skip
PARTIAL = {"reward_function": "exgrpo_megatron.data.chain_arithmetic:partial_credit", "correct_above": 0.5}

STEPS = 3
KINDS = {
    "plain": {"grpo": {"val_at_start": True}, "checkpointing": {"save_period": 1, "export_hf": False}},
    "guarded": {"experience": GUARDED, "loss_fn": CORRECTED, "grpo": {"reward_shaping": PENALTY}},
    # Two optimiser steps a step: in the third both of two answers are right, and questions retire.
    "both": {
        "experience": {"strategy": "both", "alarms": {"average_steps": 1}}, "grpo": {"num_generations_per_prompt": 2},
        "policy": {"train_global_batch_size": 8},
    },
    "demonstrations": {
        "experience": {"enabled": False},
        "demonstrations": {"enabled": True, "data": {"generator": "chain_arithmetic"}},
    },
    "repo": {
        "experience": {"enabled": False}, "repo": {"enabled": True, "min_kept": 2}, "num_questions": 4,
    },
    "own reward": {"env": PARTIAL},
}  # fmt: skip


pytestmark = pytest.mark.slow


@pytest.fixture
def emitted(tmp_path, run_steps, data_parallel):
    """By kind of run, the metrics of its steps, as they were written."""
    sums = {"path": str(tmp_path / "sums.jsonl"), "id_key": "id", "in_training": True, "num_samples": 2, "group": "ID"}
    write_questions(tmp_path / "sums.jsonl", 2)
    found = {}
    for kind, sections in {**KINDS, "plain": {**KINDS["plain"], "eval": {"sets": {"sums": sums}}}}.items():
        folder = tmp_path / kind.replace(" ", "_")
        folder.mkdir()
        held_out = {"path": str(folder / "questions.jsonl"), "id_key": "id", "category_key": "answer"}
        sections = {
            "checkpointing": {"enabled": False, "export_hf": False},
            "data": {"validation": {**held_out, "max_questions": 2}},
            **sections,
        }
        grpo = {"max_num_steps": STEPS, **sections.pop("grpo", {})}
        config = make_config(folder, **sections, grpo=grpo)
        run_steps(config, STEPS)
        found[kind] = read_metrics(folder / "run" / "metrics.jsonl")
    found["supervised"] = supervised(tmp_path, data_parallel)
    return found


def supervised(folder, comm):
    config = make_config(folder, sft={"max_num_steps": 1, "scheduler": {"lr_warmup_iters": 0}}, data=CHAINS)
    trainer, _ = build.build_sft(config, run_inputs.load_inputs(config, comm), comm)
    records = []
    trainer.fit(lambda step, values: records.append({"step": step, **values}) is None)
    return records


CHAINS = {"train": {"path": None, "id_key": None, "generator": "chain_arithmetic", "generator_size": 64}}


def test_the_list_of_metrics_is_what_runs_emit(emitted):
    names = {name for records in emitted.values() for record in records for name in record} - {"step"}
    assert {family_of(name) for name in names} | NOT_HERE.keys() == METRICS.keys()
    assert not NOT_HERE.keys() & names
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text()
    assert all(f"| `{name}` |" in page for name in METRICS)
    for record in emitted["plain"][1:]:
        phases = [name for name in record if name.startswith("time/") and name not in OUTSIDE]
        assert sum(record[name] for name in phases) == pytest.approx(record["time/step_s"], rel=1e-9)
        assert min(record[name] for name in phases) >= 0


OUTSIDE = ("time/step_s", "time/evaluate_s", "time/save_s", "time/save_write_s")
"""Times that are no part of the step's."""


def family_of(name):
    assert find_metric(name), name
    return next(family for family, metric in METRICS.items() if metric is find_metric(name))
