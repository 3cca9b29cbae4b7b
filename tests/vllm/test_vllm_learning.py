"""With vLLM rollouts the quickstart learns, and a real model takes two steps on real questions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vllm_models import needs_vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "slow"))

from quickstart_run import train_quickstart
from test_smollm2 import RECIPE, SMALLER, model, python, questions  # noqa: F401 (a fixture)

from exgrpo_megatron.metric_sinks import read_metrics

pytestmark = needs_vllm


def test_the_quickstart_learns_as_with_the_embedded_engine(tmp_path, trained_once):
    """The bounds of the embedded engine's test, from its warm start, which is the same whatever samples; three seeds of
    each ended between .94 and .95 (docs/rollouts.md)."""
    folder, _ = train_quickstart(tmp_path, trained_once / "warm", "policy.generation.backend=vllm")
    records = {record["step"]: record for record in read_metrics(folder / "metrics.jsonl")}
    assert records[0]["validation/pass_rate_greedy"] < 0.4
    assert records[40]["validation/pass_rate_greedy"] >= 0.75
    assert records[40]["validation/pass_rate_t1"] > records[0]["validation/pass_rate_t1"] + 0.2
    assert max(record.get("agreement/max_abs_difference", 0.0) for record in records.values()) < 2e-5
    assert records[0]["agreement/tokens"] > 0
    assert sum(record.get("rollout/engine_restarts", 0) for record in records.values()) == 0


def test_a_real_model_takes_two_steps_on_real_questions(model, tmp_path):  # noqa: F811
    """SmolLM2-135M on GSM8K, float32. The embedded engine agrees with the actor to 1e-4, and so must this one."""
    run = tmp_path / "run"
    python(
        "-m", "exgrpo_megatron", "train", RECIPE, f"policy.model_name={model}", "policy.generation.backend=vllm",
        f"data.train.path={questions('gsm8k_train.jsonl')}", f"data.validation.path={questions('gsm8k_test.jsonl')}",
        f"logger.log_dir={run}", "experience.prefill_path=null", "checkpointing.enabled=false", *SMALLER,
    )  # fmt: skip
    first, second = read_metrics(run / "metrics.jsonl")
    assert second["policy/version"] == 2
    for record in (first, second):
        assert record["rollout/tokens"] > 0
        assert record["ratio_fresh/min"] == pytest.approx(1.0, abs=1e-4)
        assert record["ratio_fresh/max"] == pytest.approx(1.0, abs=1e-4)
