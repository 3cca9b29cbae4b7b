"""Time and peak memory of the loss through the output layer: plain torch, compiled, every form here, and Liger's.

    OMP_NUM_THREADS=1 PYTHONPATH=kernels python kernels/benchmarks/fused_loss.py [--shape 2048x512x32768]

A shape is tokens x hidden x vocabulary. Each side computes log-prob and entropy of every token, the loss of fresh
(clipped) and replayed (shaped) tokens with an entropy bonus, and the gradients of hidden states and weight; Liger's
fused-linear GRPO loss has neither entropy nor replayed tokens, and computes the rest. Memory is the highest resident
set of a process of its own while it does so, above what it held before: inputs are not counted, gradients are. Time is
CPU time, taken in rounds, one step of each side after another, so that whatever else the machine does meets all alike;
the fastest step of each counts. `products` are the three matrix products alone, below which no side can come that
computes logits once. What cannot run is named with the reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from exgrpo_kernels import fused
from exgrpo_kernels.fused import LossInputs, Objective, OutputHead
from exgrpo_kernels.reference import token_terms

SHAPES = ("2048x512x32768", "1024x1024x151936")
LIGER_SEQUENCE = 128
"""Tokens of a sequence in Liger's loss, which takes sequences one after another."""


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    inputs: LossInputs

    @staticmethod
    def random(tokens: int, hidden: int, vocab: int, bonus: float) -> Problem:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape).normal_(generator=generator)

        weights = torch.full((tokens,), 1 / tokens)
        return Problem(
            normal(tokens, hidden).requires_grad_(),
            normal(vocab, hidden).mul_(hidden**-0.5).requires_grad_(),
            LossInputs(
                targets=torch.randint(0, vocab, (tokens,), generator=generator),
                old_logprobs=normal(tokens) * 0.1 - float(torch.tensor(vocab).log()) - 0.5,
                advantages=normal(tokens),
                replayed=torch.rand(tokens, generator=generator) < 0.25,
                policy_weights=weights,
                entropy_weights=bonus * weights if bonus else None,
            ),
        )

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


def naive_loss(hidden: Tensor, weight: Tensor, inputs: LossInputs) -> Tensor:
    """As one would write it."""
    log_probs = torch.log_softmax(hidden @ weight.t(), dim=-1)
    logprobs = log_probs.gather(1, inputs.targets[:, None]).squeeze(1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=1)
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, Objective())
    loss = (inputs.policy_weights * terms.policy_loss).sum()
    return loss if inputs.entropy_weights is None else loss - (inputs.entropy_weights * entropies).sum()


def naive(problem: Problem) -> Tensor:
    return naive_loss(problem.hidden, problem.weight, problem.inputs)


def ours(problem: Problem, form: fused.Form) -> Tensor:
    head = OutputHead(problem.weight, valid_vocab=len(problem.weight))
    return fused.token_loss(problem.hidden, head, problem.inputs, Objective(), form=form).loss


def recomputed(problem: Problem) -> Tensor:
    inputs, head = problem.inputs, OutputHead(problem.weight, valid_vocab=len(problem.weight))
    logprobs, entropies = fused.logprobs(problem.hidden, head, inputs.targets)
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, Objective())
    loss = (inputs.policy_weights * terms.policy_loss).sum()
    return loss if inputs.entropy_weights is None else loss - (inputs.entropy_weights * entropies).sum()


def liger(problem: Problem, compiled: bool) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def rows(values: Tensor) -> Tensor:
        return values.view(-1, LIGER_SEQUENCE)

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=compiled, use_ref_model=False, chunk_size=1)
    targets = rows(problem.inputs.targets)
    return loss(
        problem.hidden.view(*targets.shape, -1), problem.weight, targets, torch.ones_like(targets),
        rows(problem.inputs.advantages)[:, 0].contiguous(), old_per_token_logps=rows(problem.inputs.old_logprobs),
    )[0]  # fmt: skip


def products(problem: Problem) -> Tensor:
    """No loss: the three products, on all tokens at once, and a scalar with gradients that costs nothing."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = hidden @ weight.t()
    problem.hidden.grad, problem.weight.grad = logits @ weight, logits.t() @ hidden
    return torch.zeros((), requires_grad=True)


def sides() -> dict[str, Callable[[Problem], Tensor]]:
    compiled = torch.compile(naive_loss)
    return {
        "naive": naive,
        "naive compiled": lambda problem: compiled(problem.hidden, problem.weight, problem.inputs),
        "linear (auto)": partial(ours, form="auto"),
        "logits": partial(ours, form="logits"),
        "recompute": recomputed,
        "products": products,
        "reference": partial(ours, form="reference"),
        "liger": partial(liger, compiled=False),
        "liger compiled": partial(liger, compiled=True),
    }


def step(side: Callable[[Problem], Tensor], problem: Problem) -> None:
    side(problem).backward()


def why_not(name: str) -> str | None:
    if name.startswith("liger") and importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    return None


def peak_mib(name: str, problem: Problem) -> float:
    """Of a second step in this process: the first one compiles what is compiled."""
    side = sides()[name]
    step(side, problem)
    problem.clear()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    step(side, problem)
    return status_mib("VmHWM") - before


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peaks(names: list[str], args: argparse.Namespace, shape: str) -> dict[str, float]:
    found = {}
    for name in names:
        command = [sys.executable, __file__, "--shape", shape, "--bonus", str(args.bonus), "--peak", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"  {name} did not run: {done.stderr.strip().splitlines()[-1]}", flush=True)
        else:
            found[name] = float(done.stdout.split()[-1])
            print(f"  {name}: {found[name]:.0f} MiB", flush=True)
    return found


def seconds(names: list[str], problem: Problem, rounds: int) -> dict[str, float]:
    every = sides()
    best = dict.fromkeys(names, float("inf"))
    for number in range(rounds + 1):
        for name in names:
            problem.clear()
            started = time.process_time()
            step(every[name], problem)
            if number:  # the first round compiles
                best[name] = min(best[name], time.process_time() - started)
    return best


def report(shape: str, args: argparse.Namespace) -> None:
    dimensions = tuple(int(number) for number in shape.split("x"))
    print(
        f"{shape}, float32, bonus {args.bonus}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        flush=True,
    )
    names = [name for name in sides() if args.only is None or name in args.only]
    for name in list(names):
        if reason := why_not(name):
            print(f"  {name} was left out: {reason}")
            names.remove(name)
    memory = peaks(names, args, shape)
    times = seconds(list(memory), Problem.random(*dimensions, args.bonus), args.rounds)
    for name, peak in memory.items():
        line = f"  {name:<15} {peak:6.0f} MiB  {times[name]:6.2f} s"
        if "naive" in memory:
            line += f"   {peak / memory['naive']:.2f} and {times[name] / times['naive']:.2f} of naive"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="one shape; default: two")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bonus", type=float, default=0.001, help="entropy bonus; 0: entropy is reported, not trained")
    parser.add_argument("--only", nargs="*", help="names of sides, as printed")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        dimensions = tuple(int(number) for number in args.shape.split("x"))
        print(peak_mib(args.peak, Problem.random(*dimensions, args.bonus)))
        return
    for shape in [args.shape] if args.shape else SHAPES:
        report(shape, args)


if __name__ == "__main__":
    main()
