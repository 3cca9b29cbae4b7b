"""Time and memory of handing weights to a vLLM engine, against a plain copy of the same bytes.

    OMP_NUM_THREADS=1 PYTHONPATH=.:conversion python benchmarks/weight_push.py [--size 4m|135m] [--bucket-mb 64]
        [--separate-process] [--repeats 5]

Random weights in float32; `135m` has the shape of SmolLM2-135M (538 MB). The copy goes into memory that exists already,
tensor by tensor. Memory is the highest resident set of this process during a push over that just before it (Linux).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.config import VllmConfig
from exgrpo_megatron.rollout.vllm_engine import VLLMEngine
from exgrpo_megatron.rollout.vllm_process import VLLMSettings
from exgrpo_megatron.rollout.weight_buckets import in_groups

SHAPES = {
    "4m": {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 768},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "intermediate_size": 1536},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--separate-process", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    config = {
        **SHAPES[args.size], "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        measure(Path(folder), Architecture.from_hf_config(config), args)


def measure(folder: Path, arch: Architecture, args: argparse.Namespace) -> None:
    shapes = manifest(arch)
    weights = {name: torch.randn(shapes[name]) * 0.02 for name in in_groups(shapes)}
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    cfg = VllmConfig(update_weights_bucket_megabytes=args.bucket_mb, separate_process=args.separate_process)
    engine = VLLMEngine(arch, VLLMSettings(folder, cfg, torch.float32, 512, 8, 2**28))
    engine.load_weights(weights.items(), 0)
    megabytes = sum(tensor.nbytes for tensor in weights.values()) / 1e6

    def copy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)

    copied, _ = best(copy, args.repeats)
    pushed, peak = best(lambda: engine.load_weights(weights.items(), 1), args.repeats)
    print(
        f"{args.size}: {megabytes:.0f} MB in {len(weights)} tensors, bucket {engine._plan.capacity / 1e6:.0f} MB; "
        f"copy {copied * 1e3:.1f} ms, push {pushed * 1e3:.1f} ms ({pushed / copied:.2f} times); "
        f"memory above what was held before {peak:.0f} MB"
    )
    engine.close()


def best(action: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median seconds of `repeats` runs after one to warm up, and the largest growth of memory in MB."""
    action()
    seconds, growth = [], []
    for _ in range(repeats):
        before = _high_water_mb(reset=True)
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
        growth.append(_high_water_mb() - before)
    return float(np.median(seconds)), max(growth)


def _high_water_mb(*, reset: bool = False) -> float:
    """Highest resident set of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1e3


if __name__ == "__main__":
    main()
