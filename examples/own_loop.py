"""Experience replay in a training loop of your own: plain PyTorch, seconds on a CPU.

    python examples/own_loop.py

Eight symbols secretly stand for six digits. A question is two symbols, its answer their two digits; the model finds out
from right and wrong alone, and at first one answer in 36 is right. The same loop is run twice from the same weights,
with replay and without, at the same number of sampled answers; printed is the share of right answers to questions that
are never trained on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from exgrpo_megatron.algorithm.advantages import group_advantages
from exgrpo_megatron.replay import (
    DifficultyBucketer,
    ReplayedTrajectory,
    SelectiveReplay,
    TrajectoryBuffer,
    compute_importance_weights,
)

NUM_SYMBOLS, NUM_DIGITS, HELD_OUT = 8, 6, 16
QUESTIONS_A_STEP, ANSWERS_A_QUESTION, REPLAYED_A_STEP = 4, 4, 32


class Policy(nn.Module):
    """Log-probs of the digit at each of two places."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_SYMBOLS, 32)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, NUM_DIGITS))

    def forward(self, questions: Tensor) -> Tensor:
        """[n, 2] symbols -> [n, 2, digits] log-probs."""
        return self.head(self.symbols(questions)).log_softmax(dim=-1)

    def logprobs(self, questions: Tensor, answers: Tensor) -> Tensor:
        """Of answers [n, 2] to questions [n, 2], a token."""
        return self(questions).gather(2, answers[:, :, None]).squeeze(2)


def train(*, with_replay: bool, num_steps: int = 90, seed: int = 0) -> Iterator[tuple[int, float]]:
    """Yields (answers sampled, held-out pass rate) before the first step and after every 15."""
    torch.manual_seed(seed)
    meaning = torch.randint(NUM_DIGITS, (NUM_SYMBOLS,))
    pairs = torch.cartesian_prod(torch.arange(NUM_SYMBOLS), torch.arange(NUM_SYMBOLS))
    pairs = pairs[torch.randperm(len(pairs))]
    held_out, training = pairs[:HELD_OUT], pairs[HELD_OUT:]
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    buffer = TrajectoryBuffer(max_size=1000, bucketer=DifficultyBucketer(window_size=16), seed=seed)
    # Success is rare here, so hard questions are wanted too; 0.9 leaves out what needs no more practice.
    replay = SelectiveReplay("entropy_guided", 1.0, (0.0, 0.9), entropy_percentile=75, seed=seed)

    for step in range(num_steps + 1):
        if step % 15 == 0:
            yield step * QUESTIONS_A_STEP * ANSWERS_A_QUESTION, pass_rate(policy, held_out, meaning)
        chosen = training[torch.randint(len(training), (QUESTIONS_A_STEP,))]
        questions = chosen.repeat_interleave(ANSWERS_A_QUESTION, dim=0)
        with torch.no_grad():
            answers = torch.distributions.Categorical(logits=policy(questions)).sample()
            recorded = policy.logprobs(questions, answers)
        rewards = (answers == meaning[questions]).all(dim=1).float()

        advantages = group_advantages(rewards.view(QUESTIONS_A_STEP, ANSWERS_A_QUESTION)).flatten()
        weights = compute_importance_weights(policy.logprobs(questions, answers), recorded)
        update(optimizer, -(advantages[:, None] * weights).mean())

        if with_replay:
            buffer.add(
                {
                    "question_id": f"{question[0]} {question[1]}",
                    "prompt_ids": question,
                    "token_ids": answer,
                    "logprobs": logprobs,
                    "reward": reward.item(),
                    "policy_version": step,
                }
                for question, answer, logprobs, reward in zip(questions, answers, recorded, rewards, strict=True)
            )
            stored = replay.select(buffer, REPLAYED_A_STEP)
            if stored:
                update(optimizer, replay_loss(policy, stored))


def replay_loss(policy: Policy, stored: list[ReplayedTrajectory]) -> Tensor:
    """Stored answers only, nothing sampled: the more often a question is solved, the less its answers count."""
    questions = torch.tensor([one.prompt_ids.tolist() for one in stored if one.prompt_ids is not None])
    answers = torch.tensor([one.token_ids.tolist() for one in stored])
    recorded = torch.tensor([one.logprobs.tolist() for one in stored])
    advantages = 1 - torch.tensor([one.correctness_rate for one in stored])
    now = policy.logprobs(questions, answers)
    weights = compute_importance_weights(now, recorded, shaping="normalized_ratio", beta=0.1)
    return -(advantages[:, None] * weights).mean()


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One optimiser step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def pass_rate(policy: Policy, questions: Tensor, meaning: Tensor) -> float:
    """Probability of a right answer, mean over the questions."""
    with torch.no_grad():
        return policy.logprobs(questions, meaning[questions]).sum(dim=1).exp().mean().item()


def main() -> None:
    """Run both, and print them side by side."""
    print("answers sampled   with replay   without")
    for (answers, replayed), (_, plain) in zip(train(with_replay=True), train(with_replay=False), strict=True):
        print(f"{answers:15d}   {replayed:11.1%}   {plain:7.1%}")


if __name__ == "__main__":
    main()
