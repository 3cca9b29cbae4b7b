"""Round trips bit for bit through every format, what a destination may be, and what stays when something fails."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import megatron_weights, write_bin, write_by_torch, write_legacy
from hf_models import FAMILIES, tensors_of, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from exgrpo_conversion.convert import Summary, Target, convert
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.formats import open_source
from exgrpo_conversion.source import Source

MODELS = [(family, tied) for family in FAMILIES for tied in (True, False)]
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with FAMILY-TIED for each model; three layers, so that stages can be uneven."""
    folder = tmp_path_factory.mktemp("models")
    for family, tied in MODELS:
        tiny_model(family, tied, num_hidden_layers=3).save_pretrained(folder / f"{family}-{tied}")
    return folder


@pytest.fixture
def model(models: Path) -> Path:
    return models / "qwen3-False"


def converted(src: Path, to: str, dst: Path, config: Path | None = None, **options: object) -> Summary:
    with open_source(src, config=config, unpickle=True) as source:
        return convert(source, Target(to, dst, **options), id)  # type: ignore[arg-type]


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(folder: Path, expected: dict[str, Tensor]) -> None:
    found = weights_in(folder)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_a_model_survives_every_format_that_is_written(family: str, tied: bool, models: Path, tmp_path: Path) -> None:
    original = models / f"{family}-{tied}"
    converted(original, "torch_dist", tmp_path / "megatron", max_shard_bytes=5000)
    converted(tmp_path / "megatron", "nemo2", tmp_path / "nemo")
    converted(tmp_path / "nemo", "torch_dist", tmp_path / "again")
    summary = converted(tmp_path / "again", "hf", tmp_path / "hf", max_shard_bytes=20_000)
    assert_same(tmp_path / "hf", weights_in(original))
    assert summary.dropped_rows == 128 - 37
    sizes = [path.stat().st_size for path in (tmp_path / "megatron" / "release").glob("*.distcp")]
    assert len(sizes) > 1
    largest = max(80 * 24, 128 * 24) * 4  # gate over up, or the padded embedding
    assert max(sizes) < largest + 2000  # and the table of contents of its archive
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.tie_word_embeddings == tied


@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize(
    ("tensor_parallel", "stages"),
    [(1, [[3]]), (2, [[3]]), (1, [[2], [1]]), (4, [[1], [2]]), (2, [[1, 1], [1, 0]])],
    ids=["TP1", "TP2", "PP2 uneven", "TP4 PP2 uneven", "TP2 PP2 two chunks"],
)
def test_ranks_with_a_file_each_make_up_the_model(
    family: str, tied: bool, tensor_parallel: int, stages: list[list[int]], models: Path, tmp_path: Path
) -> None:
    original = models / f"{family}-{tied}"
    with open_source(original) as source:
        weights = megatron_weights(source.arch, weights_in(original))
        folder = tmp_path / "ranks"
        write_legacy(folder, source.arch, weights, tensor_parallel=tensor_parallel, stages=stages)
    converted(folder, "hf", tmp_path / "hf", config=original)
    assert_same(tmp_path / "hf", weights_in(original))


@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize("stacked", [True, False])
def test_what_torch_itself_wrote_is_read(family: str, tied: bool, stacked: bool, models: Path, tmp_path: Path) -> None:
    original = models / f"{family}-{tied}"
    with open_source(original) as source:
        weights = megatron_weights(source.arch, weights_in(original))
    write_by_torch(tmp_path / "torch", weights, stacked=stacked, prefix="model.module.")
    converted(tmp_path / "torch", "hf", tmp_path / "hf", config=original)
    assert_same(tmp_path / "hf", weights_in(original))


@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize("files", [1, 3])
def test_bin_files_are_read(family: str, tied: bool, files: int, models: Path, tmp_path: Path) -> None:
    original = models / f"{family}-{tied}"
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(original / "config.json", folder)
    write_bin(folder, tensors_of(AutoModelForCausalLM.from_pretrained(original)), files)
    converted(folder, "hf", tmp_path / "hf")
    assert_same(tmp_path / "hf", weights_in(original))


def test_torch_itself_reads_what_is_written(model: Path, tmp_path: Path) -> None:
    """Three layers stacked, gate over up, the padded rows zero; values as the mapping makes them."""
    converted(model, "torch_dist", tmp_path / "megatron", vocab_divisible_by=8, tensor_parallel=4)
    original = weights_in(model)
    state = {
        EMBEDDING: torch.empty(64, 24),  # 37 rows, padded to a multiple of 8 * 4
        "decoder.layers.mlp.linear_fc1.weight": torch.empty(3, 80, 24),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": torch.empty(3, 24),
    }
    dcp.load(state, checkpoint_id=tmp_path / "megatron" / "release", no_dist=True)
    assert torch.equal(state[EMBEDDING][:37], original["model.embed_tokens.weight"])
    assert not state[EMBEDDING][37:].any()
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        fused = torch.cat([original[f"{prefix}mlp.{kind}_proj.weight"] for kind in ("gate", "up")])
        assert torch.equal(state["decoder.layers.mlp.linear_fc1.weight"][layer], fused)
        norm = original[f"{prefix}post_attention_layernorm.weight"]
        assert torch.equal(state["decoder.layers.mlp.linear_fc1.layer_norm_weight"][layer], norm)


def test_tensors_are_read_in_any_order(model: Path, tmp_path: Path) -> None:
    converted(model, "torch_dist", tmp_path / "megatron")
    original = weights_in(model)
    with open_source(tmp_path / "megatron") as source:
        assert set(source.names()) == original.keys()
        for name in sorted(original, reverse=True):
            assert source.infos()[name].shape == tuple(original[name].shape)
            assert torch.equal(source.read(name), original[name])
        with pytest.raises(ModelFolderError, match=r"no tensor model\.nothing"):
            source.read("model.nothing")


def test_safetensors_are_read_in_the_order_of_the_file(model: Path, tmp_path: Path) -> None:
    """safetensors sorts by size of an element, then by name; three dtypes put the names out of order."""
    folder = tmp_path / "mixed"
    shutil.copytree(model, folder)
    tensors = weights_in(folder)
    dtypes = {"model.norm.weight": torch.float64, "model.embed_tokens.weight": torch.bfloat16}
    save_file({name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    with open_source(folder) as source:
        assert source.names()[0] == "model.norm.weight"
        assert source.names()[-1] == "model.embed_tokens.weight"
        assert [name for name, _ in source.tensors()] == source.names()


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_a_dtype_is_converted_to_as_torch_rounds(to: str, model: Path, tmp_path: Path) -> None:
    summary = converted(model, to, tmp_path / "out", dtype=torch.bfloat16)
    assert summary.dtype == torch.bfloat16
    converted(tmp_path / "out", "hf", tmp_path / "hf")
    assert_same(tmp_path / "hf", {name: tensor.bfloat16() for name, tensor in weights_in(model).items()})
    assert '"dtype": "bfloat16"' in (tmp_path / "hf" / "config.json").read_text()


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_several_dtypes_need_a_choice(to: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(model, folder)
    tensors = weights_in(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"several dtypes, .*float16 \(model\.norm\.weight\).*--dtype"):
        converted(folder, to, tmp_path / "out")
    converted(folder, to, tmp_path / "out", dtype=torch.float32)


@pytest.mark.parametrize("to", ["hf", "torch_dist", "nemo2"])
@pytest.mark.parametrize("value", [float("nan"), 1e5])
def test_a_value_that_is_no_number_in_the_target_leaves_nothing(
    to: str, value: float, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(model, folder)
    tensors = weights_in(folder)
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"NaN or infinite values as torch\.float16"):
        converted(folder, to, tmp_path / "out", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


class _InterruptedSource(Source):
    """Ends in the middle, as Ctrl-C does."""

    def __init__(self, source: Source) -> None:
        self._source, self._reads = source, 0
        self.__dict__.update({name: getattr(source, name) for name in ("path", "format", "arch", "config")})
        self.config_folder = source.config_folder

    def infos(self):
        return self._source.infos()

    def read(self, name: str) -> Tensor:
        self._reads += 1
        if self._reads > 12:
            raise KeyboardInterrupt
        return self._source.read(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names())

    def close(self) -> None:
        self._source.close()


@pytest.mark.parametrize("to", ["hf", "torch_dist", "nemo2"])
def test_an_interrupted_conversion_leaves_what_was_there_and_can_be_repeated(
    to: str, model: Path, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    converted(models / "llama-True", to, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with open_source(model) as source, pytest.raises(KeyboardInterrupt):
        convert(_InterruptedSource(source), Target(to, out, overwrite=True), id)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    converted(model, to, out, overwrite=True)
    converted(out, "hf", tmp_path / "hf")
    assert_same(tmp_path / "hf", weights_in(model))


def test_an_existing_destination_is_replaced_only_with_leave(model: Path, tmp_path: Path) -> None:
    converted(model, "torch_dist", tmp_path / "out")
    with pytest.raises(ModelFolderError, match=r"exists: .*--overwrite"):
        converted(model, "torch_dist", tmp_path / "out")
    converted(model, "torch_dist", tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("to", ["hf", "torch_dist", "nemo2"])
def test_a_folder_with_other_things_is_never_replaced(to: str, model: Path, tmp_path: Path) -> None:
    """Among them the other iterations of a training run."""
    folder = tmp_path / "out"
    (folder / "iter_0000100").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(ModelFolderError, match=r"iter_0000100.*never replaced"):
        converted(model, to, folder, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(ModelFolderError, match="is a file"):
        converted(model, to, tmp_path / "file", overwrite=True)


@pytest.mark.parametrize("strange", [".git/HEAD", "LICENSE", "checkpoint-100/model.safetensors", "vocab.d/file"])
def test_a_model_folder_with_more_than_a_conversion_has_is_never_replaced(
    strange: str, model: Path, tmp_path: Path
) -> None:
    """A clone, a folder of somebody's training, a project that has a config.json."""
    converted(model, "hf", tmp_path / "out")
    (tmp_path / "out" / strange).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / strange).touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.json").write_text("{}")
    for name in ("out", "project"):
        with pytest.raises(ModelFolderError, match="never replaced"):
            converted(model, "hf", tmp_path / name, overwrite=True)
    assert (tmp_path / "out" / strange).exists()


def test_a_checkpoint_of_nemo_itself_is_never_replaced(model: Path, tmp_path: Path) -> None:
    converted(model, "nemo2", tmp_path / "out")
    (tmp_path / "out" / "context" / "io.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="never replaced"):
        converted(model, "nemo2", tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("dst", [".", "checkpoint", "checkpoint/release"])
def test_what_is_read_is_never_replaced(dst: str, model: Path, tmp_path: Path) -> None:
    converted(model, "torch_dist", tmp_path / "checkpoint")
    with pytest.raises(ModelFolderError, match="which is read"):
        converted(tmp_path / "checkpoint" / "release", "torch_dist", tmp_path / dst, overwrite=True)
    shutil.copytree(model, tmp_path / "config")
    with pytest.raises(ModelFolderError, match=r"holds .*config.*which is read"):
        converted(tmp_path / "checkpoint", "hf", tmp_path / "config", config=tmp_path / "config", overwrite=True)


def test_a_full_disk_is_noticed_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and output layer have 37 rows and 91 of padding, of 24 numbers of 4 bytes."""
    nbytes = sum(tensor.nbytes for tensor in weights_in(model).values()) + 2 * 91 * 24 * 4
    full = shutil.disk_usage(tmp_path)._replace(free=nbytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(ModelFolderError, match=f"needs {nbytes:,} bytes, and {nbytes - 1:,} are free"):
        converted(model, "torch_dist", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full._replace(free=nbytes))
    converted(model, "torch_dist", tmp_path / "out")


def test_progress_comes_to_the_bytes_of_all_tensors(model: Path, tmp_path: Path) -> None:
    total = sum(tensor.nbytes for tensor in weights_in(model).values())
    for to in ("hf", "torch_dist"):
        seen: list[int] = []
        with open_source(model) as source:
            summary = convert(source, Target(to, tmp_path / to), seen.append)
        assert sum(seen) == total
        on_disk = [path.stat().st_size for path in (tmp_path / to).rglob("*") if path.is_file()]
        assert (summary.files, summary.nbytes) == (len(on_disk), sum(on_disk))
        assert dataclasses.replace(summary, seconds=0).tensors == len(weights_in(model))
