"""The output layer inside the loss: that every way of computing it agrees, and in which precision its gradient is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_models import make_actor, random_sequences, save_model
from torch import Tensor

from exgrpo_kernels import fused
from exgrpo_kernels.fused import OutputHead
from exgrpo_kernels.reference import Objective, logprob_entropy, token_terms
from exgrpo_megatron.config import OptimizerConfig
from exgrpo_megatron.policy import actor as actor_module
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel
from exgrpo_megatron.policy.head import output_head
from exgrpo_megatron.types import TrainSequence

KERNELS = ("linear", "logits")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "kernel", [*KERNELS, "linear in chunks"], ids=lambda kernel: kernel.replace(" ", "_") if kernel else ""
)
def test_ten_steps_with_every_loss_kernel_are_those_of_the_reference(
    family: str, kernel: str, tmp_path: Path, group: DataParallel
) -> None:
    """Tied and untied, fresh and replayed, with an entropy bonus, 9 tokens a chunk or all: float32 to 1e-5."""
    save_model(family, tmp_path)
    optimizer = OptimizerConfig(lr=1e-3, adam_eps=1e-4)
    name, *chunked = kernel.split(" in ")
    keys = {"loss_kernel": name, "logprob_chunk_size": 9 if chunked else None, "train_micro_batch_size": 4}
    ours = make_actor(tmp_path, group, optimizer, **keys)
    reference = make_actor(tmp_path, group, optimizer, loss_kernel="reference", train_micro_batch_size=4)
    for step in range(10):
        sequences = random_sequences(7, seed=step)
        found, expected = (
            actor.update(sequences, Objective(), temperature=0.8, micro_batch_entropy_coeff=0.01)
            for actor in (ours, reference)
        )
        assert found.loss == pytest.approx(expected.loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        np.testing.assert_allclose(found.terms.entropy, expected.terms.entropy, atol=1e-5)
        np.testing.assert_array_equal(found.terms.clipped, expected.terms.clipped)
    pairs = [(item.prompt_ids, item.response_ids) for item in sequences]
    for score, other in zip(ours.score(pairs, 0.8), reference.score(pairs, 0.8), strict=True):
        np.testing.assert_allclose(score.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(score.entropies, other.entropies, atol=1e-5)


def test_update_and_score_both_compute_as_the_recipe_says(
    tmp_path: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen3", tmp_path)
    seen: list[dict[str, Any]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: [seen.append(how), function(*args, **how)][1]

    monkeypatch.setattr(fused, "token_loss", noted(fused.token_loss))
    monkeypatch.setattr(fused, "score", noted(fused.score))
    item = random_sequences(1)[0]
    for keys in ({}, {"loss_kernel": "linear", "logprob_chunk_size": 5}, {"loss_kernel": "logits"}):
        actor = make_actor(tmp_path, group, **keys)
        actor.update([item], Objective(), temperature=1.0)
        actor.score([(item.prompt_ids, item.response_ids)], temperature=1.0)
    expected = [("auto", None), ("linear", 5), ("logits", None)]
    assert seen == [{"form": form, "chunk_size": size} for form, size in expected for _ in range(2)]


def test_the_gradient_of_bfloat16_weights_is_summed_in_float32(
    tmp_path: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 autograd from the hidden states the model gave, over 16 micro-batches. Autograd carries a
    gradient in the weights' 8 bits, a relative rounding of up to 2e-3 in each; added in float32 it keeps its digits."""
    save_model("qwen3", tmp_path)  # untied, so that nothing else adds to this weight's gradient
    errors = [weight_gradient_error(tmp_path, group)]
    monkeypatch.setattr(actor_module, "output_head", by_autograd)
    errors.append(weight_gradient_error(tmp_path, group))
    assert errors[0] < 1e-6
    assert 5e-4 < errors[1] < 5e-3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_tied_weight_has_the_gradient_of_both_ends(precision: str, tmp_path: Path, group: DataParallel) -> None:
    """Of a model that is tied, and of one that is not but has the same numbers at both ends."""
    tied = save_model("qwen2", tmp_path / "tied")
    untied = type(tied)(tied.config.__class__(**{**tied.config.to_dict(), "tie_word_embeddings": False}))
    untied.load_state_dict(tied.state_dict())
    untied.save_pretrained(tmp_path / "untied")
    actors = [
        make_actor(tmp_path / name, group, precision=precision, train_micro_batch_size=2, max_grad_norm=1e9)
        for name in ("tied", "untied")
    ]
    for actor in actors:
        actor.update(random_sequences(6), Objective(), temperature=1.0)
    one, two = (dict(actor._gpt[0].named_parameters()) for actor in actors)
    name = "embedding.word_embeddings.weight"
    both = two[name].main_grad + two["output_layer.weight"].main_grad
    torch.testing.assert_close(one[name].main_grad, both, rtol=1e-6, atol=1e-6)


def weight_gradient_error(model: Path, group: DataParallel) -> float:
    """Relative, of the output layer's over one update, in the buffer that the optimizer reads."""
    actor = make_actor(model, group, precision="bfloat16", train_micro_batch_size=1, max_grad_norm=1e9)
    weight = actor._gpt[-1].output_weight
    before = weight.detach().double()
    sequences = random_sequences(16)
    expected = plain_weight_gradient(hidden_states(actor, sequences), before, sequences)
    return float((weight.main_grad.double() - expected).norm() / expected.norm())


def by_autograd(*args: Any) -> OutputHead:
    head = output_head(*args)
    head.weight.grad_added_to_main_grad = False
    return replace(head, main_grad=None)


def hidden_states(actor: MegatronActor, sequences: Sequence[TrainSequence]) -> list[Tensor]:
    """Of one update, by sequence, as the output layer was called with them."""
    seen: list[Tensor] = []
    with actor._gpt[-1].output_layer.register_forward_hook(lambda _, args, __: seen.append(args[0].detach())):
        actor.update(sequences, Objective(), temperature=1.0)
    order = sorted(range(len(sequences)), key=lambda index: -sequences[index].num_tokens)
    return [seen[order.index(index)].squeeze(1) for index in range(len(sequences))]


def plain_weight_gradient(hidden: list[Tensor], weight: Tensor, sequences: Sequence[TrainSequence]) -> Tensor:
    """By autograd over the definition, in float64."""
    leaf = weight.clone().requires_grad_()
    for states, item in zip(hidden, sequences, strict=True):
        targets = torch.from_numpy(item.response_ids).long()
        logprobs, entropies = logprob_entropy(states.double() @ leaf.t(), targets, valid_vocab=37)
        tokens = len(targets)
        terms = token_terms(
            logprobs,
            torch.from_numpy(item.old_logprobs).double(),
            torch.full((tokens,), item.advantage, dtype=torch.float64),
            torch.full((tokens,), item.replayed),
            Objective(),
        )
        weights = item.policy_weight * torch.from_numpy(
            np.ones(tokens) if item.token_weights is None else item.token_weights.astype(np.float64)
        )
        ((weights * terms.policy_loss).sum() - item.entropy_weight * entropies.sum()).backward()
    assert leaf.grad is not None
    return leaf.grad
