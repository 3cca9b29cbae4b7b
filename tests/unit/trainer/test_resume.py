"""Stop and resume: bit for bit the run that was not interrupted, and refusals that lose nothing."""

import json
import math
import shutil

import pytest
from scripted import make_config, write_questions

from exgrpo_megatron import run_inputs
from exgrpo_megatron.checkpointing import STATE_KEYS, CheckpointStore
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.run_folder import locked_folder


def weights(training):
    return dict(training.actor.export_weights())


def untimed(path):
    """Metrics without those that time or memory decide."""
    return [
        {name: value for name, value in record.items() if not name.startswith(("time/", "run/", "rollout/tokens_per"))}
        for record in read_metrics(path)
    ]


@pytest.mark.parametrize(
    ("experience", "replayed"),
    [
        ({"start_pass_rate": None}, [0, 2, 2, 2, 2, 2]),
        ({"start_pass_rate": 0.3}, [0, 0, 0, 0, 2, 2]),
        ({"strategy": "replay_step"}, [0] * 6),
    ],
    ids=["replay on", "off", "replay step"],
)
def test_three_steps_a_stop_and_three_more_equal_six(tmp_path, run_steps, stored_rows, experience, replayed):
    # Steps 1-3 have one right of four, step 4 two: with the start at 0.3, replay begins with step 5, after the stop.
    # (The script goes by the weights' version, which replay steps double: there, step 3 is the first with two.)
    options = {"experience": experience, "checkpointing": {"export_hf": False}}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    config = make_config(whole, **options)
    straight, _ = run_steps(config, 6)
    config = make_config(cut, **options)
    first, _ = run_steps(config, 3)
    assert first.trainer.last_step == 3
    second, notes = run_steps(config, 3)
    assert second.trainer.last_step == 6
    assert any("resuming from" in note for note in notes)

    metrics = untimed(whole / "run" / "metrics.jsonl")
    assert [record["experience/replayed_questions"] for record in metrics] == replayed
    expected = weights(straight)
    for name, tensor in weights(second).items():
        assert bool((tensor == expected[name]).all()), name
    assert untimed(cut / "run" / "metrics.jsonl") == metrics
    histories = [(folder / "run" / "experience_history.jsonl").read_bytes() for folder in (cut, whole)]
    assert histories[0] == histories[1]
    ours, theirs = (folder / "run" / "checkpoints" / "step_000006" for folder in (cut, whole))
    assert stored_rows(ours / "experience") == stored_rows(theirs / "experience")
    left, right_ = (json.loads((folder / "state.json").read_text()) for folder in (ours, theirs))
    own = {"recipe": None, "data": None}  # name each run's own folder; the data's fingerprint is compared
    assert {**left, **own} == {**right_, **own}


def test_a_guards_hold_the_return_of_the_retired_and_the_ringing_alarms_go_on_where_they_were(tmp_path, run_steps):
    # The guard looks from step 2 on, the first that replays, and holds steps 3 to 5; the checkpoint is of step 3.
    experience = {
        "replay_probability": 0.9,
        "guards": {"min_ess_replayed": 1.0, "action": "on_policy", "hold_steps": 3},
        "alarms": {"max_duplicates": 0.1, "max_uses_per_answer": 0.01},
        "start_pass_rate": 0.2, "stop_pass_rate": 0.1, "pass_rate_steps": 1,
        "return_retired": {"share": 0.5, "period": 2},
    }  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, parts in ((whole, (6,)), (cut, (3, 3))):
        folder.mkdir()
        config = make_config(folder, experience=experience, checkpointing={"export_hf": False})
        for steps in parts:
            run_steps(config, steps)
    metrics = untimed(whole / "run" / "metrics.jsonl")
    assert [record["guards/held"] for record in metrics] == [0, 0, 1, 1, 1, 0]
    assert untimed(cut / "run" / "metrics.jsonl") == metrics
    left, right_ = (json.loads((f / "run/checkpoints/step_000006/state.json").read_text()) for f in (cut, whole))
    names = ("schedule", "guards", "freshness", "alarms", "retirement", "order")
    assert {name: left[name] for name in names} == {name: right_[name] for name in names}
    assert left["alarms"]["ringing"]
    histories = [(folder / "run" / "experience_history.jsonl").read_text() for folder in (cut, whole)]
    assert histories[0] == histories[1]


def test_a_resume_on_changed_data_is_refused_with_both_fingerprints(tmp_path, run_steps, data_parallel):
    config = make_config(tmp_path, checkpointing={"export_hf": False})
    run_steps(config, 1)
    state = json.loads((tmp_path / "run/checkpoints/step_000001/state.json").read_text())
    write_questions(tmp_path / "questions.jsonl", 13)
    now = run_inputs.load_inputs(config, data_parallel).train.fingerprint
    with pytest.raises(CheckpointError) as caught:
        run_steps(config, 1)
    message = str(caught.value)
    assert state["data_fingerprint"] in message
    assert now in message
    assert "logger.log_dir" in message
    write_questions(tmp_path / "questions.jsonl", 12)
    resumed, _ = run_steps(config, 1)
    assert resumed.trainer.last_step == 2


def test_changed_recipe_keys_are_named_on_resume(tmp_path, run_steps):
    run_steps(make_config(tmp_path, checkpointing={"export_hf": False}), 1)
    changed = make_config(tmp_path, checkpointing={"export_hf": False}, loss_fn={"entropy_coeff": 0.5})
    _, notes = run_steps(changed, 1)
    assert "the recipe changed since then: loss_fn.entropy_coeff: 0.001 -> 0.5" in notes


def test_only_the_last_n_checkpoints_and_the_best_are_kept(tmp_path, run_steps):
    config = make_config(tmp_path, checkpointing={"export_hf": False, "save_period": 1, "keep_last_n": 2})
    training, _ = run_steps(config, 4)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_000003", "step_000004"]
    assert training.store.best() is None


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_ones(tmp_path, run_steps, monkeypatch):
    config = make_config(tmp_path, checkpointing={"export_hf": False})
    training, _ = run_steps(config, 1)

    def full_disk(folder):
        (folder / "policy").mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left.*go on from step_000001"):
        training.store.save(2, {}, full_disk)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]


def test_an_unfinished_checkpoint_is_not_resumed_from(tmp_path, run_steps):
    config = make_config(tmp_path, checkpointing={"export_hf": False})
    run_steps(config, 1)
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step_000001", folder / "step_000009.incomplete")
    (folder / "step_000008").mkdir()
    resumed, _ = run_steps(config, 1)
    assert resumed.trainer.last_step == 2


def test_a_checkpoint_with_changed_bytes_is_refused_by_name(tmp_path, run_steps):
    config = make_config(tmp_path, checkpointing={"export_hf": False})
    run_steps(config, 1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    damaged = max((checkpoint / "policy").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    damaged.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=rf"{damaged.name} is not as it was saved.*move step_000001 away"):
        run_steps(config, 1)


def test_only_what_the_run_itself_made_is_deleted(tmp_path, run_steps):
    folder = tmp_path / "run" / "checkpoints"
    for name in ("mine.incomplete", "step_000009.incomplete"):
        (folder / name).mkdir(parents=True)
        (folder / name / "precious").touch()
    run_steps(make_config(tmp_path, checkpointing={"export_hf": False}), 1)
    assert sorted(path.name for path in folder.iterdir()) == ["mine.incomplete", "step_000001"]


def test_a_linked_checkpoint_does_not_stop_the_next_save(tmp_path, run_steps):
    config = make_config(tmp_path, checkpointing={"export_hf": False, "keep_last_n": 1})
    run_steps(config, 1)
    folder, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    (folder / "step_000001").rename(elsewhere)
    (folder / "step_000001").symlink_to(elsewhere)
    resumed, _ = run_steps(config, 1)
    assert resumed.trainer.last_step == 2
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    assert (elsewhere / "state.json").is_file()


def test_a_folder_that_is_no_checkpoint_is_not_replaced_by_one(tmp_path, run_steps):
    config = make_config(tmp_path, checkpointing={"export_hf": False})
    run_steps(config, 1)
    precious = tmp_path / "run" / "checkpoints" / "step_000002" / "precious"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(CheckpointError, match="step_000002 is in the way and is no checkpoint; move it"):
        run_steps(config, 1)
    assert precious.exists()


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, data_parallel):
    config = make_config(tmp_path, checkpointing={"keep_last_n": 1}).checkpointing
    store = CheckpointStore(tmp_path / "checkpoints", config, data_parallel)
    state = dict.fromkeys(STATE_KEYS)
    for step, rate in ((1, 0.2), (2, 0.9), (3, 0.5), (4, None)):
        metrics = {} if rate is None else {"validation/pass_rate_greedy": rate}
        store.save(step, {**state, "step": step, "metrics": metrics}, lambda folder: [])
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_000002", "step_000004"]
    assert store.best() == store.folder / "step_000002"


@pytest.mark.parametrize(
    ("keys", "kept", "best"),
    [
        # Rates by step: 1 .2, 2 .9, 3 .5, 4 .9, 5 none, 6 .1. Of equal ones the newer is better; step 6 is the newest.
        ({}, [4, 6], 4),
        ({"keep_top_k": 3}, [2, 3, 4, 6], 4),
        ({"keep_top_k": 2, "higher_is_better": False}, [1, 6], 6),
        ({"keep_top_k": 2, "metric_name": "validation/pass_rate_t1"}, [6], None),
        ({"keep_top_k": None}, [1, 2, 3, 4, 5, 6], 4),
    ],
)
def test_the_best_k_checkpoints_are_kept_by_the_named_metric(tmp_path, data_parallel, keys, kept, best):
    config = make_config(tmp_path, checkpointing={"keep_last_n": 1, **keys}).checkpointing
    store = CheckpointStore(tmp_path / "checkpoints", config, data_parallel)
    for step, rate in enumerate((0.2, 0.9, 0.5, 0.9, None, 0.1), start=1):
        metrics = {} if rate is None else {"validation/pass_rate_greedy": rate}
        store.save(step, {**dict.fromkeys(STATE_KEYS), "step": step, "metrics": metrics}, lambda folder: [])
    assert [int(path.name[5:]) for path in store.whole()] == kept
    assert store.best() == (best and store.folder / f"step_{best:06d}")


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_metric_that_is_no_finite_number_makes_no_best_checkpoint(tmp_path, data_parallel, caplog, odd):
    config = make_config(tmp_path, checkpointing={"keep_last_n": 1}).checkpointing
    store = CheckpointStore(tmp_path / "checkpoints", config, data_parallel)
    for step, rate in ((1, 0.2), (2, odd), (3, 0.1)):
        metrics = {"validation/pass_rate_greedy": rate}
        store.save(step, {**dict.fromkeys(STATE_KEYS), "step": step, "metrics": metrics}, lambda folder: [])
    assert store.best() == store.folder / "step_000001"
    assert [path.name for path in store.whole()] == ["step_000001", "step_000003"]
    assert f"validation/pass_rate_greedy = {odd}, which counts as not measured" in caplog.text


def test_the_best_checkpoint_survives_a_resume(tmp_path, run_steps):
    """Two steps, a stop, and two more, of whose answers the script changes the length: the longest is looked for."""
    kept = {"export_hf": False, "save_period": 1, "keep_last_n": 1, "metric_name": "validation/response_length"}
    held_out = {"validation": {"path": str(tmp_path / "questions.jsonl"), "id_key": "id"}}
    config = make_config(tmp_path, checkpointing=kept, grpo={"val_period": 1}, data=held_out)
    run_steps(config, 2)
    resumed, _ = run_steps(config, 2)
    by_step = {
        int(record["step"]): record["validation/response_length"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if record["step"]
    }
    # Styles 1, 2, 0, 1: one line of working more, two, none, one.
    best = max(by_step, key=by_step.__getitem__)
    assert (sorted(by_step), best) == ([1, 2, 3, 4], 2)
    assert [int(path.name[5:]) for path in resumed.store.whole()] == sorted({best, 4})
    assert resumed.store.best() == resumed.store.at(best)


def test_the_log_folder_may_not_lie_among_the_checkpoints(tmp_path, data_parallel):
    inside = {"checkpoint_dir": str(tmp_path / "c")}, {"log_dir": str(tmp_path / "c" / "step_000001")}
    config = make_config(tmp_path, checkpointing=inside[0], logger=inside[1])
    with (
        pytest.raises(ConfigError, match=r"logger\.log_dir = .* lies in checkpointing\.checkpoint_dir"),
        locked_folder(config, data_parallel),
    ):
        pass


def test_two_runs_may_not_share_a_checkpoint_folder_at_once(tmp_path, data_parallel):
    shared = {"checkpoint_dir": str(tmp_path / "shared")}
    first = make_config(tmp_path, checkpointing=shared, logger={"log_dir": str(tmp_path / "a")})
    second = make_config(tmp_path, checkpointing=shared, logger={"log_dir": str(tmp_path / "b")})
    refused = pytest.raises(ConfigError, match=r"checkpointing\.checkpoint_dir = .*another run")
    with locked_folder(first, data_parallel), refused, locked_folder(second, data_parallel):
        pass
    with locked_folder(second, data_parallel):
        pass
