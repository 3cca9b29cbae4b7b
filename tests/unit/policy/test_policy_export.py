"""An export is loaded and compared with the trainer before anybody gets to see it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_models import FAMILIES, make_actor, random_sequences, save_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.policy import export
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel
from exgrpo_megatron.policy.export import ExportOptions, export_hf


def save_tokenizer(folder: Path) -> None:
    vocabulary = {"[UNK]": 0, "What": 1, "is": 2, "12": 3, "+": 4, "7": 5, "-": 6, "5": 7, "?": 8}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(folder)


def wrong_norm(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01


def swapped_gate_and_up(weights: dict[str, torch.Tensor]) -> None:
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]


def transposed_output_projection(weights: dict[str, torch.Tensor]) -> None:
    """Square: 4 heads of 8 rows, 32 hidden."""
    name = "model.layers.0.self_attn.o_proj.weight"
    weights[name] = weights[name].T.contiguous()


def wrong_order_of_keys(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    weights[name] = weights[name].flip(0)


FAULTS = {
    wrong_norm: "model.norm.weight",
    swapped_gate_and_up: "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight",
    transposed_output_projection: "model.layers.0.self_attn.o_proj.weight",
    wrong_order_of_keys: "model.layers.1.self_attn.k_proj.bias",
}


def with_fault(fault: Callable[[dict[str, torch.Tensor]], None]) -> type[MegatronActor]:
    """A real actor whose export has a fault."""

    class Faulty(MegatronActor):
        def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            weights = dict(super().export_weights())
            fault(weights)
            yield from weights.items()

    return Faulty


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
    assert report.tensors_compared
    assert report.max_logprob_difference <= (1e-4 if precision == "float32" else 0.1)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(report.files)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    weights = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, precision)}
    assert sum(tensor.numel() for tensor in weights.values()) == report.num_parameters


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_export_is_caught_its_tensors_named_and_the_old_one_kept(
    fault: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path, group: DataParallel
) -> None:
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    export_hf(actor, tmp_path / "hf", tmp_path / "model")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    actor.__class__ = with_fault(fault)
    with pytest.raises(CheckpointError, match="cannot export the model to") as caught:
        export_hf(actor, tmp_path / "hf", tmp_path / "model")
    assert str(caught.value).endswith(f"tensors are not as trained: {FAULTS[fault]}")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model"]


def test_a_model_that_computes_something_else_from_the_same_tensors_is_caught(
    tmp_path: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a mapping that is wrong both ways: here transformers turns its pairs by 1% more."""
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    really_load = export.load_exported

    def load(*args: Any) -> torch.nn.Module:
        model = really_load(*args)
        model.model.rotary_emb.inv_freq *= 1.01
        return model

    monkeypatch.setattr(export, "load_exported", load)
    with pytest.raises(
        CheckpointError, match=r"log-probs differ from the trainer's by up to .* nats, allowed is 1e-04"
    ):
        export_hf(actor, tmp_path / "hf", tmp_path / "model")


def test_a_model_too_large_to_run_again_is_compared_tensor_by_tensor(
    tmp_path: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    monkeypatch.setattr(export, "_ROOM", 1e12)
    report = export_hf(actor, tmp_path / "hf", tmp_path / "model")
    assert report.tensors_compared
    assert report.max_logprob_difference is None
    assert report.num_parameters == sum(tensor.numel() for _, tensor in actor.export_weights())


def test_a_config_changed_since_the_training_began_is_named(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text())
    settings["rope_parameters"]["rope_theta"] = 777.0
    path.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"rope_theta = 777\.0, trained with 10000\.0"):
        export_hf(actor, tmp_path / "hf", tmp_path / "model")
    assert not (tmp_path / "hf").exists()


def test_the_tokenizer_that_was_trained_with_goes_along(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "other")  # by which transformers chooses its class
    save_tokenizer(tmp_path / "other")
    options = ExportOptions(tokenizer_dir=tmp_path / "other", card=lambda report: report.describe())
    report = export_hf(make_actor(tmp_path / "model", group), tmp_path / "hf", tmp_path / "model", options)
    assert report.tokenizer
    assert {"tokenizer.json", "tokenizer_config.json", "README.md"} <= set(report.files)
    assert (tmp_path / "hf" / "README.md").read_text() == report.describe()


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
