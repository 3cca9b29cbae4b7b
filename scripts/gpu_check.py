"""What the fused loss is worth on the GPU here: correct, how near to the speed of memory and products, how small.

    pip install torch triton pytest jaxtyping           (and megatron-core and the rest, for the actor's step)
    python scripts/gpu_check.py --json gpu_check.json   (one H100 or H200, some minutes)

Writes a Markdown table and, with --json, the same as JSON. The exit code is 1 where a test failed; speed has goals,
which are shown as met or missed. Without a GPU, `--device cpu --small` runs the same code, interpreted: of the figures
it then writes, only that they are there means anything.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "triton", "pytest", "jaxtyping")
TESTS_TIMEOUT_S = 360


@dataclass(frozen=True)
class Sizes:
    """Tokens, hidden width and vocabulary of the measurements; the vocabulary's last columns are padding."""

    tokens: int = 8192
    hidden: int = 4096
    columns: int = 151936
    valid: int = 151669
    copied_mib: int = 2048
    repeats: int = 7


SMALL = Sizes(tokens=6, hidden=32, columns=512, valid=500, copied_mib=1, repeats=1)


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    value: float | str
    unit: str = ""
    goal: float | None = None
    larger_is_better: bool = False

    @property
    def verdict(self) -> str:
        if self.goal is None or isinstance(self.value, str):
            return ""
        met = self.value >= self.goal if self.larger_is_better else self.value <= self.goal
        return f"{'at least' if self.larger_is_better else 'at most'} {self.goal:g}: {'met' if met else 'missed'}"


def main() -> int:
    """0, 1 where a test failed, 2 where something is missing."""
    arguments = parse_arguments()
    problem = missing(arguments.device)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    sizes = SMALL if arguments.small else Sizes()
    start = time.monotonic()
    passed, results = (True, []) if arguments.no_tests else run_tests(arguments.device, arguments.small)
    for measure in (logits_form, linear_form):
        results += measure(arguments.device, sizes)
        release(arguments.device)
    results.append(Result("all of this", time.monotonic() - start, "s", goal=480))
    if arguments.device == "cpu":  # interpreted: says nothing of speed
        results = [replace(result, goal=None) for result in results]
    report = {"environment": environment(arguments.device), "sizes": asdict(sizes), "tests_passed": passed}
    report["results"] = [asdict(result) | {"verdict": result.verdict} for result in results]
    print(markdown(report["environment"], sizes, results))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if passed else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: interpreted, says nothing of speed"
    )
    parser.add_argument("--small", action="store_true", help="sizes for an interpreter")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser.parse_args()


def missing(device: str) -> str | None:
    """What to do about what is not here."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}; run: {sys.executable} -m pip install {' '.join(absent)}"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    sys.path.insert(0, str(ROOT / "kernels"))
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU; to try this script without one: --device cpu --small"
    return None


def environment(device: str) -> dict[str, str]:
    import torch
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    if device == "cpu":
        return {"card": "none: CPU, interpreted"} | found
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return {"card": properties.name, "memory": memory, "CUDA": str(torch.version.cuda)} | found


def run_tests(device: str, small: bool) -> tuple[bool, list[Result]]:
    """tests/gpu in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "--kernel-device", device]
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *(["--small"] if small else [])],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TESTS_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print(error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout)
        return False, [Result("tests against float64", f"not done after {TESTS_TIMEOUT_S} s")]
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"exit code {done.returncode}"
    if done.returncode != 0 or "skipped" in summary:
        print(done.stdout)
    return done.returncode == 0, [
        Result("tests against float64 (float32, bfloat16, float16, mixed)", summary.strip("= ")),
        Result("time of the tests", time.monotonic() - start, "s"),
    ]


def logits_form(device: str, sizes: Sizes) -> list[Result]:
    """Both passes over bfloat16 logits, against a copy on the same memory."""
    import torch

    from exgrpo_kernels import triton_kernels
    from exgrpo_kernels.reference import Objective

    copied = torch.empty(2, sizes.copied_mib << 20, dtype=torch.uint8, device=device)
    copy_s = seconds(lambda: copied[0].copy_(copied[1]), device, sizes.repeats)
    copy = 2 * copied[0].nbytes / copy_s
    del copied
    logits = torch.randn(sizes.tokens, sizes.columns, device=device, dtype=torch.bfloat16)
    inputs = loss_inputs(device, sizes)
    layout = {"temperature": 1.0, "valid": sizes.valid, "vocab_start": 0}
    row_statistics = triton_kernels.row_statistics(logits, inputs.targets, **layout)[None]

    def gradient() -> None:  # the logits become their gradients again and again, which takes as long
        triton_kernels.loss_and_gradient(
            logits, row_statistics, inputs.targets, inputs, Objective(), **layout, write_gradient=True
        )

    first = seconds(lambda: triton_kernels.row_statistics(logits, inputs.targets, **layout), device, sizes.repeats)
    second = seconds(gradient, device, sizes.repeats)
    extra = peak_of(gradient, device)
    both = 3 * logits.nbytes / (first + second)
    return [
        Result("copy on the device", copy / 1e9, "GB/s"),
        Result("statistics (K1), one read", logits.nbytes / first / 1e9, "GB/s"),
        Result("loss and gradient (K2), one read and one write", 2 * logits.nbytes / second / 1e9, "GB/s"),
        Result("K1 + K2 over the copy", both / copy, "", goal=0.85, larger_is_better=True),
        Result("K1 + K2", 1e3 * (first + second), "ms"),
        *([] if extra is None else [Result("memory of K2 beside the logits", extra / 2**20, "MiB")]),
    ]


def linear_form(device: str, sizes: Sizes) -> list[Result]:
    """From bfloat16 hidden states to loss and gradients, against the three products of the same sizes alone."""
    import torch

    from exgrpo_kernels import fused
    from exgrpo_kernels.reference import Objective

    hidden = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (
        torch.randn(sizes.columns, sizes.hidden, device=device, dtype=torch.bfloat16) / sizes.hidden**0.5
    ).requires_grad_()
    main_grad = torch.zeros(sizes.columns, sizes.hidden, device=device)
    head = fused.OutputHead(weight, valid_vocab=sizes.valid, main_grad=main_grad)
    inputs = loss_inputs(device, sizes)

    def step(form: fused.Form) -> None:
        fused.token_loss(hidden, head, inputs, Objective(), form=form).loss.backward()
        # Not at the next call: what that gave back would be missing from the memory it is seen to take.
        hidden.grad = weight.grad = None

    def score() -> None:
        fused.score(hidden, head, inputs.targets)

    products = seconds(lambda: three_products(hidden.detach(), weight.detach()), device, sizes.repeats)
    release(device)
    fused_s = seconds(lambda: step("linear"), device, sizes.repeats)
    fused_bytes = peak_of(lambda: step("linear"), device)
    score_s = seconds(score, device, sizes.repeats)
    results = [
        Result("three products alone", 1e3 * products, "ms"),
        Result("linear form, loss and gradients", 1e3 * fused_s, "ms"),
        Result("linear form over the three products", fused_s / products, "", goal=1.3),
        Result("linear form, log-probs and entropies only", 1e3 * score_s, "ms"),
    ]
    if fused_bytes is not None:
        logits = sizes.tokens * sizes.columns * 4
        results += [
            Result("memory of the linear form, its gradients included", fused_bytes / 2**20, "MiB"),
            Result("float32 logits alone would be", logits / 2**20, "MiB"),
        ]
    return [*results, *plain_form(lambda: step("reference"), device, fused_s)]


def plain_form(step: Callable[[], None], device: str, fused_s: float) -> Iterator[Result]:
    """The plain definition under autograd, for comparison; it may not fit."""
    import torch

    release(device)
    try:
        plain_s = seconds(step, device, 1)
        used = peak_of(step, device)
    except torch.OutOfMemoryError:
        yield Result("plain torch", "does not fit in this card's memory")
        return
    yield Result("plain torch over the linear form", plain_s / fused_s)
    if used is not None:
        yield Result("memory of plain torch", used / 2**20, "MiB")


def three_products(hidden: Any, weight: Any) -> None:
    """Logits, and the two products of the backward pass, in bfloat16; the logits stand in for their gradient."""
    logits = hidden @ weight.t()
    _ = logits @ weight
    _ = logits.t() @ hidden


def loss_inputs(device: str, sizes: Sizes) -> Any:
    """Half fresh, half replayed; every token has a gradient."""
    import torch

    from exgrpo_kernels.fused import LossInputs

    tokens = sizes.tokens
    return LossInputs(
        targets=torch.randint(0, sizes.valid, (tokens,), device=device),
        old_logprobs=torch.full((tokens,), -12.0, device=device),
        advantages=torch.randn(tokens, device=device),
        replayed=torch.arange(tokens, device=device) % 2 == 1,
        policy_weights=torch.full((tokens,), 1 / tokens, device=device),
        entropy_weights=torch.full((tokens,), 0.01 / tokens, device=device),
    )


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of one call. On a GPU of several at a time, so that it does not wait for the host in between, and
    after two that are not counted (the first compiles)."""
    timed = _seconds_on_gpu if device == "cuda" else _seconds_on_cpu
    if device == "cuda":
        work()
        work()
    return statistics.median(timed(work) for _ in range(repeats))


def _seconds_on_gpu(work: Callable[[], object], calls: int = 5) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def _seconds_on_cpu(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def peak_of(work: Callable[[], object], device: str) -> int | None:
    """Most memory in use during a call, beyond what was before it; None on a CPU."""
    import torch

    if device != "cuda":
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def release(device: str) -> None:
    """Give freed memory back to the device."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def markdown(environment: dict[str, str], sizes: Sizes, results: list[Result]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in environment.items()), ""]
    lines += [f"{sizes.tokens} tokens, hidden {sizes.hidden}, vocabulary {sizes.valid} in {sizes.columns} columns.", ""]
    lines += ["| | Measured | Goal |", "|---|---|---|"]
    for result in results:
        value = result.value if isinstance(result.value, str) else f"{result.value:.4g} {result.unit}".strip()
        lines.append(f"| {result.name} | {value} | {result.verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
