"""An export is loaded and compared with the trainer before anybody gets to see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from policy_models import FAMILIES, make_actor, random_sequences, save_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel
from exgrpo_megatron.policy.export import export_hf


def save_tokenizer(folder: Path) -> None:
    vocabulary = {"[UNK]": 0, "What": 1, "is": 2, "12": 3, "+": 4, "7": 5, "-": 6, "5": 7, "?": 8}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(folder)


class OneWrongWeight(MegatronActor):
    """A real actor whose export has a fault: one norm is not the trainer's."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().export_weights():
            yield name, tensor * 1.01 if name == "model.norm.weight" else tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_the_manifest_names_what_the_export_gives_in_its_order(family: str, tmp_path: Path, group: DataParallel):
    save_model(family, tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    exported = [(name, tuple(tensor.shape)) for name, tensor in actor.export_weights()]
    assert list(actor.weight_manifest().items()) == exported


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_exported_and_verified(
    family: str, precision: str, tmp_path: Path, group: DataParallel
) -> None:
    save_model(family, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    actor = make_actor(tmp_path / "model", group, precision=precision)
    actor.update(random_sequences(4), Objective(), temperature=1.0)
    report = export_hf(actor, tmp_path / "out" / "hf", tmp_path / "model")
    assert report.folder == tmp_path / "out" / "hf"
    assert report.tokenizer
    assert report.max_logprob_difference <= (1e-4 if precision == "float32" else 0.1)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(report.files)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    weights = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, precision)}
    assert sum(tensor.numel() for tensor in weights.values()) == report.num_parameters


def test_a_faulty_export_is_caught_and_the_old_one_kept(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    export_hf(actor, tmp_path / "hf", tmp_path / "model")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    actor.__class__ = OneWrongWeight
    with pytest.raises(CheckpointError, match=r"log-probs differ from the trainer's by up to .* nats"):
        export_hf(actor, tmp_path / "hf", tmp_path / "model")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model"]


def test_a_newer_export_replaces_the_older(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    export_hf(actor, tmp_path / "hf", tmp_path / "model")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    actor.update(random_sequences(4), Objective(), temperature=1.0)
    report = export_hf(actor, tmp_path / "hf", tmp_path / "model")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() != before
    assert not report.tokenizer  # the model folder has none here


def test_the_source_model_is_never_replaced(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    with pytest.raises(CheckpointError, match="would replace the source model"):
        export_hf(actor, tmp_path / "model", tmp_path / "model")


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="no model folder"):
        export_hf(make_actor(tmp_path / "model", group), tmp_path / "thesis", tmp_path / "model")
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "precious"
