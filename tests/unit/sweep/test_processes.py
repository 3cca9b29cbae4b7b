"""Processes of runs: how many at a time, with what, and what becomes of them when a signal comes."""

import fcntl
import os
import signal
import sys
import time

import pytest
import yaml
from test_arms import RECIPE

from exgrpo_megatron.stop import StopSignal
from exgrpo_megatron.sweep.arms import make_arms, make_runs
from exgrpo_megatron.sweep.processes import last_words, run_all

PATIENCE_S = 60


@pytest.fixture
def runs(tmp_path):
    """Makes the runs of one arm."""

    def make(num_seeds, *overrides):
        recipe = tmp_path / "plain.yaml"
        recipe.write_text(yaml.safe_dump(RECIPE))
        arms = make_arms([str(recipe)], [], [], overrides)
        return make_runs(arms, range(1, num_seeds + 1), ["grpo.seed"], tmp_path / "out")

    return make


class Journal:
    """What was told of the runs, in order."""

    def __init__(self, on_begin=lambda run: None):
        self.lines, self.codes, self.on_begin = [], {}, on_begin

    def began(self, run):
        self.lines.append(("began", run.seed))
        self.on_begin(run)

    def ended(self, run, how):
        self.lines.append(("ended", run.seed))
        self.codes[run.seed] = how.exit_code

    def most_at_once(self):
        going, most = 0, 0
        for what, _ in self.lines:
            going += 1 if what == "began" else -1
            most = max(most, going)
        return most


def go(runs, script, jobs=1, devices=(), journal=None, stop=None, held=()):
    """Runs a Python script for each run; `{seed}`, `{folder}` and `{log_dir}` are filled in."""
    journal, stop = journal or Journal(), stop or StopSignal()

    def command(run):
        return [sys.executable, "-c", script.format(seed=run.seed, folder=run.folder)]

    run_all(runs, jobs, devices, stop, command, began=journal.began, ended=journal.ended, held=held)
    return journal


def test_so_many_at_a_time_and_the_others_go_on_after_one_that_failed(runs):
    chosen = runs(4)
    journal = go(chosen, "import sys; print('error: no {seed}'); sys.exit({seed} == 2)", jobs=2)
    assert journal.most_at_once() == 2
    assert journal.codes == {1: 0, 2: 1, 3: 0, 4: 0}
    assert [line for line in journal.lines if line[0] == "began"] == [("began", seed) for seed in (1, 2, 3, 4)]
    assert last_words(chosen[1].log) == "error: no 2"


def test_a_process_has_one_device_and_its_share_of_the_threads(runs, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    chosen = runs(2)
    go(chosen, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])", 2, ["4", "6"])
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(run.log.read_text() for run in chosen) == [f"4 {threads}\n", f"6 {threads}\n"]


def test_a_message_is_preferred_to_a_last_line(tmp_path):
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_text("step 1\nerror: the disk is full\n  report\n\n")
    assert last_words(log) == "error: the disk is full"
    log.write_text("Traceback\nZeroDivisionError: x\n")
    assert last_words(log) == "ZeroDivisionError: x"


def test_one_run_makes_a_warm_start_while_the_others_wait(runs):
    # The first one writes metrics after 0.4 s: then the warm start is there, and the others begin together.
    script = """
import pathlib, time
time.sleep(0.4 if {seed} == 1 else 0)
folder = pathlib.Path("{folder}")
folder.mkdir()
(folder / "metrics.jsonl").touch()
time.sleep(0.6)
"""
    begun = {}
    journal = Journal(lambda run: begun.setdefault(run.seed, time.monotonic()))
    go(runs(3, "sft.warm_start=true"), script, jobs=3, journal=journal)
    assert begun[2] - begun[1] > 0.4
    assert begun[3] - begun[2] < 0.4
    assert journal.most_at_once() > 1


def test_runs_without_a_warm_start_begin_together(runs):
    script = """
import pathlib, time
pathlib.Path("{folder}").mkdir()
while sum(path.is_dir() for path in pathlib.Path("{folder}").parent.iterdir()) < 3:
    time.sleep(0.01)
"""
    assert go(runs(3), script, jobs=3).most_at_once() == 3


def test_after_a_signal_nothing_begins_and_what_goes_on_is_told(runs):
    stop = StopSignal()
    script = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""
    chosen = runs(3)

    def once_ready(run):
        deadline = time.monotonic() + PATIENCE_S
        if run.seed == 2:
            while "ready" not in chosen[0].log.read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            stop.requested = True

    journal = go(chosen, script, jobs=2, journal=Journal(once_ready), stop=stop)
    assert set(journal.codes) == {1, 2}
    assert journal.codes[1] == 7


def test_no_process_is_left_behind_by_an_error(runs):
    chosen = runs(2)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

    def fail(run):
        if run.seed == 2:
            deadline = time.monotonic() + PATIENCE_S
            while not chosen[0].log.read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(chosen, script, jobs=2, journal=Journal(fail))
    pid = int(chosen[0].log.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent is gone")
def test_a_killed_sweep_stops_its_runs_and_its_lock_is_free_when_they_have_saved(runs, tmp_path):
    script = """
import pathlib, signal, sys, time
def save(*_):
    print("saves", flush=True)
    while not pathlib.Path("{folder}").exists():
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    (only,) = runs(1)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep = os.fork()
        if sweep == 0:
            go([only], script, held=[lock.fileno()])
            os._exit(0)
    until(lambda: only.log.exists() and "ready" in only.log.read_text())
    os.kill(sweep, signal.SIGKILL)
    os.waitpid(sweep, 0)
    until(lambda: "saves" in only.log.read_text())
    with (tmp_path / "lock").open("w") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        only.folder.mkdir()  # what the process waits for
        until(lambda: is_free(lock))


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_free(lock):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
