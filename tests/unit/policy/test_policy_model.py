"""The Megatron model computes what transformers computes from the same folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_models import FAMILIES, hf_state, make_actor, max_difference, plain_logprobs, random_sequences, save_model
from safetensors.torch import load_file, save_file

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.policy.distributed import DataParallel


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropies_equal_those_of_transformers(
    family: str, temperature: float, tmp_path: Path, group: DataParallel
) -> None:
    model = save_model(family, tmp_path)
    actor = make_actor(tmp_path, group, logprob_batch_size=3)
    sequences = [(item.prompt_ids, item.response_ids) for item in random_sequences(8)]
    scored = actor.score(sequences, temperature)
    assert len(scored) == 8
    for (prompt, response), mine in zip(sequences, scored, strict=True):
        with torch.no_grad():
            logprobs, entropies = plain_logprobs(model, prompt, response, temperature)
        np.testing.assert_allclose(mine.logprobs, logprobs, atol=1e-5)
        np.testing.assert_allclose(mine.entropies, entropies, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_weights_are_those_of_the_folder(family: str, tmp_path: Path, group: DataParallel) -> None:
    model = save_model(family, tmp_path)
    exported = dict(make_actor(tmp_path, group).export_weights())
    assert max_difference(exported, hf_state(model)) == 0


def test_exported_weights_are_copies(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    actor = make_actor(tmp_path, group)
    for _, tensor in actor.export_weights():
        tensor.zero_()
    assert all(float(tensor.abs().max()) > 0 for _, tensor in actor.export_weights())


def test_padded_vocabulary_takes_no_probability(tmp_path: Path, group: DataParallel) -> None:
    """All 37 real logits are 0 without an embedding, so every log-prob is -ln 37; 128 columns would give -ln 128."""
    model = save_model("llama", tmp_path)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(tmp_path)
    prompt, response = np.array([1, 2], np.int32), np.array([3, 36], np.int32)
    (scored,) = make_actor(tmp_path, group).score([(prompt, response)], 1.0)
    np.testing.assert_allclose(scored.logprobs, -math.log(37), rtol=1e-6)
    np.testing.assert_allclose(scored.entropies, math.log(37), rtol=1e-6)


def test_nothing_to_score_gives_nothing(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    assert make_actor(tmp_path, group).score([], 1.0) == []


def test_an_empty_prompt_is_refused(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    with pytest.raises(ValueError, match="sequence 0 has an empty prompt"):
        make_actor(tmp_path, group).score([(np.zeros(0, np.int32), np.ones(2, np.int32))], 1.0)


def test_bfloat16_stays_near_float32(tmp_path: Path, group: DataParallel) -> None:
    """bfloat16 has 8 bits of mantissa: 2^-8 relative on logits of about 3."""
    save_model("qwen2", tmp_path)
    sequences = [(item.prompt_ids, item.response_ids) for item in random_sequences(4)]
    exact = make_actor(tmp_path, group).score(sequences, 1.0)
    rounded = make_actor(tmp_path, group, precision="bfloat16").score(sequences, 1.0)
    differences = [np.abs(a.logprobs - b.logprobs).max() for a, b in zip(exact, rounded, strict=True)]
    assert 0 < max(differences) < 0.1


def test_a_missing_tensor_is_named(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"policy.model_name = .*model\.layers\.1\.mlp\.up_proj\.weight"):
        make_actor(tmp_path, group)


def test_an_unsupported_model_is_refused_with_key_and_value(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match=r"model_type = 'gpt2' is not supported"):
        make_actor(tmp_path, group)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, group: DataParallel) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        make_actor(tmp_path / "nowhere", group)
