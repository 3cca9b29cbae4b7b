"""CPU time of one training step of the Megatron actor, against transformers + torch AdamW in the same process.

    OMP_NUM_THREADS=1 PYTHONPATH=.:kernels:conversion python benchmarks/actor.py [--size 1M] [--repeats 15] [--profile]
        [--beside FOLDER ...] [--loss-kernel linear]

Both sides take the same optimiser step on 16 sequences of 128 tokens of which all but the first are trained on, so
that neither gains by leaving out prompts or padding: forward (SDPA attention), the clipped ratio objective with the
entropy of every token (reported, not trained), backward, norm, clipping to 1, AdamW. The weights after the first step
are compared. Steps of the two sides alternate; each side's figure is its fastest step, the one that others disturbed
least. `--profile` prints where the actor's time goes instead. `--beside` adds the actor of another checkout, in a
process of its own, as one more side. To compare two checkouts give both so: to have a process to itself is worth 1%.

Three runs on a quiet machine of 2 cores, torch 2.13.0, megatron-core 0.16.1:

     1M   actor 225 to 229 ms, transformers 205 to 207 ms, ratio 1.09 to 1.11
    10M   actor 1771 to 1785 ms, transformers 1696 to 1732 ms, ratio 1.03 to 1.04

Those are of the loss from logits by autograd. In chunks from the hidden states, the output layer and the loss alone
took 0.92 of that at 10M, 1.02 at 1M and half a millisecond more at the quickstart's size, in one run; of the whole step
that is less than what two runs of the same code differ by on a busy machine (up to 5%).

What the 20 ms of the small model are made of, timed piece by piece: Megatron keeps gate and up in one matrix, whose
halves are strided for SiLU and put together again in the backward pass (4 ms); it cuts queries, keys and values from
one product and copies them in RoPE (2 to 4 ms); log-prob and entropy are computed again in the backward pass rather
than kept (2.5 ms, and no second [tokens, vocabulary] tensor); the rest is attention's change of layout, gradient
buffers, Megatron's schedule and the report of every token. All but the log-probs is Megatron-Core's own layer, which
fused kernels replace on GPUs. AdamW and the norm cost the same on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.config import ClusterConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import initialize
from exgrpo_megatron.types import TrainSequence

SEQUENCES, LENGTH = 16, 128
SIZES = {
    "quickstart": {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "vocab_size": 21},
    "1M": {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 1024},
    "10M": {"num_hidden_layers": 8, "hidden_size": 320, "intermediate_size": 896, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 2048},
}  # fmt: skip
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.01, adam_beta2=0.999, adam_eps=1e-8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], help="one of the sizes; default: all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--beside", type=Path, action="append", default=[], help="folder of a checkout, whose actor is one more side"
    )
    parser.add_argument("--loss-kernel", help="policy.loss_kernel of the actor; default: the recipe's default")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)  # be such a third side
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for size in [args.size] if args.size else SIZES:
        torch.manual_seed(0)
        config = transformers.Qwen2Config(**SIZES[size], max_position_embeddings=LENGTH, tie_word_embeddings=False)
        model = transformers.Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
        sequences = random_sequences(config.vocab_size)
        keys = {"loss_kernel": args.loss_kernel} if args.loss_kernel else {}
        with actor_of(model, keys) as actor:
            step = partial(actor_step, actor, sequences)
            if args.answer:
                answer(step)
            elif args.profile:
                print_profile(step, args.repeats)
            else:
                compare(size, model, actor, sequences, args.repeats, args.beside)


def compare(
    size: str,
    model: transformers.PreTrainedModel,
    actor: MegatronActor,
    sequences: list[TrainSequence],
    repeats: int,
    beside: list[Path],
) -> None:
    """Print the CPU time of a step of every side, and the actor's over the others'."""
    ours, theirs = partial(actor_step, actor, sequences), TransformersStep(model, sequences)
    ours(), theirs()
    difference = weight_difference(actor, model)
    sides = {"actor": partial(cpu_seconds, ours), "transformers": partial(cpu_seconds, theirs)}
    with contextlib.ExitStack() as stack:
        for checkout in beside:
            sides[str(checkout)] = stack.enter_context(other_actor(checkout, size))
        seconds = {name: [] for name in sides}
        for _ in range(repeats):
            for name, step_seconds in sides.items():
                seconds[name].append(step_seconds())
    fastest = {name: min(values) for name, values in seconds.items()}
    listed = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in fastest.items())
    ratios = ", ".join(
        f"{fastest['actor'] / value:.3f} of {name}" for name, value in fastest.items() if name != "actor"
    )
    print(
        f"{size} ({sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters): {listed} CPU a step, the actor "
        f"{ratios}; largest difference of a weight after one step {difference:.0e}"
    )


@contextlib.contextmanager
def actor_of(model: transformers.PreTrainedModel, keys: dict[str, Any]) -> Iterator[MegatronActor]:
    policy = PolicyConfig(
        model_name="unused", train_micro_batch_size=SEQUENCES, max_total_sequence_length=LENGTH, **keys
    )
    comm = initialize(policy, ClusterConfig(), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        actor = MegatronActor(Path(folder), policy, OPTIMIZER, SchedulerConfig(), total_updates=10_000, comm=comm)
    yield actor
    comm.shutdown()


@contextlib.contextmanager
def other_actor(checkout: Path, size: str) -> Iterator[Callable[[], float]]:
    """A function that takes a step of the actor in `checkout` and returns its CPU seconds; one is taken before."""
    folders = [checkout.resolve() / part for part in ("", "kernels", "conversion")]
    process = subprocess.Popen(
        [sys.executable, __file__, "--answer", "--size", size],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip

    def step_seconds() -> float:
        process.stdin.write("\n")
        return float(process.stdout.readline())

    step_seconds()
    yield step_seconds
    process.stdin.close()
    process.wait()


def answer(step: Callable[[], None]) -> None:
    """Take a step for every line that comes in, and write its CPU seconds."""
    for _ in sys.stdin:
        print(cpu_seconds(step), flush=True)


def random_sequences(vocab_size: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            prompt_ids=rng.integers(0, vocab_size, 1, dtype=np.int32),
            response_ids=rng.integers(0, vocab_size, LENGTH, dtype=np.int32),
            old_logprobs=np.full(LENGTH, -np.log(vocab_size), np.float32),
            advantage=float(rng.normal()),
            replayed=False,
            policy_weight=1.0 / (SEQUENCES * LENGTH),
            entropy_weight=0.0,
        )
        for _ in range(SEQUENCES)
    ]


def actor_step(actor: MegatronActor, sequences: list[TrainSequence]) -> None:
    actor.update(sequences, Objective(), temperature=1.0)


class TransformersStep:
    """The same step as one would write it with transformers and torch."""

    def __init__(self, model: transformers.PreTrainedModel, sequences: list[TrainSequence]) -> None:
        self.model = model.train()
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=OPTIMIZER.lr, betas=(OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2), eps=OPTIMIZER.adam_eps,
            weight_decay=OPTIMIZER.weight_decay,
        )  # fmt: skip
        rows = [np.concatenate([sequence.prompt_ids, sequence.response_ids]) for sequence in sequences]
        self.ids = torch.from_numpy(np.stack(rows)).long()
        self.old = torch.from_numpy(np.stack([sequence.old_logprobs for sequence in sequences]))
        self.advantages = torch.tensor([[sequence.advantage] for sequence in sequences])

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(input_ids=self.ids[:, :-1], use_cache=False).logits
        every = torch.log_softmax(logits, dim=-1)
        logprobs = every.gather(-1, self.ids[:, 1:, None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(every.exp() * every).sum(-1)
        ratio = (logprobs - self.old).exp()
        loss = -torch.minimum(ratio * self.advantages, ratio.clamp(0.8, 1.2) * self.advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss.item(), entropy.mean().item()


def weight_difference(actor: MegatronActor, model: transformers.PreTrainedModel) -> float:
    own = model.state_dict()
    return max(float((tensor - own[name]).abs().max()) for name, tensor in actor.export_weights())


def cpu_seconds(step: Callable[[], None]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def print_profile(step: Callable[[], None], repeats: int) -> None:
    """Operators by their own CPU time, then Python functions."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(repeats):
            step()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    python = cProfile.Profile()
    python.runcall(lambda: [step() for _ in range(repeats)])
    pstats.Stats(python).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
