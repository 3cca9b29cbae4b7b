"""A function for every recipe in recipes/, which gives it as a task; NeMo-Run's command line knows them by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nemo_run as run

import exgrpo_megatron
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.nemo.partials import recipe
from exgrpo_megatron.nemo.task import train

_FOLDER = Path(exgrpo_megatron.__file__).resolve().parents[1] / "recipes"

run.cli.entrypoint(train, namespace="exgrpo")

# A function to itself, not a loop: editors and type checkers find them. A test holds them against the folder.


@run.cli.factory(target=train)
def llama_3_1_70b_64gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with Llama-3.1-70B, 8 machines with 8 GPUs."""
    return _shipped("llama_3.1_70b_64gpu", overrides, python)


@run.cli.factory(target=train)
def llama_3_1_8b_16gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with the base model Llama-3.1-8B, 2 machines with 8 GPUs."""
    return _shipped("llama_3.1_8b_16gpu", overrides, python)


@run.cli.factory(target=train)
def llama_3_1_8b_8gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with the base model Llama-3.1-8B, one machine with 8 GPUs."""
    return _shipped("llama_3.1_8b_8gpu", overrides, python)


@run.cli.factory(target=train)
def llama_3_1_8b_instruct_8gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with Llama-3.1-8B-Instruct, one machine with 8 GPUs."""
    return _shipped("llama_3.1_8b_instruct_8gpu", overrides, python)


@run.cli.factory(target=train)
def own_questions(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO on question files of one's own."""
    return _shipped("own_questions", overrides, python)


@run.cli.factory(target=train)
def quickstart(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO on chain arithmetic, on a CPU, in minutes."""
    return _shipped("quickstart", overrides, python)


@run.cli.factory(target=train)
def quickstart_grpo(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """GRPO on chain arithmetic, to compare with `quickstart`."""
    return _shipped("quickstart_grpo", overrides, python)


@run.cli.factory(target=train)
def qwen2_5_32b_32gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with Qwen2.5-32B, 4 machines with 8 GPUs."""
    return _shipped("qwen2.5_32b_32gpu", overrides, python)


@run.cli.factory(target=train)
def qwen2_5_7b_instruct_8gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with Qwen2.5-7B-Instruct, one machine with 8 GPUs."""
    return _shipped("qwen2.5_7b_instruct_8gpu", overrides, python)


@run.cli.factory(target=train)
def qwen2_5_math_1_5b_1gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with Qwen2.5-Math-1.5B, one GPU."""
    return _shipped("qwen2.5_math_1.5b_1gpu", overrides, python)


@run.cli.factory(target=train)
def qwen2_5_math_1_5b_8gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with Qwen2.5-Math-1.5B, one machine with 8 GPUs."""
    return _shipped("qwen2.5_math_1.5b_8gpu", overrides, python)


@run.cli.factory(target=train)
def qwen2_5_math_7b_8gpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with Qwen2.5-Math-7B, one machine with 8 GPUs: the paper's main run."""
    return _shipped("qwen2.5_math_7b_8gpu", overrides, python)


@run.cli.factory(target=train)
def smollm2_135m_gsm8k_cpu(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO with SmolLM2-135M-Instruct on GSM8K, on a CPU."""
    return _shipped("smollm2_135m_gsm8k_cpu", overrides, python)


@run.cli.factory(target=train)
def symbols_exgrpo(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO on the symbols task, on a CPU."""
    return _shipped("symbols_exgrpo", overrides, python)


@run.cli.factory(target=train)
def symbols_grpo(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """GRPO on the symbols task, to compare with `symbols_exgrpo`."""
    return _shipped("symbols_grpo", overrides, python)


@run.cli.factory(target=train)
def symbols_replay_step(overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """ExGRPO on the symbols task, replaying in optimiser steps of their own."""
    return _shipped("symbols_replay_step", overrides, python)


def _shipped(name: str, overrides: Sequence[str], python: str) -> run.Partial:
    path = _FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"{path}: not there: shipped recipes are in the repository; give a file's path to recipe()")
    return recipe(path, overrides, python)
