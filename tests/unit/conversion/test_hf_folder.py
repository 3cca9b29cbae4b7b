"""Model folders: complete or refused when read, whole or untouched when written."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_models import FAMILIES, tensors_of, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.hf_folder import HFReader, ModelFolderError, read_config, strange_entries, write_hf_folder
from exgrpo_conversion.mapping import manifest

TENSORS = tensors_of(tiny_model("llama", tied=False))
CONFIG = tiny_model("llama", tied=False).config.to_dict()
ARCH = Architecture.from_hf_config(CONFIG)
MANIFEST = manifest(ARCH)
NORM = "model.norm.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A saved model with the files that go with a tokenizer, and one that does not belong."""
    folder = tmp_path / "source"
    tiny_model("llama", tied=False).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "training_args.bin"):
        (folder / name).write_text(name)
    return folder


def write(dst: Path, source: Path, weights: dict[str, torch.Tensor] = TENSORS, **options) -> list[str]:
    return write_hf_folder(dst, weights.items(), arch=ARCH, source_dir=source, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("max_shard_size", ["10GB", "10KB"])
def test_a_folder_saved_by_transformers_is_read_whole(max_shard_size: str, tmp_path: Path):
    tiny_model("llama", tied=False).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "10KB")
    with HFReader(tmp_path) as reader:
        reader.check(MANIFEST)
        assert reader.names() == sorted(TENSORS)
        assert reader.shape(NORM) == (24,)
        read = {name: reader.get(name) for name in reader.names()}
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_one_message_names_all_missing_unexpected_and_misshapen_tensors(tmp_path: Path):
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != NORM}
    tensors["model.layers.9.extra"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(24, 37)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError) as caught:
        HFReader(tmp_path).check(MANIFEST)
    message = str(caught.value)
    assert f"1 missing: {NORM}" in message
    assert "1 unexpected: model.layers.9.extra" in message
    assert "1 of another shape: lm_head.weight (24, 37) instead of (37, 24)" in message


def test_a_tied_model_may_repeat_its_embedding_as_output_layer_but_not_another_one(tmp_path: Path):
    tied = {name: shape for name, shape in MANIFEST.items() if name != "lm_head.weight"}
    tensors = TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    HFReader(tmp_path).check(tied)
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"1 unexpected: lm_head\.weight"):
        HFReader(tmp_path).check(tied)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    tiny_model("llama", tied=False).save_pretrained(folder, max_shard_size="20KB")
    return folder


def edit_index(folder: Path, name: str, file: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "..", "sub/inside.safetensors"])
def test_an_index_may_not_point_out_of_the_folder(file: str, sharded: Path):
    save_file(TENSORS, sharded.parent / "outside.safetensors")
    edit_index(sharded, NORM, file)
    with pytest.raises(ModelFolderError, match=r"only files in the folder itself") as caught:
        HFReader(sharded)
    assert repr(file) in str(caught.value)


def test_a_missing_shard_is_named(sharded: Path):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFolderError, match=f"{shard.name} is missing"):
        HFReader(sharded)


def test_a_cut_off_shard_is_named(sharded: Path):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ModelFolderError, match=f"{shard.name} is no complete safetensors file"):
        HFReader(sharded)


def test_a_shard_without_the_tensor_its_index_promises_is_refused(sharded: Path):
    edit_index(sharded, "model.layers.7.promised", sorted(sharded.glob("*.safetensors"))[0].name)
    with pytest.raises(ModelFolderError, match=r"places tensor model\.layers\.7\.promised in .* which lacks it"):
        HFReader(sharded)


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelFolderError, match="only safetensors weights can be read"):
        HFReader(tmp_path)


@pytest.mark.parametrize(("text", "fault"), [(None, "is missing"), ("{", "no valid JSON"), ("[]", "holds a list")])
def test_an_unreadable_config_is_refused_with_its_path(text: str | None, fault: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFolderError, match=rf"config\.json {fault}|config\.json is {fault}"):
        read_config(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(ModelFolderError, match="is not a folder"):
        read_config(tmp_path / "nothing")


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_written_folder_without_missing_or_unexpected_tensors(
    family: str, tied: bool, tmp_path: Path
):
    model = tiny_model(family, tied)
    model.save_pretrained(tmp_path / "source")
    arch = Architecture.from_hf_config(read_config(tmp_path / "source"))
    write_hf_folder(tmp_path / "dst", tensors_of(model).items(), arch=arch, source_dir=tmp_path / "source")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.tensor([[1, 5, 9, 36]])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_small_model_is_one_file_with_its_tokenizer_and_config(tmp_path: Path, source: Path):
    files = write(tmp_path / "dst", source)
    assert files == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(contents(tmp_path / "dst")) == files
    assert (tmp_path / "dst" / "merges.txt").read_text() == "merges.txt"
    assert leftovers(tmp_path) == []


def test_templates_beside_the_default_one_go_along_and_the_folder_counts_as_written_here(tmp_path: Path, source: Path):
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    write(tmp_path / "dst", source)
    copied = tmp_path / "dst" / "additional_chat_templates"
    assert (copied / "tool_use.jinja").read_text() == "{{ tools }}"
    assert strange_entries(tmp_path / "dst") == []
    (copied / "notes.txt").touch()
    assert strange_entries(tmp_path / "dst") == ["additional_chat_templates"]


def test_a_large_model_is_split_into_shards_no_larger_than_asked(tmp_path: Path, source: Path):
    write(tmp_path / "dst", source, max_shard_bytes=20_000)
    shards = sorted((tmp_path / "dst").glob("model-*.safetensors"))
    count = len(shards)
    assert count > 1
    assert [path.name for path in shards] == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in TENSORS.values())  # float32
    assert index["weight_map"].keys() == TENSORS.keys()
    assert all(sum(t.nbytes for t in load_file(path).values()) <= 20_000 for path in shards)
    with HFReader(tmp_path / "dst") as reader:
        assert all(torch.equal(reader.get(name), TENSORS[name]) for name in TENSORS)


def test_weights_are_written_in_the_dtype_asked_for_and_the_config_says_so(tmp_path: Path, source: Path):
    write(tmp_path / "dst", source, dtype=torch.bfloat16)
    assert read_config(tmp_path / "dst")["dtype"] == "bfloat16"
    with HFReader(tmp_path / "dst") as reader:
        assert torch.equal(reader.get(NORM), TENSORS[NORM].bfloat16())


def test_the_dtype_key_of_older_configs_is_updated_in_place(tmp_path: Path, source: Path):
    config = read_config(source)
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    write(tmp_path / "dst", source, dtype=torch.float16)
    written = read_config(tmp_path / "dst")
    assert written["torch_dtype"] == "float16"
    assert "dtype" not in written


def test_a_producer_may_reuse_its_buffer(tmp_path: Path, source: Path):
    def one_buffer_for_all() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(max(tensor.numel() for tensor in TENSORS.values()))
        for name, tensor in TENSORS.items():
            view = buffer[: tensor.numel()].view_as(tensor)
            yield name, view.copy_(tensor)

    write_hf_folder(tmp_path / "dst", one_buffer_for_all(), arch=ARCH, source_dir=source)
    with HFReader(tmp_path / "dst") as reader:
        assert all(torch.equal(reader.get(name), TENSORS[name]) for name in TENSORS)


def test_weights_are_as_readable_as_other_new_files(tmp_path: Path, source: Path):
    write(tmp_path / "dst", source)
    (tmp_path / "new").write_text("")
    assert stat.S_IMODE((tmp_path / "dst" / "model.safetensors").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "new").stat().st_mode
    )


def test_an_existing_model_folder_is_replaced_whole(tmp_path: Path, source: Path):
    write(tmp_path / "dst", source, max_shard_bytes=20_000)
    write(tmp_path / "dst", source)
    assert len(list((tmp_path / "dst").glob("*.safetensors*"))) == 1  # no shard or index of the first one
    assert leftovers(tmp_path) == []


def planted(fault: str) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    if fault == "missing":
        del tensors[NORM]
    elif fault == "unexpected":
        tensors["model.norm.bias"] = torch.zeros(24)
    elif fault == "misshapen":
        tensors[NORM] = torch.zeros(25)
    elif fault == "mixed":
        tensors[NORM] = tensors[NORM].double()
    else:
        tensors[NORM][3] = float(fault)
    return tensors


FAULTS = {
    "missing": r"1 tensors were not exported, the first is model\.norm\.weight",
    "unexpected": r"model\.norm\.bias does not belong to this model",
    "misshapen": r"model\.norm\.weight has shape \(25,\) instead of \(24,\)",
    "mixed": r"model\.norm\.weight is torch\.float64, others are torch\.float32",
    "nan": r"model\.norm\.weight has NaN or infinite values",
    "-inf": r"model\.norm\.weight has NaN or infinite values",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("exists", [True, False])
def test_a_planted_fault_is_refused_and_the_destination_untouched(
    fault: str, exists: bool, tmp_path: Path, source: Path
):
    dst = tmp_path / "dst"
    if exists:
        write(dst, source)
    before = contents(dst) if exists else None
    with pytest.raises(ModelFolderError, match=FAULTS[fault]):
        write(dst, source, planted(fault), max_shard_bytes=20_000)
    assert (contents(dst) if dst.exists() else None) == before
    assert leftovers(tmp_path) == []


def test_a_value_too_large_for_the_dtype_asked_for_is_refused(tmp_path: Path, source: Path):
    tensors = TENSORS | {NORM: torch.full((24,), 1e5)}  # float16 ends at 65504
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight has NaN or infinite values as torch\.float16"):
        write(tmp_path / "dst", source, tensors, dtype=torch.float16)


def test_a_tensor_given_twice_is_refused(tmp_path: Path, source: Path):
    weights = [*TENSORS.items(), (NORM, TENSORS[NORM])]
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight was exported twice"):
        write_hf_folder(tmp_path / "dst", weights, arch=ARCH, source_dir=source)


def test_an_interrupted_write_leaves_the_old_folder(tmp_path: Path, source: Path):
    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(TENSORS.items())[:-1]
        raise KeyboardInterrupt

    write(tmp_path / "dst", source)
    before = contents(tmp_path / "dst")
    with pytest.raises(KeyboardInterrupt):
        write_hf_folder(tmp_path / "dst", interrupted(), arch=ARCH, source_dir=source, max_shard_bytes=20_000)
    assert contents(tmp_path / "dst") == before
    assert leftovers(tmp_path) == []


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """The operating system refuses to let files grow beyond 8000 bytes, as it refuses on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_refused_disk_write_is_an_os_error_and_leaves_nothing(tmp_path: Path, source: Path, file_size_limit: None):
    with pytest.raises(OSError, match=r"model\.safetensors") as caught:
        write(tmp_path / "dst", source)
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "dst").exists()
    assert leftovers(tmp_path) == []


def test_the_old_folder_returns_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "dst", source)
    before = contents(tmp_path / "dst")
    rename = os.rename

    def refuse_the_new_folder(src: Path, dst: Path) -> None:
        if str(src).endswith(".partial"):
            raise OSError(errno.EIO, "planted")
        rename(src, dst)

    monkeypatch.setattr(os, "rename", refuse_the_new_folder)
    with pytest.raises(OSError, match="planted"):
        write(tmp_path / "dst", source)
    assert contents(tmp_path / "dst") == before
    assert leftovers(tmp_path) == []


def test_a_source_of_another_architecture_is_refused(tmp_path: Path, source: Path):
    LlamaConfig(**(CONFIG | {"num_hidden_layers": 3})).save_pretrained(source)
    with pytest.raises(ModelFolderError, match="another architecture"):
        write(tmp_path / "dst", source)


@pytest.mark.parametrize("dst", ["source", "."])
def test_the_source_model_is_never_overwritten(dst: str, tmp_path: Path, source: Path):
    before = contents(source)
    with pytest.raises(ModelFolderError, match="would delete the source model"):
        write(tmp_path / dst, source)
    assert contents(source) == before


def test_a_folder_that_holds_something_else_is_never_deleted(tmp_path: Path, source: Path):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelFolderError, match="not empty and no model folder"):
        write(tmp_path / "dst", source)
    assert contents(tmp_path / "dst") == {"thesis.tex": b"years of work"}


def test_an_empty_folder_may_be_the_destination(tmp_path: Path, source: Path):
    (tmp_path / "dst").mkdir()
    write(tmp_path / "dst", source)
    HFReader(tmp_path / "dst").check(MANIFEST)
