"""NeMo-Run itself, in the launcher's environment: recipes as tasks, its YAML, its batch file, runs it starts."""

import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from other_tools import ROOT

from exgrpo_megatron.launch_command import MEETING_POINT, PASS_ON_SIGNALS
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.recipe import load_recipe

LAUNCHER = ROOT / ".venv-launcher" / "bin" / "python"
RECIPE = ROOT / "recipes" / "quickstart.yaml"
SMALL = (
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "policy.generation.max_new_tokens=16",
    "data.train.generator_size=64",
    "data.validation.generator_size=8",
    "env.math.num_workers=1",
    "sft.warm_start=false",
    "checkpointing.export_hf=false",
)
STEPS = 8
TIMEOUT_S = 240

pytestmark = [
    pytest.mark.others,
    pytest.mark.skipif(not LAUNCHER.exists(), reason="no .venv-launcher: make setup-others"),
]


@pytest.fixture
def environment(tmp_path):
    """Of the launcher, which has no torch; Slurm's commands are scripts that start all nodes on this machine."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "conversion"))
    return {
        **kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        "NEMORUN_HOME": str(tmp_path / "home"), "PATH": f"{ROOT / 'tests/others/fake_slurm'}:{os.environ['PATH']}",
        "SBATCH_LOG": str(tmp_path / "sbatch.log"), "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
    }  # fmt: skip


def launch(environment, *args):
    return subprocess.run(
        [LAUNCHER, "-m", "exgrpo_megatron", "launch", *map(str, args)],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def stopped(command, environment, number):
    """Its output, after it was sent a signal in its third step, and its exit code."""
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    end = threading.Timer(TIMEOUT_S, process.kill)
    end.start()
    lines, sent = [], False
    try:
        for line in process.stdout:
            lines.append(line)
            if not sent and re.search(r"step +3/", line):
                process.send_signal(number)
                sent = True
        return "".join(lines), process.wait()
    finally:
        end.cancel()
        process.kill()


def test_every_recipe_is_the_same_as_a_task_in_nemo_runs_yaml_and_built(environment):
    script = ROOT / "tests" / "others" / "nemo_run_recipes.py"
    result = subprocess.run([LAUNCHER, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    whole = {path: ways for path, ways in answer["recipes"].items() if ways is not None}
    assert set(answer["recipes"]) - set(whole) == {"recipes/evaluation/paper_protocol.yaml"}  # for eval alone
    assert [path for path, ways in whole.items() if ways != [True, True, True]] == []
    shipped = sorted(path.stem.replace(".", "_") for path in (ROOT / "recipes").glob("*.yaml"))
    assert answer["functions"] == shipped
    assert answer["changed"] == [7, 0.5]
    assert "grpo.no_such_key: unknown key" in answer["refused"]
    assert answer["read back"] == ['{question}\n"quoted" ${HOME} 1e-3', "None", "/p", 9, 0]
    assert answer["theirs"] == "CLIException"  # why stands in docs/nemo.md
    assert answer["loaded"] == []


def test_nemo_runs_batch_file_asks_for_and_does_on_signals_what_ours_does(environment):
    asked = [RECIPE, "--nodes", 2, "--gpus-per-node", 1, "--time", "1:00:00", "--account", "team", "--python", "/p"]
    theirs = launch(environment, *asked, "--executor", "slurm", "--dry-run")
    assert theirs.returncode == 0, theirs.stderr
    ours = launch(environment, *asked).stdout
    options = [set(re.findall(r"^#SBATCH --(.*)$", text, re.M)) for text in (ours, theirs.stdout)]
    of_place = ("output=", "chdir=")  # NeMo-Run has a folder a job
    assert {one for one in options[0] if not one.startswith(of_place)} == {
        one for one in options[1] if not one.startswith(of_place)
    }
    assert "signal=B:USR1@600" in options[1]
    for lines in (PASS_ON_SIGNALS, MEETING_POINT):
        assert lines in ours
        assert lines in theirs.stdout
    rest = re.search(r"--nnodes=2 .*\n.*--rdzv-backend.*", ours).group()
    assert rest in theirs.stdout
    assert "export TORCHX_MAX_RETRIES=0" in theirs.stdout  # or NeMo-Run would repeat a run that fails
    assert not os.path.exists(environment["NEMORUN_HOME"])


def test_nemo_run_gets_the_machines_that_are_asked_for_and_a_layout_that_divides_them(environment):
    recipe = ROOT / "recipes" / "qwen2.5_math_7b_8gpu.yaml"
    asked = [recipe, "--executor", "slurm", "--dry-run", "--account", "team", "--python", "/p", "--nodes", 2]
    result = launch(environment, *asked, "--gpus-per-node", 8)
    assert result.returncode == 0, result.stderr
    assert "--nnodes=2 --nproc-per-node=8" in result.stdout
    assert "num_nodes: 2" in result.stdout
    refused = launch(environment, *asked, "--gpus-per-node", 3, "policy.megatron_cfg.tensor_model_parallel_size=4")
    assert refused.returncode == 2
    assert "error: --nodes 2 --gpus-per-node 3: policy.megatron_cfg: " in refused.stderr
    assert "does not divide the 6 processes" in refused.stderr


def test_an_environment_without_torch_asks_for_the_python_that_trains(environment):
    result = launch(environment, RECIPE)
    assert result.returncode == 2
    assert "this environment has no torch and cannot train" in result.stderr
    assert "--python /path" in result.stderr


def test_a_path_that_nemo_run_would_change_is_refused(environment):
    asked = ["logger.log_dir=/shared/nemo_run/1", "--executor", "local", "--dry-run", "--python", "/p"]
    result = launch(environment, RECIPE, *asked)
    assert result.returncode == 2
    assert "log_dir=/shared/nemo_run/1" in result.stderr
    assert "puts the job's folder in place of '/nemo_run'" in result.stderr


def test_a_text_that_nemo_run_would_not_quote_and_a_task_that_is_none_are_refused(tmp_path, environment):
    asked = ["--executor", "slurm", "--account", "team", "--dry-run", "--python", "/p", "--folder", "/shared"]
    for option, value in (("--container-image", "a b; rm"), ("--container-mount", "/a:/a,$HOME:/b")):
        image = [] if option == "--container-image" else ["--container-image", "nvcr.io#nvidia/nemo:25.09"]
        result = launch(environment, RECIPE, *asked, *image, option, value)
        assert result.returncode == 2
        assert f"{option} {value!r}: NeMo-Run writes it into the batch file without quotes" in result.stderr
    (tmp_path / "task.yaml").write_text("_target_: exgrpo_megatron.nemo.task.train\nconfig: [1]\n")
    result = launch(environment, tmp_path / "task.yaml", *asked)
    assert result.returncode == 2
    assert "task.yaml: config = [1]: must be a recipe's sections" in result.stderr


def test_what_a_machine_runs_leaves_one_recipe_in_the_runs_folder_however_often_it_is_launched(tmp_path, environment):
    for name in ("shared", "tmp"):
        (tmp_path / name).mkdir()
    task = (
        "import sys; from exgrpo_megatron import nemo; "
        "task = nemo.recipe(sys.argv[1], ['logger.log_dir=runs/a run'], sys.argv[2]); "
        "task.folder = sys.argv[3]; print(nemo.script(task).inline)"
    )
    command = [LAUNCHER, "-c", task, RECIPE, "/bin/echo", tmp_path / "shared"]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    own = environment | {"TMPDIR": str(tmp_path / "tmp")}
    for _ in range(2):
        ended = subprocess.run(["bash", "-c", script], env=own, capture_output=True, text=True, check=True)
    (kept,) = (path for path in (tmp_path / "shared").rglob("*") if path.is_file())
    assert kept.parent == tmp_path / "shared" / "runs" / "a run"
    assert ended.stdout.endswith(f" -m exgrpo_megatron train runs/a run/{kept.name}\n")
    assert load_recipe(kept) == load_recipe(RECIPE, ["logger.log_dir=runs/a run"])
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_job_of_nemo_run_stops_before_the_time_limit_queues_itself_again_and_goes_on(tmp_path, environment):
    folder = tmp_path / "run"
    asked = ["--executor", "slurm", "--nodes", 2, "--gpus-per-node", 1, "--account", "team", "--time", 60]
    overrides = [*SMALL, f"grpo.max_num_steps={STEPS}", f"logger.log_dir={folder}"]
    result = launch(environment, RECIPE, *overrides, *asked, "--python", sys.executable)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("submitted as job 4711; to follow it: nemo experiment logs quickstart_")
    *options, batch_file = (tmp_path / "sbatch.log").read_text().split()
    assert options == ["--requeue", "--parsable"]
    output, code = stopped(["bash", batch_file], environment, signal.SIGUSR1)  # what Slurm does before the limit
    assert "the same command goes on from there" in output, output
    assert code != 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"
    again = subprocess.run(
        ["bash", batch_file], env={**environment, "SLURM_RESTART_COUNT": "1"},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from" in again.stdout
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"
    assert len(read_metrics(folder / "metrics.jsonl")) == STEPS


def test_a_task_in_nemo_runs_yaml_trains_here_stops_on_sigterm_and_goes_on_with_two_processes(tmp_path, environment):
    folder, task = tmp_path / "run", tmp_path / "task.yaml"
    overrides = [*SMALL, f"logger.log_dir={folder}"]
    write = f"from exgrpo_megatron import nemo; nemo.write_yaml(nemo.quickstart({overrides!r}), {str(task)!r})"
    subprocess.run([LAUNCHER, "-c", write], env=environment, check=True, timeout=TIMEOUT_S)
    asked = [task, f"grpo.max_num_steps={STEPS}", "--executor", "local", "--python", sys.executable]
    output, code = stopped([LAUNCHER, "-m", "exgrpo_megatron", "launch", *asked], environment, signal.SIGTERM)
    assert code == 2
    assert "error: the run was stopped by a signal" in output, output
    assert "the same command goes on from there" in output
    result = launch(environment, *asked, "--gpus-per-node", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("resuming from") == 1
    assert "on each of 2 data-parallel rank(s)" in result.stdout
    assert len(read_metrics(folder / "metrics.jsonl")) == STEPS
