"""Every block of Python in the documents runs; what it leaves open (`...`) is filled in, nothing else is changed."""

import documented
import numpy as np
import pytest
import torch

from exgrpo_kernels import LossInputs, Objective, OutputHead, score, token_loss
from exgrpo_kernels import logprobs as logprobs_of

SNIPPETS = {(snippet.file, snippet.text.splitlines()[0]): snippet.text for snippet in documented.all_snippets()}
ELSEWHERE = {
    # (file, first line): the test that runs it, or the same with what is there
    ("docs/conversion.md", "from exgrpo_conversion.families.family import DENSE_LAYER, QKV_BIAS, Family"): (
        "tests/unit/policy/test_policy_families.py",
        "SEED_OSS",
    ),
    ("docs/debug.md", "from pathlib import Path"): (
        "tests/unit/trainer/test_bad_steps.py",
        "test_the_documented_snippet",
    ),
    ("docs/python.md", "from exgrpo_megatron import load_recipe, train"): (
        "tests/unit/cli/test_documented_commands_run.py",
        "test_the_training_snippet",
    ),
    ("docs/migrating.md", "from my_project.scores import compute_score"): (
        "tests/unit/test_migrating_document.py",
        "test_a_function_of_verl_can_be_wrapped_as_the_page_says",
    ),
    ("docs/nemo.md", "import nemo_run as run"): (
        "tests/others/test_nemo_run.py",
        "test_a_job_of_nemo_run_stops_before_the_time_limit_queues_itself_again_and_goes_on",
    ),
}
QUESTIONS = ("docs/data.md", "def questions():")
REWARD = ("docs/rewards.md", "def reward(*, question: str, response: str, answer: str) -> float:")
KERNELS = (
    "kernels/README.md",
    "head = OutputHead(weight, valid_vocab=151643, vocab_start=start, group=tensor_parallel_group)",
)
REPLAY = (
    "docs/python.md",
    "from exgrpo_megatron.replay import TrajectoryBuffer, DifficultyBucketer, SelectiveReplay, "
    "compute_importance_weights",
)


def filled_in(key, **open_places):
    text = SNIPPETS[key]
    for old, new in open_places.values():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_every_block_is_run_by_a_test():
    assert set(SNIPPETS) == {*ELSEWHERE, QUESTIONS, REWARD, KERNELS, REPLAY}
    for path, name in ELSEWHERE.values():
        assert name in (documented.ROOT / path).read_text()


def test_the_question_source_gives_squares():
    space = {}
    exec(filled_in(QUESTIONS), space)
    rows = list(space["questions"]())
    assert (len(rows), rows[12]) == (1000, {"question": "What is 12 * 12?", "answer": 144})


def test_the_reward_is_called_by_name():
    space = {}
    exec(filled_in(REWARD, body=("...", "return float(answer in response)")), space)
    assert space["reward"](response="it is 4", answer="4", question="2+2") == 1.0


def test_the_three_ways_through_the_output_layer_agree():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator) for rows in (5, 11))
    targets, zeros = torch.arange(5), torch.zeros(5)
    inputs = LossInputs(targets, zeros, zeros + 1, torch.zeros(5, dtype=torch.bool), zeros + 0.2, None)
    space = {
        **{"hidden": hidden.requires_grad_(), "weight": weight, "targets": targets, "start": 0, "inputs": inputs},
        **{"OutputHead": OutputHead, "token_loss": token_loss, "score": score, "Objective": Objective},
        **{"logprobs": logprobs_of, "tensor_parallel_group": None},
    }
    code = filled_in(KERNELS, vocabulary=("151643", "11"), inputs=("LossInputs(...)", "inputs"))
    exec(code, space)
    expected = torch.log_softmax(hidden @ weight.T, dim=1)[torch.arange(5), targets]
    assert torch.allclose(space["found"], expected, atol=1e-5)
    # Recorded log-probs of 0 and advantages of 1: the loss is -mean(min(w, 1 + clip)) with w = p.
    assert space["loss"].item() == pytest.approx(-expected.exp().mean().item(), abs=1e-5)


def test_the_loop_with_replay_stores_and_replays():
    code = filled_in(
        REPLAY,
        steps=("for step in ...:", "for step in range(8):"),
        more=(", ...])", ", another(step)])"),
        now=("now = ...", "now = torch.tensor(stored.logprobs, requires_grad=True)"),
    )

    def another(step):
        wrong = {"token_ids": [5], "logprobs": [-1.0], "reward": 0.0, "policy_version": step}
        return {"question_id": "q17", "prompt_ids": [1, 2], **wrong}

    space = {"torch": torch, "prompt": [1, 2], "response": [3, 4], "logprobs": np.log([0.5, 0.25])}
    exec(code, {**space, "another": another, "loss": torch.zeros(()), "advantage": 2.0}, space)
    assert len(space["buffer"]) == 1
    assert space["buffer"].difficulty.rate("q17") == 0.5  # one right and one wrong answer a step
    # The policy has not changed, so w = 1 and f(w) = 1 / 1.1: with advantage 2 a replay takes 2 / 1.1 from the loss.
    replays = space["loss"].item() / (-2 / 1.1)
    assert replays == pytest.approx(round(replays), abs=1e-5)
    assert 1 <= round(replays) <= 7  # of 8 steps, each with probability 0.3
