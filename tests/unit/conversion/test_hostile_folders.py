"""Model folders from strangers, full disks, and conversions that are killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import tensors_of, tiny_model
from safetensors.torch import save_file

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError
from exgrpo_conversion.compare import compare
from exgrpo_conversion.config_file import read_config, read_json
from exgrpo_conversion.convert import Target, convert
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import check_space, file_inside
from exgrpo_conversion.formats import open_source
from exgrpo_conversion.hf_folder import HFReader, write_hf_folder

MODEL = tiny_model("llama", tied=False)
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model with a tokenizer file."""
    MODEL.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is there twice"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"\xef\xbb\xbf{}", "no valid JSON"),
        (b"", "no valid JSON"),
        (b" " * (16 * 2**20 + 1), "at most 16777216 are read"),
    ],
)
def test_json_that_means_different_things_to_different_readers_is_refused(text: bytes, fault: str, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelFolderError, match=fault):
        read_config(tmp_path)


def test_a_config_of_endless_layers_is_refused_before_their_names_are_made():
    config = MODEL.config.to_dict()
    for changes in ({"num_hidden_layers": 10**9}, {"vocab_size": 2**31}, {"rms_norm_eps": 10**400}):
        with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
            Architecture.from_hf_config(config | changes)


# ---------------------------------------------------------------- safetensors headers


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


HEADER_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an overflowing shape": (lambda header: header[NORM].update(shape=[2**62, 2**62]), f"{NORM} needs 8507059"),
    "a wrong shape": (lambda header: header[NORM].update(shape=[25]), f"{NORM} needs 100 bytes and has bytes"),
    "a wrong dtype": (lambda header: header[NORM].update(dtype="F64"), f"{NORM} needs 192 bytes"),
    "an unknown dtype": (lambda header: header[NORM].update(dtype="C64"), f"{NORM} has the dtype C64"),
    "a negative size": (lambda header: header[NORM].update(shape=[-24]), f"{NORM} has a shape or place that is none"),
    "a size of true": (lambda header: header[NORM].update(shape=[True]), f"{NORM} has a shape or place that is none"),
    "a hole": (lambda header: header.pop(NORM), "begins at byte .* and the one before ends at|its tensors end at"),
    "a missing end": (
        lambda header: header[NORM].update(shape=[2**40], data_offsets=[0, 2**42]),
        "begins at byte|its tensors end at byte",
    ),
    "an overlap": (
        lambda header: header[NORM].update(data_offsets=[0, 96]),
        "begins at byte|its tensors end at byte",
    ),
    "other keys": (lambda header: header[NORM].update(extra=1), f"{NORM} is not described by"),
    "no description": (lambda header: header.update({NORM: 3}), f"{NORM} is not described by"),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_a_header_that_does_not_fit_its_file_is_refused_with_file_and_tensor(fault: str, folder: Path):
    change, message = HEADER_FAULTS[fault]
    rewrite_header(folder / "model.safetensors", change)
    with pytest.raises(ModelFolderError, match=message) as caught:
        HFReader(folder)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 2**40, 2**64 - 1])
def test_the_length_of_a_header_is_checked_before_it_is_read(length: int, folder: Path):
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
        HFReader(folder)


def test_a_tensor_of_an_odd_place_is_read_like_any_other(tmp_path: Path):
    odd = {"a": torch.tensor([1, 2, 3], dtype=torch.int8), "b": torch.tensor([1.5, -2.5])}
    header = {
        "a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    data = b"".join(tensor.numpy().tobytes() for tensor in odd.values())
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with HFReader(tmp_path) as reader:
        assert all(torch.equal(reader.get(name), odd[name]) for name in odd)


# ---------------------------------------------------------------- links and names


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, folder: Path, tmp_path: Path):
    secret = tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    with pytest.raises(ModelFolderError, match=f"{name} is a link out of the folder"), open_source(folder) as source:
        convert(source, Target("hf", tmp_path / "dst"), lambda _: None)
    assert not (tmp_path / "dst").exists()


def test_the_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path):
    cache = tmp_path / "models--some--model"
    snapshot, blobs = cache / "snapshots" / "0a1b", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        shutil.move(path, blobs / f"{path.name}-digest")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{path.name}-digest")
    with open_source(snapshot) as source:
        assert torch.equal(source.read(NORM), tensors_of(MODEL)[NORM])


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_a_folder_of_links_to_a_model_on_another_disk_is_read(shards: str, tmp_path: Path):
    """And one of links into a cache of the hub, whose files have other names."""
    MODEL.save_pretrained(tmp_path / "disk", max_shard_size=shards)
    blobs = tmp_path / "models--some--model" / "blobs"
    links, of_links = tmp_path / "links", tmp_path / "of_links"
    for folder in (blobs, blobs.parent / "snapshots" / "0a1b", links, of_links):
        folder.mkdir(parents=True)
    for path in (tmp_path / "disk").iterdir():
        (links / path.name).symlink_to(path)
        shutil.copy(path, blobs / f"{path.name}-digest")
        (of_links / path.name).symlink_to(blobs / f"{path.name}-digest")
    for folder in (links, of_links):
        with open_source(folder) as source:
            convert(source, Target("hf", tmp_path / f"{folder.name}-out"), lambda _: None)
        assert not any(path.is_symlink() for path in (tmp_path / f"{folder.name}-out").iterdir())
        with open_source(tmp_path / "disk") as mine, open_source(tmp_path / f"{folder.name}-out") as its:
            assert compare(mine, its).same


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\\b", "a\0b", 5, None, ["a"]])
def test_only_plain_names_are_files_of_a_folder(name: object, tmp_path: Path):
    with pytest.raises(ModelFolderError, match="only files in the folder itself"):
        file_inside(tmp_path, name)


def test_a_pipe_or_a_link_to_itself_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "index.json").symlink_to(tmp_path / "index.json")
    for name, fault in (("config.json", "no regular file"), ("index.json", "cannot be followed")):
        with pytest.raises(ModelFolderError, match=fault):
            read_json(tmp_path / name)


# ---------------------------------------------------------------- code


def test_no_file_is_ever_given_to_an_unpickler_that_runs_code():
    """Only the reader of one file a rank, which asks for leave first, unpickles; nothing trusts a model's code."""
    package = Path(sys.modules["exgrpo_conversion"].__path__[0])
    found = {
        path.name
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if "pickle.load" in line.split("#")[0] or "torch.load(" in line.split("#")[0] or "weights_only=False" in line
        if not line.strip().startswith(("`", "#", "torch writes", "reads"))
    }
    # The others explain why they do not, or tell the user to.
    assert found <= {"legacy.py", "safe_metadata.py", "_torch_archive.py", "_bin_files.py"}
    texts = {path.name: path.read_text() for path in package.rglob("*.py") if path.name in found - {"legacy.py"}}
    loads = re.compile(r"^(import|from) pickle\b|= torch\.load", re.MULTILINE)
    assert not [name for name, text in texts.items() if loads.search(text)]
    everywhere = [path for root in (package, package.parents[1] / "exgrpo_megatron") for path in root.rglob("*.py")]
    assert not [path for path in everywhere if "trust_remote_code=True" in path.read_text()]


# ---------------------------------------------------------------- disks


def test_a_disk_without_room_is_named_with_both_numbers(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    check_space(tmp_path / "not" / "there" / "yet", usage.free // 2)
    with pytest.raises(ModelFolderError, match=r"needs 10,000,000,000,000,000 bytes, and [\d,]+ are free"):
        check_space(tmp_path, 10**16)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    before = sorted(tmp_path.iterdir())
    arch = Architecture.from_hf_config(read_config(folder))
    with pytest.raises(ModelFolderError, match=r"needs [\d,]+ bytes, and 1,000 are free"):
        write_hf_folder(tmp_path / "dst", tensors_of(MODEL).items(), arch=arch, source_dir=folder)
    assert sorted(tmp_path.iterdir()) == before


# ---------------------------------------------------------------- killed


def killed(dst: Path, source: Path, to: str, before: int) -> bool:
    """Convert in a child that kills itself before its step number `before`; whether it came to that.

    Steps are tensors done, and files or folders opened, made, copied or renamed.
    """
    child = os.fork()
    if child == 0:
        try:
            steps = iter(range(10**6))

            def step(*_: object) -> None:
                if next(steps) == before:
                    os.kill(os.getpid(), signal.SIGKILL)

            with open_source(source) as opened:
                sys.addaudithook(lambda event, _: step() if event in _EVENTS else None)
                convert(opened, Target(to, dst, max_shard_bytes=20_000, overwrite=True), step)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile"}


@pytest.mark.parametrize("to", ["hf", "torch_dist", "nemo2"])
def test_of_two_conversions_to_one_place_the_second_replaces_the_first_only_with_leave(
    to: str, folder: Path, tmp_path: Path
):
    """The other one begins and ends while this one is at its last tensor."""
    dst = tmp_path / "made" / "dst"

    def convert_with_another(overwrite: bool) -> None:
        def meanwhile(_: int) -> None:
            if not dst.exists():
                with open_source(folder) as again:
                    convert(again, Target(to, dst, torch.float16), lambda _: None)

        with open_source(folder) as source:
            convert(source, Target(to, dst, torch.bfloat16, overwrite=overwrite), meanwhile)

    with pytest.raises(ModelFolderError, match="was made meanwhile by another process"):
        convert_with_another(overwrite=False)
    found = {}
    for overwrite in (False, True):
        if overwrite:
            shutil.rmtree(dst)
            convert_with_another(overwrite=True)
        with open_source(dst) as source:
            found[overwrite] = source.infos()[NORM].dtype
    assert found == {False: torch.float16, True: torch.bfloat16}
    assert [path.name for path in dst.parent.iterdir()] == ["dst"]


def is_whole(path: Path, model: Path) -> bool:
    with open_source(model) as mine, open_source(path) as its:
        return compare(mine, its).same


@pytest.mark.parametrize("to", ["hf", "torch_dist", "nemo2"])
def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_can_be_repeated(to: str, folder: Path, tmp_path: Path):
    dst = tmp_path / "made" / "dst"
    step = 0
    while killed(dst, folder, to, step):
        if dst.exists():
            assert is_whole(dst, folder)
            shutil.rmtree(dst)
        step += 3
    assert step > 30
    assert is_whole(dst, folder)
    assert [path.name for path in dst.parent.iterdir()] == ["dst"]  # what the killed ones left is gone


def test_a_killed_replacement_leaves_the_old_or_the_new_one(folder: Path, tmp_path: Path):
    dst, old = tmp_path / "made" / "dst", tmp_path / "old"
    shutil.copytree(folder, old)
    save_file(
        {name: tensor + 1 for name, tensor in tensors_of(MODEL).items()}, old / "model.safetensors", {"format": "pt"}
    )
    seen: set[str] = set()
    step = 0
    while True:
        shutil.rmtree(dst.parent, ignore_errors=True)
        shutil.copytree(old, dst)
        if not killed(dst, folder, "hf", step):
            break
        # Between two renames the old one stands beside its place.
        left = dst if dst.exists() else next(path for path in dst.parent.iterdir() if path.name.endswith(".replaced"))
        seen.add("old" if is_whole(left, old) else "new" if is_whole(left, folder) else "broken")
        step += 4
    assert seen <= {"old", "new"}
    assert "old" in seen
    assert is_whole(dst, folder)
