"""Several ranks, however they share the work, do what one does: questions, samples, replay, buffer, weights to 1e-5."""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from launch import launch
from run_trainer import write_solutions

SCRIPT = Path(__file__).with_name("run_trainer.py")

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

LAYOUTS = {
    "DP2": (2, {}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP4": (4, {}),
    "TP2 x DP2": (4, {"tensor_model_parallel_size": 2}),
}
OWN = (
    "time/",
    "run/",
    "rollout/tokens_per_s",
    "experience/shard_answers",
    "experience/stored_bytes",
    "policy/padding_share",
)
"""Metrics that depend on the layout."""


@pytest.fixture(scope="module")
def records_of(tmp_path_factory, half_trained_model):
    def run(ranks, layout):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        write_solutions(folder)
        launch(SCRIPT, ranks, [str(folder), str(half_trained_model), json.dumps(layout)], timeout_s=600)
        return [pickle.loads((folder / f"record{process}.pickle").read_bytes()) for process in range(ranks)]

    return run


@pytest.fixture(scope="module")
def one_rank(records_of):
    return records_of(1, {})[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def several(request, records_of):
    processes, layout = LAYOUTS[request.param]
    model_parallel = max(layout.values(), default=1)
    return records_of(processes, layout), model_parallel


def test_all_processes_sample_and_replay_the_same_answers(several, one_rank):
    records, _ = several
    assert all(record["groups"] == one_rank["groups"] for record in records)
    assert all(record["evaluation"] == one_rank["evaluation"] for record in records)
    replayed = sum(member[2] for step in one_rank["groups"] for _, members in step for member in members)
    assert replayed == 16  # half of 8 questions in each of 4 steps


def test_each_process_samples_its_part_alone(several, one_rank):
    """8 questions a step, of which 4 are replayed: 4 * 4 + 4 * 3 answers; 6 validation questions of 2 and 1."""
    records, _ = several
    assert one_rank["asked"] == [28] * 4 + [12, 6]
    assert np.array([record["asked"] for record in records]).sum(axis=0).tolist() == one_rank["asked"]
    # Of 8 questions each process has 8 / processes: the answers of those.
    assert max(max(record["asked"][:4]) for record in records) <= 4 * 8 // len(records)


def test_each_answer_is_kept_by_one_process_and_their_union_is_the_buffer(several, one_rank):
    records, model_parallel = several
    names = [name for record in records for name in record["own"]]
    assert sorted(names) == sorted(one_rank["own"])
    union = {name: answers for record in records for name, answers in record["own"].items()}
    for name, answers in one_rank["own"].items():
        assert [(ids, version, step) for ids, _, version, step in union[name]] == [
            (ids, version, step) for ids, _, version, step in answers
        ]
        for mine, theirs in zip(union[name], answers, strict=True):
            np.testing.assert_allclose(mine[1], theirs[1], atol=1e-5)
    # Only the first process of a data-parallel rank keeps any, and here all of those do.
    assert [bool(record["own"]) for record in records] == [
        process % model_parallel == 0 for process in range(len(records))
    ]


def test_the_index_and_the_retired_questions_are_the_same_everywhere(several, one_rank):
    records, _ = several
    for record in records:
        assert record["order"] == one_rank["order"]
        assert record["retired"] == one_rank["retired"]


def test_every_process_has_the_same_history(several, one_rank):
    """16 replayed answers, as above, each with the ratios that one rank finds."""
    records, _ = several

    def plain(events):
        return [replace(event, mean_ratio=0.0, max_ratio=0.0) for event in events]

    for record in records:
        assert list(map(plain, record["events"])) == list(map(plain, one_rank["events"]))
        mine, theirs = (
            [(event.mean_ratio, event.max_ratio) for events in found for event in events if event.kind == "replayed"]
            for found in (record["events"], one_rank["events"])
        )
        assert len(theirs) == 16
        np.testing.assert_allclose(mine, theirs, rtol=1e-4)


def test_worked_solutions_are_graded_and_scored_by_all_and_taken_in_again(several, one_rank):
    """Of 64 questions 22 have a wrong solution; of 8 more solutions, 3 belong to those."""
    records, _ = several
    assert one_rank["prefill"][0].startswith("50 answers of 45 questions; left out: 0 too long")
    assert "50 answers of 45 questions" in one_rank["prefill"][1]
    assert all(record["prefill"] == one_rank["prefill"] for record in records)


def test_metrics_and_weights_agree(several, one_rank):
    records, _ = several
    for step, theirs in enumerate(one_rank["metrics"]):
        mine = records[0]["metrics"][step]
        assert mine.keys() == theirs.keys()
        for name in theirs:
            if not name.startswith(OWN):
                assert mine[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), name
        assert mine["experience/shard_answers"] <= theirs["experience/shard_answers"]
        assert theirs["experience/shard_answers"] == theirs["experience/stored_answers"]
    for name, weight in one_rank["weights"].items():
        # AdamW turns rounding of a near-zero gradient into up to one learning rate (1e-4) a step: 1e-5 still holds.
        np.testing.assert_allclose(records[0]["weights"][name], weight, atol=1e-5, err_msg=name)
