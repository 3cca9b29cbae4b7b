"""What `exgrpo launch` refuses, where NeMo-Run is not installed."""

from importlib.util import find_spec

import pytest

from exgrpo_megatron.launch_command import torchrun_options

SLURM = ["--executor", "slurm", "--account", "team"]


@pytest.mark.skipif(find_spec("nemo_run") is not None, reason="NeMo-Run is installed")
@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_without_nemo_run_an_error_names_how_to_get_it_and_the_other_way(exgrpo, project, executor):
    result = exgrpo("launch", "recipe.yaml", "--executor", executor)
    assert result.code == 2
    assert "--executor needs NeMo-Run, which is not installed here" in result.err
    assert "`make setup-others` in the repository" in result.err
    assert "then .venv-launcher/bin/exgrpo launch ..." in result.err
    assert "leave --executor out, which writes a batch file for sbatch" in result.err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--dry-run"], "--dry-run: no meaning without --executor"),
        (["--container-image", "image"], "--container-image: no meaning without --executor"),
        (["--ssh", "me@host", "--job-dir", "/jobs"], "--ssh, --job-dir: no meaning without --executor"),
        ([*SLURM, "--output", "job.sh"], "--output: no meaning with --executor, which writes no file"),
        (
            ["--executor", "local", "--partition", "gpu", "--time", "60", "--nodes", 2],
            "--partition, --time, --nodes: no meaning with --executor local",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused_by_name(exgrpo, project, args, text):
    result = exgrpo("launch", "recipe.yaml", *args)
    assert result.code == 2
    assert text in result.err


def test_the_batch_file_names_the_python_and_the_folder_that_are_given(exgrpo, project):
    text = exgrpo("launch", "recipe.yaml", "--python", "/envs/train/bin/python", "--folder", "/shared/a run").out
    assert "/envs/train/bin/python -m torch.distributed.run" in text
    assert "#SBATCH --chdir='/shared/a run'" in text


def test_one_machine_meets_itself_and_several_at_the_first_node():
    # 600 s before the limit, less the minute after which Slurm kills.
    assert "--shutdown-timeout=540" in torchrun_options(1, 8, 600)
    assert "--rdzv-endpoint=127.0.0.1:0" in torchrun_options(1, 8, 600)
    assert '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"' in torchrun_options(2, 8, 600)
