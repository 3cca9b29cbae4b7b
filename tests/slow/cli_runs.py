"""The program as a process of its own, or several, on small runs."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

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
