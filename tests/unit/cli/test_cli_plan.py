"""`exgrpo show --world-size` and `exgrpo launch`."""

import re
import subprocess

import pytest

from exgrpo_megatron.launch_command import time_limit_s

SEVEN_B = (
    "policy.model_name=Qwen/Qwen2.5-Math-7B",
    "policy.precision=bfloat16",
    "policy.train_micro_batch_size=1",
    "policy.logprob_batch_size=1",
    "policy.megatron_cfg.activation_checkpointing=true",
    "policy.megatron_cfg.optimizer.use_distributed_optimizer=true",
)
TP4 = "policy.megatron_cfg.tensor_model_parallel_size=4"
PP2 = "policy.megatron_cfg.pipeline_model_parallel_size=2"


def rows(text):
    """The rows of the tables by name; names do not have two spaces in a row, columns do."""
    split = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return {name: cells for name, *cells in split if cells}


def test_show_names_ranks_layers_parameters_and_bytes(exgrpo, project):
    result = exgrpo("show", "recipe.yaml", "--world-size", 16, "--gpu-memory-gib", 141, *SEVEN_B, TP4, PP2)
    assert result.code == 0, result.err
    found = rows(result.out)
    assert found["tensor parallel"] == ["4", "4", "0-3, 4-7, 8-11, ..."]
    assert found["data parallel"] == ["2", "8", "0 4, 1 5, 2 6, ..."]
    assert found["pipeline parallel"] == ["2", "8", "0 8, 1 9, 2 10, ..."]
    assert found["ranks"] == ["0-7", "8-15"]
    assert found["layers"] == ["14", "14"]
    # A quarter of 14 layers and of 152064 x 3584; norms are whole, and the last stage has one more.
    layer = 2 * 3584 + (896 + 1152) * 3584 + 1152 + 3 * 4736 * 3584
    first = 14 * layer + 38016 * 3584
    assert found["parameters of a rank"] == [f"{first:,}", f"{first + 3584:,}"]
    assert found["weights"][0] == f"{2 * first / 2**30:.2f}"
    assert found["gradients (float32)"][0] == f"{4 * first / 2**30:.2f}"
    assert found["optimizer"][0] == f"{12 * first / 2 / 2**30:.2f}"
    assert found["rollout weights"] == [f"{4 * 7_615_616_512 / 2**30:.2f}"] * 2
    assert found["to be used at most"][0] == f"{0.92 * 141:.2f}"
    assert "7,615,616,512 parameters in all, from the known shape of Qwen/Qwen2.5-Math-7B" in result.out
    assert "on each of 2 data-parallel rank(s)" in result.out


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (
            ["--world-size", 8, *SEVEN_B],
            ["does not fit: weight push needs", "ranks 0-7", "weights 14.2 + gradients 28.4 + optimizer 10.6",
             "second rollout weights 28.4", "--gpu-memory-gib 80 leaves 73.6", "tensor_model_parallel_size (1)"],
        ),
        (["--world-size", 6, *SEVEN_B, TP4], ["4 * 1 * 1 = 4 does not divide the 6 processes"]),
        (["--world-size", 8, *SEVEN_B, "policy.megatron_cfg.tensor_model_parallel_size=8"],
         ["tensor_model_parallel_size = 8 does not divide the model's num_attention_heads = 28"]),
        (["--world-size", 3, *SEVEN_B, "policy.megatron_cfg.pipeline_model_parallel_size=3"],
         ["pipeline_model_parallel_size = 3 does not divide the model's 28 layers"]),
        (["--world-size", 8, "cluster.num_nodes=2", "cluster.gpus_per_node=8"],
         ["--world-size 8 is not cluster.num_nodes * cluster.gpus_per_node = 2 * 8 = 16"]),
        (["--world-size", 8, "policy.model_name=some/model"], ["policy.model_name = 'some/model'", "Qwen2.5-32B"]),
        (["--world-size", 8, *SEVEN_B, "policy.max_total_sequence_length=5000"], ["4096 positions"]),
    ],
    ids=["memory", "processes", "heads", "layers", "cluster", "unknown model", "positions"],
)  # fmt: skip
def test_show_refuses_what_cannot_be_divided_or_does_not_fit(exgrpo, project, args, texts):
    result = exgrpo("show", "recipe.yaml", *args)
    assert result.code == 2
    for text in texts:
        assert text in result.err


def test_the_embedded_model_fits_anywhere_and_cluster_says_how_many(exgrpo, project):
    result = exgrpo("show", "recipe.yaml", "cluster.gpus_per_node=2")
    assert result.code == 0, result.err
    assert rows(result.out)["data parallel"] == ["2", "1", "0 1"]
    assert "Ranks of" not in exgrpo("show", "recipe.yaml").out


def test_launch_writes_a_batch_file_that_bash_reads(exgrpo, project):
    result = exgrpo(
        "launch", "recipe.yaml", "data.system_prompt=it's $HOME", "--nodes", 4, "--gpus-per-node", 8,
        "--partition", "gpu", "--account", "team", "--time", "1-00:00:00", "--output", "job.sh",
    )  # fmt: skip
    assert result.code == 0, result.err
    text = (project / "job.sh").read_text()
    assert subprocess.run(["bash", "-n", "job.sh"], check=False).returncode == 0
    asked = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    for line in ("nodes=4", "gpus-per-node=8", "partition=gpu", "account=team", "time=1-00:00:00", "requeue",
                 "signal=B:USR1@600", "job-name=recipe"):  # fmt: skip
        assert line in asked
    assert "--nnodes=4 --nproc-per-node=8" in text
    assert "-m exgrpo_megatron train recipe.yaml 'data.system_prompt=it'\"'\"'s $HOME' &" in text


def test_the_machines_that_are_asked_for_take_the_place_of_the_recipes(exgrpo, project):
    (project / "eight.yaml").write_text("defaults: recipe.yaml\ncluster: {num_nodes: 1, gpus_per_node: 8}\n")
    result = exgrpo("launch", "eight.yaml", "--nodes", 2, "--gpus-per-node", 8)
    assert result.code == 0, result.err
    assert "--nnodes=2 --nproc-per-node=8" in result.out
    assert "train eight.yaml cluster.num_nodes=2 &" in result.out  # a run of 16 would else be refused
    other = exgrpo("launch", "eight.yaml", "--gpus-per-node", 4)
    assert "train eight.yaml cluster.gpus_per_node=4 &" in other.out


def test_launch_takes_machines_from_the_recipe_and_without_a_limit_asks_for_no_signal(exgrpo, project):
    text = exgrpo("launch", "recipe.yaml", "cluster.num_nodes=2", "cluster.gpus_per_node=4").out
    assert "#SBATCH --nodes=2" in text
    assert "#SBATCH --gpus-per-node=4" in text
    assert "--signal" not in text


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("2:00:05", 2 * 3600 + 5),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("1-12:30:15", 36 * 3600 + 30 * 60 + 15),
        ("soon", None),
        ("٩٠", None),
        ("1-", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(time, seconds):
    assert time_limit_s(time) == seconds


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ["--nodes", 3, "--gpus-per-node", 1, "policy.megatron_cfg.tensor_model_parallel_size=2"],
            "--nodes 3 --gpus-per-node 1: policy.megatron_cfg: tensor_model_parallel_size * "
            "pipeline_model_parallel_size * context_parallel_size = 2 * 1 * 1 = 2 does not divide the 3 processes",
        ),
        (
            ["--nodes", 4, "--gpus-per-node", 1, "cluster.num_nodes=2"],
            "--nodes 4 sets cluster.num_nodes for the run, but cluster.num_nodes=2 is given too",
        ),
        (["--gpus-per-node", 1, "cluster.gpus_per_node=2"], "--gpus-per-node 1 sets cluster.gpus_per_node"),
        (["--partition", "gpu; rm"], "--partition 'gpu; rm'"),
        (["--time", "soon"], "--time 'soon'"),
        (["--stop-before-s", 30], "--stop-before-s 30"),
        (["--stop-before-s", 65_536], "--stop-before-s 65536: must be more than 60"),
        (["--folder", "/a\n#SBATCH --exclusive"], "--folder '/a\\n#SBATCH --exclusive': has '\\n'"),
        (["--folder", "/it's"], '--folder "/it\'s": has "\'"'),
        (["--python", "/a\tb"], "--python '/a\\tb': has '\\t'"),
        (["--time", "11"], "--time 11 is 660 s, not more than --stop-before-s 600 and the 60 s"),
        (["--time", "1:00:00", "--stop-before-s", 7200], "--time 1:00:00 is 3600 s"),
    ],
)
def test_launch_refuses_what_slurm_or_the_run_would(exgrpo, project, args, text):
    result = exgrpo("launch", "recipe.yaml", *args)
    assert result.code == 2
    assert text in result.err
