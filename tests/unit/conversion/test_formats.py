"""A checkpoint is known by what is in it, opened where a tracker points, and held against what it says of itself."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_files import megatron_weights, write_bin, write_by_torch, write_legacy
from hf_models import tiny_model
from safetensors.torch import load_file
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.convert import Target, convert
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.formats import detect, open_source

EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", tied=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    tiny_model("qwen3", tied=True).save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> tuple[Architecture, dict[str, Tensor]]:
    arch = Architecture.from_hf_config(json.loads((folder / "config.json").read_text()))
    return arch, megatron_weights(arch, load_file(folder / "model.safetensors"))


def distributed(folder: Path, model: Path, arguments: Any = None, **changes: Tensor | None) -> Path:
    """A checkpoint that torch wrote, some of its parameters changed, others left out (None)."""
    _, weights = weights_of(model)
    weights = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
    write_by_torch(folder, weights, stacked=False)
    if arguments is not None:
        torch.save({"args": arguments}, folder / "common.pt")
    return folder


@pytest.fixture
def converted(model: Path, tmp_path: Path) -> Path:
    with open_source(model) as source:
        convert(source, Target("torch_dist", tmp_path / "converted"), id)
    return tmp_path / "converted"


def test_every_format_is_told_by_its_content(model: Path, tmp_path: Path, converted: Path) -> None:
    bridge = shutil.copytree(converted / "release", tmp_path / "a")
    (bridge / "run_config.yaml").write_text("model: {}")
    nemo = tmp_path / "b"
    shutil.copytree(converted / "release", nemo / "weights")
    bins = tmp_path / "c"
    bins.mkdir()
    write_bin(bins, load_file(model / "model.safetensors"))
    ranks = tmp_path / "d"
    arch, weights = weights_of(model)
    write_legacy(ranks, arch, weights, tensor_parallel=2, stages=[[2]])
    run = tmp_path / "e"
    shutil.copytree(converted / "release", run / "checkpoints" / "step_000002" / "policy")
    (run / "checkpoints" / "step_000002" / "state.json").write_text("{}")
    (run / "checkpoints" / "step_000003.incomplete").mkdir()
    found = {path: detect(path).format for path in (model, converted, bridge, nemo, bins, ranks, run)}
    assert list(found.values()) == ["hf", "torch_dist", "bridge", "nemo2", "hf_bin", "legacy", "run"]
    assert detect(run).folder == detect(run / "checkpoints").folder == run / "checkpoints" / "step_000002"
    assert detect(converted).folder == converted / "release"
    assert detect(converted / "release").format == "torch_dist"


def test_the_tracker_file_says_which_iteration(converted: Path) -> None:
    (converted / "release").rename(converted / "iter_0000012")
    shutil.copytree(converted / "iter_0000012", converted / "iter_0000020")
    (converted / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert detect(converted).folder == converted / "iter_0000012"
    with open_source(converted / "iter_0000020") as source:  # the config is beside it
        assert source.config_folder == converted / "hf"


@pytest.mark.parametrize("text", ["13", "", "../iter_0000012", "-1", "release", "1" * 40])
def test_a_tracker_file_that_leads_nowhere_is_refused(text: str, converted: Path) -> None:
    (converted / "release").rename(converted / "iter_0000012")
    (converted / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ModelFolderError, match="latest_checkpointed_iteration"):
        detect(converted)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not a folder"):
        detect(tmp_path / "nothing")
    with pytest.raises(ModelFolderError, match=r"no checkpoint: known are .*safetensors.*NeMo 2"):
        detect(tmp_path)


def test_the_config_comes_with_the_checkpoint_or_is_asked_for(model: Path, tmp_path: Path, converted: Path) -> None:
    folder = distributed(tmp_path / "bare", model)
    with pytest.raises(ModelFolderError, match=r"does not hold the config.*--config"):
        open_source(folder)
    with open_source(folder, config=model) as source:
        assert source.config_folder == model
    with open_source(converted) as source:
        assert source.config_folder == converted / "hf"
    with pytest.raises(ModelFolderError, match="has its own config"):
        open_source(model, config=model)


def test_missing_unknown_and_misshapen_parameters_are_named(model: Path, tmp_path: Path) -> None:
    changes = {
        "decoder.layers.1.mlp.linear_fc2.weight": None,
        "decoder.layers.0.mlp.router.weight": torch.ones(2, 2),
        "decoder.layers.0.self_attention.linear_proj.weight": torch.ones(72, 24),  # the transpose
    }
    folder = distributed(tmp_path / "changed", model, **changes)
    with pytest.raises(ModelFolderError) as caught:
        open_source(folder, config=model)
    for text in (
        "1 missing: decoder.layers.1.mlp.linear_fc2.weight",
        "1 unknown: decoder.layers.0.mlp.router.weight",
        "linear_proj.weight (72, 24) instead of (24, 72)",
    ):
        assert text in str(caught.value)


def test_a_config_with_another_vocabulary_is_no_matter_of_padding(model: Path, tmp_path: Path) -> None:
    """Padding is below 128 * 128 rows; with fewer rows than the vocabulary there is none."""
    for rows, fits in ((36, False), (37, True), (37 + 128 * 128 - 1, True), (37 + 128 * 128, False)):
        changes = {EMBEDDING: torch.ones(rows, 24), "output_layer.weight": torch.ones(rows, 24)}
        folder = distributed(tmp_path / str(rows), model, **changes)
        if not fits:
            with pytest.raises(ModelFolderError, match=rf"{EMBEDDING} \({rows}, 24\) instead of \(37, 24\)"):
                open_source(folder, config=model)
            continue
        with open_source(folder, config=model) as source:
            assert source.dropped_rows == rows - 37


def test_a_tied_model_may_repeat_its_embedding_as_output_layer_but_not_another_one(tied: Path, tmp_path: Path) -> None:
    _, weights = weights_of(tied)
    with open_source(distributed(tmp_path / "same", tied, **{"output_layer.weight": weights[EMBEDDING]}), config=tied):
        pass
    other = distributed(tmp_path / "other", tied, **{"output_layer.weight": weights[EMBEDDING] + 1})
    with pytest.raises(ModelFolderError, match=r"output_layer.weight other than its embedding.*tied"):
        open_source(other, config=tied)


class _Strange(Enum):
    VALUE = 1


RIGHT = {
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 12, "num_query_groups": 4,
    "kv_channels": 6, "qk_layernorm": True, "add_qkv_bias": False, "rotary_base": 10000, "seq_length": 4096,
    "normalization": "RMSNorm",
}  # fmt: skip
"""What Megatron says of the model of this module; `seq_length` is of no concern."""
WRONG = [("num_query_groups", 3), ("qk_layernorm", False), ("rotary_base", 1000000), ("normalization", "LayerNorm")]


@pytest.mark.parametrize(("key", "value"), [("seq_length", 8192), *WRONG])
@pytest.mark.parametrize("where", ["common.pt", "legacy", "run_config.yaml", "io.json", "model.yaml"])
def test_what_a_checkpoint_says_of_its_model_must_agree_with_the_config(
    where: str, key: str, value: object, model: Path, tmp_path: Path
) -> None:
    settings = RIGHT | {key: value}
    folder = _saying(where, settings, model, tmp_path / "checkpoint")
    if (key, value) not in WRONG:
        open_source(folder, config=model, unpickle=True).close()
        return
    with pytest.raises(ModelFolderError, match=rf"of another model than .*{key} = {value!r}, the config means"):
        open_source(folder, config=model, unpickle=True)


def _saying(where: str, settings: dict[str, Any], model: Path, folder: Path) -> Path:
    """A checkpoint that describes its model so, in the file of one format."""
    if where == "legacy":
        arch, weights = weights_of(model)
        write_legacy(folder, arch, weights, tensor_parallel=2, stages=[[1], [1]], arguments=settings)
        return folder
    if where == "common.pt":
        # An object of a class that torch does not allow stands among the arguments, as in real ones.
        return distributed(folder, model, Namespace(**settings, model_type=_Strange.VALUE))
    if where == "run_config.yaml":
        distributed(folder, model)
        (folder / where).write_text(yaml.safe_dump({"train": {"num_layers": 7}, "model": settings}))
        return folder
    distributed(folder / "weights", model)
    (folder / "context").mkdir()
    if where == "model.yaml":
        text = yaml.safe_dump({"_target_": "Model", "config": {"activation_func": None, **settings}})
        (folder / "context" / where).write_text(text.replace("null", "!!python/name:os.system ''"))
        return folder
    items = [[f"Attr(name={name!r})", {"type": "leaf", "value": value}] for name, value in settings.items()]
    other = {"items": [["Attr(name='config')", {"type": "ref", "key": "config_1"}], ["Index(0)", 3]]}
    objects = {"model_1": other, "config_1": {"type": {"module": "x", "name": "Qwen3"}, "items": items}}
    (folder / "context" / where).write_text(json.dumps({"objects": objects}))
    return folder


@pytest.mark.parametrize(
    ("said", "fits"),
    [
        ({}, True),
        ({"use_rope_scaling": True, "rope_scaling_factor": 8.0}, True),
        ({"use_rope_scaling": False}, False),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, False),
    ],
)
def test_a_stale_rotary_scaling_is_noticed(said: dict[str, Any], fits: bool, tmp_path: Path) -> None:
    """No tensor tells: the config is of Llama 3.1, the checkpoint says it was trained with another scaling."""
    model = tmp_path / "model"
    tiny_model("llama", tied=False).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config["rope_parameters"] |= {"rope_type": "llama3", "factor": 8.0, **llama3}
    (model / "config.json").write_text(json.dumps(config))
    folder = distributed(tmp_path / "checkpoint", model, Namespace(**said))
    if fits:
        open_source(folder, config=model).close()
        return
    with pytest.raises(ModelFolderError, match="rope_scaling"):
        open_source(folder, config=model)


def test_pickles_are_read_with_leave_only(model: Path, tmp_path: Path) -> None:
    arch, weights = weights_of(model)
    write_legacy(tmp_path / "ranks", arch, weights, tensor_parallel=1, stages=[[2]])
    with pytest.raises(ModelFolderError, match=r"pickles that can run code.*--unpickle"):
        open_source(tmp_path / "ranks", config=model)


class _Calls:
    """Its pickle calls a function with a path when it is read."""

    def __init__(self, function: Callable[[str], object], path: Path) -> None:
        self._call = function, (str(path),)

    def __reduce__(self) -> Any:
        return self._call


def _write(path: str) -> None:
    Path(path).touch()


def test_no_other_file_runs_code(model: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    folder = distributed(tmp_path / "common", model, Namespace(num_layers=2, trap=_Calls(_write, trap)))
    open_source(folder, config=model).close()  # the function is not called, the rest is read
    torch.save({"args": Namespace(trap=_Calls(os.mkdir, trap))}, folder / "common.pt")
    open_source(folder, config=model).close()
    (folder / "common.pt").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(_Calls(_write, trap)))
    with pytest.raises(ModelFolderError, match=r"\.metadata"):
        open_source(folder, config=model)
    bins = tmp_path / "bins"
    bins.mkdir()
    shutil.copy(model / "config.json", bins)
    torch.save({"model.norm.weight": _Calls(_write, trap)}, bins / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match=r"pytorch_model\.bin.* is refused"):
        open_source(bins)
    assert not trap.exists()


def _ranks(folder: Path, model: Path, **options: Any) -> Path:
    arch, weights = weights_of(model)
    write_legacy(folder, arch, weights, **{"tensor_parallel": 2, "stages": [[1], [1]]} | options)
    return folder


def test_a_missing_rank_is_named(model: Path, tmp_path: Path) -> None:
    folder = _ranks(tmp_path / "ranks", model)
    shutil.rmtree(folder / "mp_rank_01_000")
    with pytest.raises(ModelFolderError, match="tensor-parallel rank 1, pipeline stage 0"):
        open_source(folder, config=model, unpickle=True)


def test_a_cut_off_rank_is_named(model: Path, tmp_path: Path) -> None:
    path = _ranks(tmp_path / "ranks", model) / "mp_rank_01_001" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFolderError, match=r"mp_rank_01_001.*cannot be read"):
        open_source(path.parent.parent, config=model, unpickle=True)


def test_the_old_order_of_query_key_and_value_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"checkpoint_version 2\.0"):
        open_source(_ranks(tmp_path / "ranks", model, version=2.0), config=model, unpickle=True)


def test_experts_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    folder = _ranks(tmp_path / "ranks", model)
    shutil.copytree(folder / "mp_rank_00_000", folder / "mp_rank_00_000_001")
    with pytest.raises(ModelFolderError, match="no experts"):
        open_source(folder, config=model, unpickle=True)


def test_ranks_that_disagree_about_what_they_share_are_refused(model: Path, tmp_path: Path) -> None:
    path = _ranks(tmp_path / "ranks", model) / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(content, path)
    with open_source(path.parent.parent, config=model, unpickle=True) as source:
        source.read("model.layers.0.mlp.up_proj.weight")
        with pytest.raises(ModelFolderError, match=r"different values of decoder\.final_layernorm\.weight"):
            source.read("model.norm.weight")


def test_a_bin_file_of_torch_before_archives_is_named(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "old" / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelFolderError, match=r"pytorch_model\.bin has the format of torch before 1\.6"):
        open_source(tmp_path / "old")


def test_a_bin_index_is_believed_as_little_as_another(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    write_bin(tmp_path, tensors, files=2)
    second = tmp_path / "pytorch_model-00002-of-00002.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    text = index.read_text()
    index.write_text(text.replace(second.name, f"../{second.name}"))
    with pytest.raises(ModelFolderError, match="only files in the folder itself"):
        open_source(tmp_path)
    index.write_text(text)
    content = torch.load(second)
    name = next(iter(content))
    torch.save({other: tensor for other, tensor in content.items() if other != name}, second)
    with pytest.raises(ModelFolderError, match=rf"places tensor {name} in .*00002.*, which lacks it"):
        open_source(tmp_path)
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ModelFolderError, match="they hold no whole archive"):
        open_source(tmp_path)
    second.unlink()
    with pytest.raises(ModelFolderError, match="is missing"):
        open_source(tmp_path)
