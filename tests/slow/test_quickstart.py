"""The shipped quickstart learns, through the command a user types."""

import pytest
import torch
from quickstart_run import train_quickstart

from exgrpo_megatron.metric_sinks import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory, trained_once):
    """The quickstart's warm start and 40 of its steps; the run's folder and what was printed."""
    return train_quickstart(tmp_path_factory.mktemp("quickstart"), trained_once / "warm")


@pytest.fixture(scope="module")
def records(run):
    return {record["step"]: record for record in read_metrics(run[0] / "metrics.jsonl")}


def test_the_greedy_held_out_pass_rate_rises_to_three_quarters(records):
    # Eight prototype runs ended 40 steps between 0.82 and 0.94, from 0.15 to 0.25.
    assert records[0]["validation/pass_rate_greedy"] < 0.4
    assert records[40]["validation/pass_rate_greedy"] >= 0.75
    assert records[40]["validation/pass_rate_t1"] > records[0]["validation/pass_rate_t1"] + 0.2


def test_replay_starts_and_brings_groups_with_a_signal(records):
    steps = [record for step, record in records.items() if step > 0]
    assert sum(record["experience/replay_on"] for record in steps) >= 10
    replaying = [record for record in steps if record["experience/replay_on"]]
    assert max(record["experience/replayed_questions"] for record in replaying) == 16
    assert all(record["experience/refused"] == 0 for record in steps)
    assert all(record["policy/skipped_updates"] == 0 for record in steps)


def test_engine_and_actor_agree_on_fresh_tokens(records):
    # old_logprobs: engine, one update a step: before it, the ratio of every new token is 1 up to float32 rounding,
    # The largest of a step's 10,000 tokens is 1.3e-5 off on average, and of 80 steps 3e-5 to 7e-5.
    for step, record in records.items():
        if step > 0:
            assert record["ratio_fresh/min"] == pytest.approx(1.0, abs=1e-4)
            assert record["ratio_fresh/max"] == pytest.approx(1.0, abs=1e-4)


def test_the_run_leaves_what_the_summary_names(run):
    folder, printed = run
    for name in ("dashboard.png", "metrics.jsonl", "recipe.yaml", "checkpoints/step_000040", "hf/config.json"):
        assert (folder / name).exists(), name
    assert "held-out pass rate" in printed
    assert str(folder / "hf") in printed


def test_the_export_answers_in_transformers(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run[0] / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "hf")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7+5-3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
    assert tokenizer.decode(output[prompt["input_ids"].shape[1] :]).startswith("7+5=12\n12-3=9\n\\boxed{9}")
