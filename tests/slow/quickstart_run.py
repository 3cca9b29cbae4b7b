"""The shipped quickstart, through the command a user types."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def train_quickstart(folder: Path, warm: Path, *overrides: str) -> tuple[Path, str]:
    """Its warm start, unless `warm` has it already, and 40 of its steps; the run's folder and what was printed."""
    command = [
        sys.executable, "-c", "from exgrpo_megatron.cli import main; main()",
        "train", str(ROOT / "recipes" / "quickstart.yaml"),
        "grpo.max_num_steps=40", f"logger.log_dir={folder / 'run'}", f"sft.warm_start_dir={warm}",
        *overrides,
    ]  # fmt: skip
    paths = ":".join(str(ROOT / name) for name in ("", "kernels", "conversion"))
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run", done.stdout
