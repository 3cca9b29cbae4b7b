"""NeMo-Run: recipes as `run.Partial`, executors, and launching them (docs/nemo.md, NeMo-Run).

Needs nemo-run (the extra `launcher`), and of this project's own dependencies only pydantic, PyYAML, typer and rich: it
works where torch is not installed.
"""

from exgrpo_megatron.launch_command import SlurmJob
from exgrpo_megatron.nemo.executors import Remote, local_executor, slurm_executor
from exgrpo_megatron.nemo.launching import dry_run, run_here, script, submit
from exgrpo_megatron.nemo.partials import is_nemo_run_yaml, read_yaml, recipe, resolve, write_yaml
from exgrpo_megatron.nemo.shipped import (
    llama_3_1_8b_8gpu,
    llama_3_1_8b_16gpu,
    llama_3_1_8b_instruct_8gpu,
    llama_3_1_70b_64gpu,
    own_questions,
    quickstart,
    quickstart_grpo,
    qwen2_5_7b_instruct_8gpu,
    qwen2_5_32b_32gpu,
    qwen2_5_math_1_5b_1gpu,
    qwen2_5_math_1_5b_8gpu,
    qwen2_5_math_7b_8gpu,
    smollm2_135m_gsm8k_cpu,
    symbols_exgrpo,
    symbols_grpo,
    symbols_replay_step,
)
from exgrpo_megatron.nemo.task import train

__all__ = [
    "Remote",
    "SlurmJob",
    "dry_run",
    "is_nemo_run_yaml",
    "llama_3_1_8b_8gpu",
    "llama_3_1_8b_16gpu",
    "llama_3_1_8b_instruct_8gpu",
    "llama_3_1_70b_64gpu",
    "local_executor",
    "own_questions",
    "quickstart",
    "quickstart_grpo",
    "qwen2_5_7b_instruct_8gpu",
    "qwen2_5_32b_32gpu",
    "qwen2_5_math_1_5b_1gpu",
    "qwen2_5_math_1_5b_8gpu",
    "qwen2_5_math_7b_8gpu",
    "read_yaml",
    "recipe",
    "resolve",
    "run_here",
    "script",
    "slurm_executor",
    "smollm2_135m_gsm8k_cpu",
    "submit",
    "symbols_exgrpo",
    "symbols_grpo",
    "symbols_replay_step",
    "train",
    "write_yaml",
]
