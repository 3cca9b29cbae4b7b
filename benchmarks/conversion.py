"""Memory and throughput of `exgrpo convert`, Hugging Face -> torch_dist -> Hugging Face, against `cp`.

    OMP_NUM_THREADS=1 PYTHONPATH=.:conversion python benchmarks/conversion.py [--gigabytes 0.5] [--shard-mb 500]
        [--folder FOLDER] [--repeats 3] [--dtype fp16]

Makes a Llama-like model of random bf16 weights in a new folder below FOLDER (default: the temporary folder), where it
must have room four times, and removes it at the end. Copies and conversions take turns; each counts with the fastest
of its `--repeats`. A conversion flushes its files to disk; it is compared with `cp`, and with `cp` and a flush. What is
read is in the page cache, as far as that is large enough. Memory is the highest resident set of this process over that
just before (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.compare import compare
from exgrpo_conversion.convert import Target, convert
from exgrpo_conversion.formats import open_source
from exgrpo_conversion.hf_folder import write_hf_folder
from exgrpo_conversion.mapping import manifest

LAYER = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
"""Layers of 90 MB in bf16, as of a model of 1B."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of the weights")
    parser.add_argument("--shard-mb", type=int, default=500, help="largest file")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="convert to; default: none, which copies the values")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    model, copy, megatron, back = (folder / name for name in ("model", "copy", "megatron", "back"))
    shard_bytes = args.shard_mb * 10**6
    nbytes = make_model(model, args.gigabytes, shard_bytes)
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    print(f"{nbytes / 1e9:.2f} GB in files of up to {args.shard_mb} MB, {args.repeats} repeats")

    def run_cp(flush: bool) -> None:
        subprocess.run(["cp", "-r", model, copy], check=True)
        if flush:
            subprocess.run(["sync", *copy.iterdir()], check=True)

    def run_convert(source: Path, target: Target) -> None:
        with open_source(source) as opened:
            convert(opened, target, lambda _: None)

    actions: dict[str, tuple[Path, Callable[[], None]]] = {
        "cp": (copy, lambda: run_cp(False)),
        "cp with a flush": (copy, lambda: run_cp(True)),
        "hf -> torch_dist": (megatron, lambda: run_convert(model, Target("torch_dist", megatron, dtype, shard_bytes))),
        "torch_dist -> hf": (back, lambda: run_convert(megatron, Target("hf", back, dtype, shard_bytes))),
    }
    seconds, growth = take_turns(actions, args.repeats)
    for name in actions:
        speed, ratios = nbytes / seconds[name] / 1e9, [seconds[cp] / seconds[name] for cp in ("cp", "cp with a flush")]
        print(
            f"{name}: {speed:.2f} GB/s, {ratios[0]:.2f} times cp, {ratios[1]:.2f} times cp with a flush; memory "
            f"{growth[name]:.0f} MB, {growth[name] / args.shard_mb:.2f} files"
        )
    with open_source(model) as first, open_source(back) as second:
        started = time.perf_counter()
        verdict = "the same" if compare(first, second).same else "NOT THE SAME"
        print(f"compared at {2 * nbytes / (time.perf_counter() - started) / 1e9:.2f} GB/s: {verdict}")


def make_model(folder: Path, gigabytes: float, shard_bytes: int) -> int:
    """Write a model of about so many gigabytes tensor by tensor; returns the bytes of its weights."""
    shapes = manifest(Architecture.from_hf_config(LAYER | {"num_hidden_layers": 2}))
    both = sum(2 * np.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    rest = sum(2 * np.prod(shape) for name, shape in shapes.items() if ".layers." not in name)
    config = LAYER | {"num_hidden_layers": max(1, round((gigabytes * 1e9 - rest) / (both / 2))), "dtype": "bfloat16"}
    settings = folder.with_name("settings")
    settings.mkdir()
    (settings / "config.json").write_text(json.dumps(config))
    arch = Architecture.from_hf_config(config)
    shapes = manifest(arch)
    write_hf_folder(folder, _random(shapes), arch=arch, source_dir=settings, max_shard_bytes=shard_bytes)
    return int(sum(2 * np.prod(shape) for shape in shapes.values()))


def take_turns(
    actions: dict[str, tuple[Path, Callable[[], None]]], repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Fewest seconds and largest growth of memory in MB of each action; what it makes is removed before it."""
    seconds, growth = dict.fromkeys(actions, float("inf")), dict.fromkeys(actions, 0.0)
    for _ in range(repeats):
        for name, (made, action) in actions.items():
            shutil.rmtree(made, ignore_errors=True)
            os.sync()
            before = _high_water_mb(reset=True)
            started = time.perf_counter()
            action()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
            growth[name] = max(growth[name], _high_water_mb() - before)
    return seconds, growth


def _random(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Values that repeat every 32 MB: making new ones would take longer than everything measured."""
    block = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        yield name, block.repeat(-(-size // block.numel()))[:size].view(shape)


def _high_water_mb(*, reset: bool = False) -> float:
    """Highest resident set of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return float(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3


if __name__ == "__main__":
    main()
