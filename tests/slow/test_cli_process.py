"""`exgrpo` as a process: signals, two ranks under torchrun, full disks, terminals."""

import os
import resource
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from cli_runs import (
    MIB,
    STEPS,
    TIMEOUT_S,
    Running,
    assert_same_run,
    environment,
    exgrpo,
    launcher,
    leftovers,
    one_error,
    train_args,
    untimed,
)

pytestmark = pytest.mark.slow


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
    many += ["checkpointing.async_save=false"]  # the first one is whole when the second step begins
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
