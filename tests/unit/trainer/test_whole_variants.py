"""The paper's main recipe (B = 128, K = 8, rho = 0.5, two optimiser steps) in every variant, and a prefilled start."""

import pytest
from scripted import build_trainer, fresh_ids, make_config, replayed_members, right, wrong

from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.recipe_table import derived_table

# The table of docs/algorithm.md, by variant.
SWITCHES = {
    "experience.bucket_weight": ("accuracy", "counts", "counts"),
    "loss_fn.clip_in_mixed_phase": (True, False, False),
    "loss_fn.normalizer": ("per_answer_length", "rank_width", "global_width"),
    "loss_fn.entropy_bonus": ("global_mean", "per_micro_batch", "global_mean"),
    "experience.answer_choice": ("lowest_mean_entropy", "lowest_total_entropy", "lowest_mean_entropy"),
    "experience.stored_answer": ("tokens", "text", "tokens"),
    "experience.collect_from": ("start", "mixed_phase", "start"),
    "experience.retire_from": ("replay", "replay_and_fresh", "replay_and_fresh"),
    "experience.unused_fresh": ("keep", "discard", "keep"),
    "data.epoch_order": ("reshuffle", "same", "reshuffle"),
    "experience.allow_duplicates": (False, True, False),
}
VARIANTS = ("paper", "code", "corrected")
MAIN_RUN = {"grpo": {"num_prompts_per_step": 128, "num_generations_per_prompt": 8, "max_num_steps": 700}}


def test_the_derived_table_of_the_main_run():
    raw = {
        **MAIN_RUN,
        "data": {"train": {"path": "openr1.parquet"}, "max_input_seq_length": 1024},
        "policy": {
            "model_name": "Qwen2.5-Math-7B",
            "train_global_batch_size": 512,
            "max_total_sequence_length": 9216,
            "generation": {"max_new_tokens": 8192},
        },
    }
    table = dict(derived_table(parse_recipe(raw), data_parallel_size=8))
    assert table == {
        "questions a step": "128, of which at most 64 replayed",
        "answers a question (K)": "8; a replayed question samples one less",
        "sequences trained a step": "1024",
        "rollouts a step": "1024 without replay, at least 960 with it",
        "sequences an optimiser step": "512",
        "optimiser steps a step": "2",
        "optimiser steps in all": "1400",
        "micro-batches an optimiser step": "1 on each of 8 data-parallel rank(s), of at most 64 sequences",
        "tokens in one sequence, at most": "9216",
        "response tokens a step, at most": "8,388,608",
        "answers in the whole run": "716,800, replayed ones included",
        "computed with": "Megatron's own layers; float32",
        "output layer and loss": "linear form, in Triton where a GPU has it, else in torch",
    }


def half_of_eight(question_id, samples):
    """Four right answers of different form when new; two, new ones, beside the stored answer. The rest are wrong."""
    good = ["=" * index + right(question_id) for index in (range(4) if samples == 8 else (4, 5))]
    return [*good, *[wrong(question_id)] * samples][:samples]


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps_of_the_main_run(tmp_path, data_parallel, variant):
    trainer = build_trainer(
        tmp_path,
        half_of_eight,
        comm=data_parallel,
        num_questions=400,
        variant=variant,
        **MAIN_RUN,
        policy={"train_global_batch_size": 512},
        experience={"start_pass_rate": 0.35},
    )
    column = VARIANTS.index(variant)
    assert trainer.config.variant_table() == {name: values[column] for name, values in SWITCHES.items()}
    results = [trainer.step() for _ in range(3)]
    metrics = [result.metrics for result in results]

    # Half of step 1 is right: replay is on from step 2. The code did not collect before, and has nothing to replay.
    replayed = [0, 0, 64] if variant == "code" else [0, 64, 64]
    assert [m["experience/replay_on"] for m in metrics] == [0, 1, 1]
    assert [m["experience/replayed_questions"] for m in metrics] == replayed
    # 8 answers of a new question, 7 of a replayed one: 1024 or 960.
    rollouts = [1024 - count for count in replayed]
    assert sum(count for _, count in trainer.parts.engine.calls) == sum(rollouts)
    assert [m["rollout/answers"] for m in metrics] == rollouts
    assert [sum(group.size for group in result.groups) for result in results] == [1024] * 3
    # Four of eight, or two of seven and the stored one.
    rates = [((128 - count) * 4 + count * 3) / 1024 for count in replayed]
    assert [m["reward/pass_rate"] for m in metrics] == pytest.approx(rates)
    assert [m["policy/version"] for m in metrics] == [2, 4, 6]
    assert all(m["policy/skipped_updates"] == 0 for m in metrics)
    # Four answers of each new question, two of each replayed one that were not stored yet.
    stored = [0 if variant == "code" else 512, *(4 * (128 - count) + 2 * count for count in replayed[1:])]
    assert metrics[0]["experience/stored_this_step"] == stored[0]
    assert metrics[1]["experience/stored_this_step"] == stored[1]
    assert [m["data/discarded"] for m in metrics] == ([0, 0, 64] if variant == "code" else [0, 0, 0])
    for result in results:
        new, old = fresh_ids(result), set(replayed_members(result.groups))
        assert len(new) == len(set(new))
        assert variant == "code" or not old & set(new)
    assert metrics[2]["experience/scored_answers"] >= 4 * 64
    assert metrics[2]["experience/padded_logprobs"] == 0


def test_a_run_begins_with_the_experience_of_another(tmp_path, run_steps):
    def config_of(name, **experience):
        (tmp_path / name).mkdir()
        return make_config(tmp_path / name, checkpointing={"export_hf": False}, experience=experience)

    run_steps(config_of("first"), 3)
    path = tmp_path / "first/run/checkpoints/step_000003/experience"
    _, notes = run_steps(config_of("second", prefill_path=str(path)), 1)
    (metrics,) = read_metrics(tmp_path / "second/run/metrics.jsonl")
    assert metrics["experience/replayed_questions"] == 2
    assert metrics["experience/mean_age_steps"] == 1
    assert any(f"answers of 8 questions from {path}" in note for note in notes)

    run_steps(config_of("empty"), 1)
    (metrics,) = read_metrics(tmp_path / "empty/run/metrics.jsonl")
    assert metrics["experience/replayed_questions"] == 0

    _, notes = run_steps(config_of("off", prefill_path=str(path), enabled=False), 1)
    (metrics,) = read_metrics(tmp_path / "off/run/metrics.jsonl")
    assert metrics["experience/buffer_questions"] == 0
    assert not any(str(path) in note for note in notes)
