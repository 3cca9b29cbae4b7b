"""`exgrpo` as a process: signals, two ranks under torchrun, full disks, terminals."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from exgrpo_megatron.metric_sinks import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
STEPS = 12
SMALL = (
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "policy.megatron_cfg.optimizer.lr=1e-4",
    "policy.generation.max_new_tokens=48",
    "data.train.generator_size=64",
    "data.validation.generator_size=8",
    "experience.start_pass_rate=null",
    "env.math.num_workers=1",
    "sft.warm_start=false",
)
TIMEOUT_S = 240
MIB = 1 << 20

pytestmark = pytest.mark.slow


def environment():
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "conversion"))
    # Without the variables by which a launcher of the tests themselves would be taken for one of the command.
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def launcher(ranks):
    if ranks == 1:
        return [sys.executable, "-m", "exgrpo_megatron"]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "127.0.0.1:0", "-m", "exgrpo_megatron"),
    ]


def agent(port, *args):
    """torchrun on one of two machines with a rank each."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "-m", "exgrpo_megatron", *map(str, args)),
    ]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def preempt(job):
    """As Slurm does: SIGTERM to every process of every task, though neither to the batch script nor to srun."""
    (srun,) = [child for child in psutil.Process(job).children() if "srun" in " ".join(child.cmdline())]
    tasks = [child for child in srun.children(recursive=True) if "sleep" not in child.name()]
    assert sum("torch.distributed.run" in task.cmdline() for task in tasks) == 2
    assert sum("RANK" in task.environ() for task in tasks) >= 4  # two ranks, and the reward workers of each
    for task in tasks:
        task.send_signal(signal.SIGTERM)


def exgrpo(*args, ranks=1, cwd=None, before=None, prefix=()):
    """Runs a command to its end."""
    return subprocess.run(
        [*prefix, *launcher(ranks), *map(str, args)],
        env=environment(), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, preexec_fn=before,
    )  # fmt: skip


class Running:
    """A command in the background, whose output can be waited for."""

    def __init__(self, *args, ranks=1, command=None, more=None):
        """`exgrpo` with `args`, or another `command`; `more` is added to its environment."""
        self.process = subprocess.Popen(
            command or [*launcher(ranks), *map(str, args)],
            env={**environment(), **(more or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text):
        """Until a line contains `text`; fails where the command ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not any(text in line for line in self.lines):
            assert self._reader.is_alive() or any(text in line for line in self.lines), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.002)

    def end(self):
        """Exit code, once it has ended."""
        try:
            code = self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
        self._reader.join()
        return code

    @property
    def output(self):
        return "".join(self.lines)

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)


def train_args(model, folder, *more, steps=STEPS):
    return ["train", RECIPE, *SMALL, f"policy.model_name={model}", f"grpo.max_num_steps={steps}",
            f"logger.log_dir={folder}", *more]  # fmt: skip


def assert_same_run(one, two, stored_rows, steps=STEPS):
    """Same exported weights, experience, position and metrics, bit for bit."""
    assert (one / "hf" / "model.safetensors").read_bytes() == (two / "hf" / "model.safetensors").read_bytes()
    ours, theirs = (folder / "checkpoints" / f"step_{steps:06d}" for folder in (one, two))
    rows = stored_rows(theirs / "experience")
    assert rows
    assert stored_rows(ours / "experience") == rows
    names = [sorted(path.name for path in (run / "experience").glob("index-*.parquet")) for run in (ours, theirs)]
    assert names[0] == names[1]
    mine, its = (json.loads((folder / "state.json").read_text()) for folder in (ours, theirs))
    assert {**mine, "recipe": None} == {**its, "recipe": None}
    assert untimed(one) == untimed(two)


def untimed(folder):
    return [
        {name: value for name, value in record.items() if not name.startswith(("time/", "run/", "rollout/tokens_per"))}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def one_error(result, *texts):
    """The message; there is one, no traceback of ours, and exit code 2."""
    assert result.returncode == 2, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for text in texts:
        assert text in lines[0]
    return lines[0]


def said(stderr, text):
    """How many of our messages contain `text`; torchrun repeats those of failed ranks in its report."""
    return sum(line.startswith("error: ") and text in line for line in stderr.splitlines())


def leftovers(folder):
    return [
        path for path in folder.rglob("*") if path.name.endswith((".incomplete", ".unverified", ".new", ".partial"))
    ]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, half_trained_model):
    """Folder of a run of `STEPS` steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = exgrpo(*train_args(half_trained_model, folder))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert sum(record["experience/replayed_questions"] for record in untimed(folder)) > STEPS
    return folder


# ---------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_the_same_command_ends_as_if_nothing_had_been(
    tmp_path, half_trained_model, whole_run, number, stored_rows
):
    folder = tmp_path / "run"
    running = Running(*train_args(half_trained_model, folder))
    running.wait_for("step  3/12")
    if number == signal.SIGINT:
        os.killpg(running.process.pid, number)  # Ctrl-C in a terminal reaches every process of the command
    else:
        running.process.send_signal(number)
    assert running.end() == 0, running.output
    assert "stopping after this step" in running.output
    saved = sorted((folder / "checkpoints").iterdir())
    assert len(saved) == 1
    assert 3 <= int(saved[0].name.removeprefix("step_")) < STEPS
    assert f"saved in {saved[0]}; the same command goes on from there" in running.output
    assert not (folder / "hf").exists()

    result = exgrpo(*train_args(half_trained_model, folder))
    assert result.returncode == 0, result.stderr
    assert f"resuming from {saved[0]}" in result.stdout
    assert_same_run(folder, whole_run, stored_rows)


def test_ctrl_c_after_a_signal_stops_at_once_and_keeps_the_last_checkpoint(tmp_path, half_trained_model):
    # Steps too large for the second signal to come after the first one's stop.
    many = ["grpo.num_prompts_per_step=64", "policy.train_global_batch_size=256", "checkpointing.save_period=1"]
    folder = tmp_path / "run"
    running = Running(*train_args(half_trained_model, folder, *many, "policy.generation.max_batch_size=1"))
    running.wait_for("step  1/12")
    while not (folder / "checkpoints" / "step_000001").exists():
        time.sleep(0.01)
    children = psutil.Process(running.process.pid).children(recursive=True)
    assert children
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("stopping after this step")
    running.process.send_signal(signal.SIGTERM)  # launchers repeat it: no other request
    time.sleep(1.2)
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 130, running.output
    assert "stopped at once" in running.output
    assert "Traceback" not in running.output
    names = {path.name for path in (folder / "checkpoints").iterdir()}  # the second may have been on its way
    assert {name for name in names if not name.endswith(".incomplete")} == {"step_000001"}
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_signal_in_the_warm_start_saves_it_and_the_same_command_goes_on_from_there(tmp_path, stored_rows):
    def args(name):
        return [*train_args("embedded:chain-qwen2", tmp_path / name, steps=1), "sft.warm_start=true",
                "sft.max_num_steps=60", f"sft.warm_start_dir={tmp_path / f'{name}-warm'}"]  # fmt: skip

    running = Running(*args("cut"))
    running.wait_for("warm start 6/60")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0, running.output
    assert "stopped during the warm start; the same command goes on from there" in running.output
    warm = tmp_path / "cut-warm"
    assert not warm.exists() or not any(warm.iterdir())
    assert not (tmp_path / "cut" / "checkpoints").exists()
    for name in ("cut", "whole"):
        result = exgrpo(*args(name))
        assert result.returncode == 0, result.stderr
        assert ("of 60 steps are done" in result.stdout) == (name == "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole", stored_rows, steps=1)
    ours, theirs = (next((tmp_path / f"{name}-warm").iterdir()) for name in ("cut", "whole"))
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


# ---------------------------------------------------------------------------- two ranks


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
    first[0].process.send_signal(signal.SIGTERM)
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


# ---------------------------------------------------------------------------- full disks


def limit_file_size(limit):
    """No file may grow beyond `limit` bytes (EFBIG): a disk that is full for large files, without mounting one."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.fixture
def finished(tmp_path, whole_run):
    """A copy of the undisturbed run."""
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    return folder


def kept_files(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for part in ("checkpoints", "hf")
        for path in (folder / part).rglob("*")
        if path.is_file()
    }


def test_a_full_disk_while_a_checkpoint_is_saved_loses_nothing(finished, half_trained_model):
    before = kept_files(finished)
    args = train_args(half_trained_model, finished, steps=STEPS + 1)
    # The optimizer alone is larger: two float32 moments of 397,056 parameters.
    result = exgrpo(*args, before=limit_file_size(3 * MIB))
    one_error(result, "step 13 could not be saved", "File too large", "go on from step_000012")
    assert kept_files(finished) == before
    assert not leftovers(finished)
    result = exgrpo(*args)
    assert result.returncode == 0, result.stderr
    assert "step_000012: 12 of 13 steps are done" in result.stdout


def test_a_full_disk_while_the_model_is_exported_keeps_the_older_export(finished, half_trained_model):
    (finished / "export.json").unlink()  # as if the run had ended just before its export
    before = kept_files(finished)
    args = train_args(half_trained_model, finished)
    one_error(exgrpo(*args, before=limit_file_size(1 * MIB)), "cannot export the model", "File too large")
    assert kept_files(finished) == before
    assert not leftovers(finished)
    result = exgrpo(*args)
    assert result.returncode == 0, result.stderr
    assert "exported to" in result.stdout


def test_a_file_system_that_runs_full_ends_with_a_message_and_a_usable_checkpoint(tmp_path, half_trained_model):
    mount = tmp_path / "disk"
    mount.mkdir()
    inside = ("unshare", "--map-root-user", "--mount")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine lets no one mount a file system of his own (unshare --map-root-user --mount)")
    # One checkpoint of 4.8 MB fits, two do not.
    script = 'mount -t tmpfs -o size=8m none "$0" && "$@"; code=$?; ls -a "$0/run/checkpoints" >&2; exit $code'
    prefix = (*inside, "sh", "-c", script, str(mount))
    args = train_args(half_trained_model, mount / "run", "checkpointing.save_period=2", steps=4)
    result = exgrpo(*args, prefix=prefix)
    assert result.returncode == 2, (result.stdout, result.stderr)
    message, *listed = result.stderr.split()[0], *result.stderr.splitlines()[1:]
    assert message == "error:"
    assert "No space left on device" in result.stderr
    assert listed == [".", "..", "step_000002"]


# ---------------------------------------------------------------------------- what is shown


def test_a_terminal_gets_bars_and_lines_and_no_noise_of_libraries(tmp_path):
    if shutil.which("script") is None:
        pytest.skip("no `script` to make a terminal with")
    folder = tmp_path / "run"
    args = [*train_args("embedded:chain-qwen2", folder, steps=2), "sft.warm_start=true", "sft.max_num_steps=60",
            f"sft.warm_start_dir={tmp_path / 'warm'}"]  # fmt: skip
    command = " ".join(map(str, [*launcher(1), *args]))
    shown = subprocess.run(
        ["script", "-qec", f"stty cols 100; {command}", "/dev/null"],
        env={**environment(), "TERM": "xterm"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout
    assert "━" in shown.stdout
    assert "60/60" in shown.stdout
    for noise in ("Loading weights", "Writing model", "Warning", "PosixPath", "Traceback"):
        assert noise not in shown.stdout


def test_help_answers_within_a_second_of_processor_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert exgrpo("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
