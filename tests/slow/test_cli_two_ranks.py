"""The program on two processes, on one machine and as two nodes."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from cli_runs import (
    RECIPE,
    STEPS,
    Running,
    agent,
    assert_same_run,
    exgrpo,
    free_port,
    leftovers,
    said,
    train_args,
    untimed,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, half_trained_model):
    """Folder and output of an undisturbed run on two ranks."""
    folder = tmp_path_factory.mktemp("two_ranks") / "run"
    result = exgrpo(*train_args(half_trained_model, folder, "grpo.val_period=6"), ranks=2)
    assert result.returncode == 0, result.stderr
    return folder, result


@pytest.mark.distributed
def test_two_ranks_train_and_only_the_first_speaks(two_ranks):
    folder, result = two_ranks
    lines = result.stdout.splitlines()
    for text in ("What the numbers mean", "training questions:", "step 12/12", "held out, after step 6", "exported to"):
        assert sum(text in line for line in lines) == 1, text
    assert "on each of 2 data-parallel rank(s)" in result.stdout
    assert "exgrpo" not in result.stderr
    assert len(untimed(folder)) == STEPS
    assert not leftovers(folder)


@pytest.mark.distributed
def test_a_signal_to_the_launcher_of_one_machine_stops_both_and_the_run_goes_on_bit_for_bit(
    tmp_path, half_trained_model, two_ranks, stored_rows
):
    args = train_args(half_trained_model, tmp_path / "run", "grpo.val_period=6")
    port = free_port()
    agents = [Running(command=agent(port, *args)) for _ in range(2)]
    while not (first := [one for one in agents if any("step  3/12" in line for line in one.lines)]):
        assert all(one.process.poll() is None for one in agents), [one.output for one in agents]
        time.sleep(0.002)
    (drained,) = [one for one in agents if one not in first]  # not that of rank 0
    drained.process.send_signal(signal.SIGTERM)
    drained.end()  # the launcher's own exit code says that it was signalled
    first[0].wait_for("the same command goes on from there")
    assert "another process of the run was told to stop, so all save and stop" in first[0].output
    assert first[0].process.poll() is None  # it waits for the other launcher, for five minutes
    psutil.wait_procs(psutil.Process(first[0].process.pid).children())
    first[0].process.kill()
    first[0].end()
    result = exgrpo(*args, ranks=2)
    assert result.returncode == 0, result.stderr
    assert "resuming from" in result.stdout
    assert_same_run(tmp_path / "run", two_ranks[0], stored_rows)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["train", RECIPE, "cluster.gpus_per_node=4"], "is not the number of launched processes, 2"),
        (["train", RECIPE, "policy.model_name=none"], "policy.model_name = 'none': no such model folder"),
    ],
    ids=["world size", "model"],
)
def test_an_error_of_all_ranks_is_said_once(tmp_path, args, text):
    result = exgrpo(*args, ranks=2, cwd=tmp_path)
    assert result.returncode != 0
    assert said(result.stderr, text) == 1, result.stderr
    assert "exgrpo_megatron/" not in result.stderr


@pytest.mark.distributed
def test_an_error_of_the_first_rank_alone_is_said_once_and_ends_the_other(tmp_path, half_trained_model):
    # Only rank 0 makes the embedded model's folder; something else is in its way.
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "notes.txt").write_text("mine")
    args = train_args("embedded:chain-qwen2", tmp_path / "run")
    started = time.monotonic()
    result = exgrpo(*args, ranks=2)
    assert time.monotonic() - started < 120
    assert result.returncode != 0
    assert said(result.stderr, "is in the way of the embedded model") == 1, result.stderr
    report = result.stderr.partition("Root Cause")[2]  # torchrun's, which has the message too
    assert "is in the way of the embedded model" in report
    assert "exgrpo_megatron/" not in result.stderr
    assert "another process of the run ended" not in result.stderr


@pytest.mark.distributed
def test_a_killed_rank_is_named_ends_the_others_soon_and_the_run_resumes(
    tmp_path, half_trained_model, two_ranks, stored_rows
):
    args = train_args(half_trained_model, tmp_path / "run", "grpo.val_period=6", "checkpointing.save_period=2")
    for lost, step, named_by in ((1, 3, "error: "), (0, 7, "error: rank 1: ")):
        running = Running(*args, ranks=2)
        running.wait_for(f"step  {step}/12")
        ranks = {
            int(child.environ().get("RANK", -1)): child for child in psutil.Process(running.process.pid).children()
        }
        ranks[lost].kill()
        started = time.monotonic()
        assert running.end() != 0
        # torchrun gives the other one 30 s; a collective would wait for 30 minutes.
        assert time.monotonic() - started < 60
        assert running.output.count(f"{named_by}rank {lost} ended without a message") == 1, running.output
        assert "exgrpo_megatron/" not in running.output  # no traceback of ours
    # Not one that was being written.
    newest = max(path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name[5:].isdigit())
    result = exgrpo(*args, ranks=2)
    assert result.returncode == 0, result.stderr
    assert f"resuming from {newest}" in result.stdout
    assert_same_run(tmp_path / "run", two_ranks[0], stored_rows)


@pytest.mark.distributed
def test_a_batch_file_trains_on_two_nodes_and_goes_on_after_the_time_limit_and_after_preemption(
    tmp_path, half_trained_model, two_ranks, stored_rows
):
    """Slurm's commands are scripts here that start both nodes on this machine; torchrun and all behind it are real."""
    job = tmp_path / "job.sh"
    recipe, *overrides = train_args(half_trained_model, tmp_path / "run", "grpo.val_period=6")[1:]
    asked = ["--nodes", 2, "--gpus-per-node", 1, "--time", 60, "--output", job]
    result = exgrpo("launch", recipe, *overrides, *asked)
    assert result.returncode == 0, result.stderr
    log = tmp_path / "scontrol.log"
    slurm = {
        "PATH": f"{Path(__file__).parent / 'fake_slurm'}:{os.environ['PATH']}", "SCONTROL_LOG": str(log),
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
    }  # fmt: skip
    running = Running(command=["bash", str(job)], more=slurm)
    running.wait_for("step  3/12")
    running.process.send_signal(signal.SIGUSR1)  # what Slurm does before the limit
    running.end()
    assert log.read_text() == f"requeue {os.getpid()}\n"
    assert running.output.count("the same command goes on from there") == 1, running.output
    running = Running(command=["bash", str(job)], more={**slurm, "SLURM_RESTART_COUNT": "1"})
    running.wait_for("step  6/12")  # and its evaluation begins
    with log.open("a") as file:
        file.write(f"preempt {os.getpid()}\n")
    preempt(running.process.pid)
    running.end()
    assert log.read_text().splitlines() == [f"{what} {os.getpid()}" for what in ("requeue", "preempt", "requeue")]
    assert running.output.count("the same command goes on from there") == 1, running.output
    running = Running(command=["bash", str(job)], more={**slurm, "SLURM_RESTART_COUNT": "2"})
    assert running.end() == 0, running.output
    assert running.output.count("step_000006: 6 of 12 steps are done") == 1
    assert log.read_text().count("requeue") == 2
    assert_same_run(tmp_path / "run", two_ranks[0], stored_rows)


def preempt(job):
    """As Slurm does: SIGTERM to every process of every task, though neither to the batch script nor to srun."""
    (srun,) = [child for child in psutil.Process(job).children() if "srun" in " ".join(child.cmdline())]
    tasks = [child for child in srun.children(recursive=True) if "sleep" not in child.name()]
    assert sum("torch.distributed.run" in task.cmdline() for task in tasks) == 2
    assert sum("RANK" in task.environ() for task in tasks) >= 4  # two ranks, and the reward workers of each
    for task in tasks:
        task.send_signal(signal.SIGTERM)
