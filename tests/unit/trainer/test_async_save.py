"""Checkpoints written while training goes on: what they hold, when they count, and what a failure costs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
import torch.distributed.checkpoint as dcp
from scripted import make_config
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from exgrpo_megatron import checkpointing
from exgrpo_megatron.checkpointing import STATE_KEYS, CheckpointStore, FilesPart
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import CheckpointConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.policy.sharded_files import ShardedFiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experience"))

from ranks import on_ranks

STATE = {**dict.fromkeys(STATE_KEYS), "metrics": {}}


def store_in(folder, **keys):
    return CheckpointStore(folder, CheckpointConfig(**keys), SingleProcess())


def state_of(step):
    return {**STATE, "step": step}


def held(release):
    """A part that is not written before `release`."""

    def prepare(folder):
        def write():
            assert release.wait(timeout=60)
            (folder / "data").write_text("whole")
            return [folder / "data"]

        return [FilesPart(write)]

    return prepare


def failing(folder):
    def write():
        raise OSError(28, "No space left on device")

    return [FilesPart(write)]


def test_a_checkpoint_counts_when_it_is_written_and_not_before(tmp_path):
    store, release = store_in(tmp_path), Event()
    store.save(1, state_of(1), lambda folder: [])
    store.begin(2, state_of(2), held(release))
    assert store.finish(wait=False) is None
    assert store.is_saving
    assert store.latest() == tmp_path / "step_000001"
    release.set()
    saved = store.finish(wait=True)
    assert saved.path == store.latest() == tmp_path / "step_000002"
    assert (saved.path / "data").read_text() == "whole"
    store.verify(saved.path)
    assert store.finish(wait=True) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_without_async_save_it_is_written_when_begin_returns(tmp_path):
    store, release = store_in(tmp_path, async_save=False), Event()
    release.set()
    store.begin(1, state_of(1), held(release))
    assert store.finish(wait=False).path == tmp_path / "step_000001"


def test_an_error_in_the_next_step_does_not_cost_the_checkpoint_on_its_way(tmp_path):
    store, release = store_in(tmp_path), Event()
    store.begin(1, state_of(1), held(release))
    Timer(0.1, release.set).start()
    with pytest.raises(RuntimeError, match="of the step"), store.kept():
        raise RuntimeError("of the step")
    assert store.latest() == tmp_path / "step_000001"
    store.verify(store.latest())


def test_a_failure_in_the_background_is_raised_at_the_next_boundary_and_loses_nothing(tmp_path):
    store = store_in(tmp_path)
    store.save(1, state_of(1), lambda folder: [])
    store.begin(2, state_of(2), failing)
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left.*go on from step_000001"):
        store.finish(wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    store.save(3, state_of(3), lambda folder: [])
    assert store.latest() == tmp_path / "step_000003"


def test_a_file_that_one_rank_cannot_read_is_named_on_all(tmp_path, monkeypatch):
    """Each rank reads a part of the files; the others must not wait for one that has given up."""
    folder = store_in(tmp_path).save(1, state_of(1), lambda folder: []) / "policy"
    folder.mkdir()
    (folder / "unreadable").write_text("")
    digest = checkpointing.sha256_of

    def read(path):
        if path.name == "unreadable":
            raise OSError(5, "Input/output error", str(path))
        return digest(path)

    monkeypatch.setattr(checkpointing, "sha256_of", read)

    def verified(comm):
        with pytest.raises(CheckpointError) as caught:
            CheckpointStore(tmp_path, CheckpointConfig(), comm).verify(folder.parent)
        return str(caught.value)

    first, second = on_ranks(2, 1, verified)
    assert first == second
    store_in(tmp_path).verify(folder.parent, excuse=lambda name: name == "policy/unreadable")
    assert first.startswith(f"{folder / 'unreadable'}: damaged; move step_000001 away")


KILLED = """
import os, signal, sys, time
from pathlib import Path
from exgrpo_megatron import checkpointing
from exgrpo_megatron.checkpointing import STATE_KEYS, CheckpointStore, FilesPart
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import CheckpointConfig

def prepare(folder):
    def write():
        (folder / "data").write_text("half of")
        os.kill(os.getpid(), signal.SIGKILL)
    return [FilesPart(write)]

state = {**dict.fromkeys(STATE_KEYS), "metrics": {}}
store = CheckpointStore(Path(sys.argv[1]), CheckpointConfig(), SingleProcess())
store.save(1, {**state, "step": 1}, lambda folder: [])
store.begin(2, {**state, "step": 2}, prepare)
time.sleep(60)
"""


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002.incomplete"]
    store = store_in(tmp_path)
    assert store.latest() == tmp_path / "step_000001"
    store.verify(store.latest())
    store.save(2, state_of(2), lambda folder: [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_what_is_written_is_the_moment_it_was_taken_at_though_training_went_on(
    tmp_path, run_steps, stored_rows, monkeypatch
):
    """A checkpoint of step 2 that is written only after step 3 is the one that was written before step 3 began."""
    after_step_3, write = Event(), ShardedFiles.write
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
        options = {"export_hf": False, "save_period": 2, "async_save": name == "async"}
        run_steps(
            make_config(tmp_path / name, checkpointing=options),
            3,
            lambda step: after_step_3.set() if step == 3 else None,
        )
        after_step_3.clear()
        monkeypatch.setattr(ShardedFiles, "write", lambda files: after_step_3.wait(300) and write(files))
    ours, theirs = (tmp_path / name / "run" / "checkpoints" / "step_000002" for name in ("async", "sync"))
    assert same_tensors(ours / "policy", theirs / "policy")
    assert not same_tensors(ours / "policy", ours.with_name("step_000003") / "policy")
    assert stored_rows(ours / "experience") == stored_rows(theirs / "experience")
    left, right = (json.loads((path / "state.json").read_text()) for path in (ours, theirs))
    own = {"recipe": None, "data": None}  # name each run's own folder; the data's fingerprint is compared
    assert {**left, **own} == {**right, **own}

    times = {
        name: [sorted(set(record) & {"time/save_s", "time/save_write_s"}) for record in read_metrics(metrics)]
        for name in ("sync", "async")
        for metrics in [tmp_path / name / "run" / "metrics.jsonl"]
    }
    both = ["time/save_s", "time/save_write_s"]
    assert times == {"sync": [[], [], both], "async": [[], [], ["time/save_s"]]}  # on the line of the step after


def same_tensors(ours, theirs):
    left, right = tensors(ours), tensors(theirs)
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def tensors(checkpoint):
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    empty = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(empty, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return empty
