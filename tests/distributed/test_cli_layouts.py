"""`exgrpo train` under torch.distributed.run, tensor parallel: one process writes, and a pipeline resumes the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import python_path
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "cli"))

from cli_project import write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TP2 = "policy.megatron_cfg.tensor_model_parallel_size=2"
WARM_START = ("sft.warm_start=true", "sft.warm_start_dir=warm", "sft.data.generator=chain_arithmetic")
ROOM = ("data.max_input_seq_length=48", "policy.max_total_sequence_length=160", "policy.generation.max_new_tokens=64")
PP2 = "policy.megatron_cfg.pipeline_model_parallel_size=2"


def train(folder: Path, *overrides: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-endpoint=localhost:0"]
    command += ["--rdzv-backend=c10d", "-m", "exgrpo_megatron", "train", "recipe.yaml", *overrides]
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("project")
    write_inputs(folder)
    return folder, train(folder, TP2, *WARM_START, *ROOM)


def test_everything_is_written_and_said_once(trained: tuple[Path, str]) -> None:
    folder, output = trained
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert output.count("training questions:") == 1
    assert len(list((folder / "warm").iterdir())) == 1
    exported = load_file(run / "hf" / "model.safetensors")
    assert (
        exported["model.embed_tokens.weight"].shape[0]
        == json.loads((run / "hf" / "config.json").read_text())["vocab_size"]
    )


def test_the_run_goes_on_with_pipeline_stages(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    output = train(folder, PP2, *WARM_START, *ROOM, "grpo.max_num_steps=3")
    assert output.count("resuming from") == 1
    assert "policy.megatron_cfg.tensor_model_parallel_size: 2 -> 1" in output
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
