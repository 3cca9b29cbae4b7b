"""Hugging Face model folders: read config and safetensors weights with checks, write a whole folder or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo_conversion._mapped import as_values, map_part
from exgrpo_conversion._safetensors import Entry, read_header
from exgrpo_conversion._shards import INDEX_FILE, SINGLE_FILE, ShardWriter, sync
from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.aside import swap_in, temporary_sibling
from exgrpo_conversion.config_file import CONFIG_FILE, read_config, read_json
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import file_inside
from exgrpo_conversion.mapping import manifest

__all__ = ["CONFIG_FILE", "HFReader", "ModelFolderError", "read_config", "sync", "write_hf_folder"]


class HFReader:
    """Reads tensors one at a time from a folder's safetensors files.

    All shard headers are read and checked at once, so a missing or cut-off shard shows before anything is loaded.
    `model.safetensors` wins over an index beside it, as in transformers.

    Raises:
        ModelFolderError: a file is missing, damaged, outside the folder, or disagrees with the index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files, index = _shard_files(self.folder)
        self._entries: dict[str, tuple[Path, Entry]] = {}
        for file in files:
            path = file_inside(self.folder, file)
            for name, entry in read_header(path).items():
                other, _ = self._entries.setdefault(name, (path, entry))
                if other != path:
                    raise ModelFolderError(f"{self.folder}: tensor {name} is both in {other.name} and in {file}")
        for name, file in index.items():
            if name not in self._entries or self._entries[name][0].name != file:
                raise ModelFolderError(f"{self.folder / INDEX_FILE} places tensor {name} in {file}, which lacks it")

    def names(self) -> list[str]:
        """Every tensor name found, sorted."""
        return sorted(self._entries)

    def names_in_file_order(self) -> list[str]:
        """Every tensor name, file by file and in each as the data lie, so that reading never goes back."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading its data."""
        return self._entry(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading its data; raises ModelFolderError unless it is a float of 16 bits
        or more."""
        dtype = self._entry(name)[1].dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ModelFolderError(f"{self.folder}: tensor {name} is {dtype}; floats of 16 bits or more are supported")
        return dtype

    def get(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype of the file and mapped from it for as long as it is kept."""
        path, entry = self._entry(name)
        return as_values(map_part(path, entry.start, entry.nbytes), entry.dtype, entry.shape)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with a manifest.

        Two leftovers that transformers ignores too are accepted: rotary frequency buffers of old checkpoints, and
        the output layer of a tied model when it is equal to the embedding.

        Raises:
            ModelFolderError: one message with all missing, unexpected and misshapen tensors.
        """
        check_tensors(self.folder, {name: self.shape(name) for name in self.names()}, self.get, expected)

    def close(self) -> None:
        """Forget what is in the folder; tensors already returned stay valid."""
        self._entries.clear()

    def __enter__(self) -> HFReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, name: str) -> tuple[Path, Entry]:
        if name not in self._entries:
            raise ModelFolderError(f"{self.folder} has no tensor {name}")
        return self._entries[name]


def check_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], Tensor],
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    """`HFReader.check` for the tensors of any kind of file; `get` reads one, where its values decide."""
    missing = [name for name in expected if name not in shapes]
    unexpected = [name for name in shapes if name not in expected and not _is_leftover(name, shapes, get, expected)]
    misshapen = [
        f"{name} {shapes[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    text = "; ".join(f"{len(found)} {kind}: {_shortened(found)}" for kind, found in faults.items() if found)
    if text:
        raise ModelFolderError(f"the tensors in {folder} do not fit its {CONFIG_FILE}: {text}")


def index_of(path: Path) -> dict[str, str]:
    """The weight_map of an index file: tensor name -> file name, all in the folder itself.

    Raises:
        ModelFolderError: there is no such file, or it is no such index.
    """
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelFolderError(f"{path} has no weight_map")
    checked: set[str] = set()
    for name, file in index.items():
        if not isinstance(file, str) or file not in checked:
            file_inside(path.parent, file, f"{path} places {name}")
            checked.add(file)
    return index


def write_hf_folder(
    dst: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    arch: Architecture,
    source_dir: str | Path,
    tokenizer_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    replace: bool = True,
) -> list[str]:
    """Stream weights into a complete Hugging Face folder at `dst`; on any failure `dst` is as it was before.

    Tokenizer and chat template are copied from `tokenizer_dir` (None: `source_dir`), generation settings from
    `source_dir`, and its config.json with the dtype of the new weights. An existing model folder at `dst` is replaced
    after everything is on disk. Each tensor is written when it comes, and none is held.

    Args:
        weights: Hugging Face names and tensors, each name of the manifest once, in any order, on any device.
        dtype: convert to this floating dtype; None keeps the tensors' own, which must then be one and the same.
        replace: whether a model folder that is at `dst` in the end may be replaced.

    Returns:
        The file names written, sorted.

    Raises:
        ModelFolderError: a tensor is missing, unexpected, repeated, misshapen, NaN or infinite; `source_dir` is of
            another architecture; or `dst` is something else than a model folder.
        OSError: the disk is full, or another fault of the file system.
    """
    dst, source_dir = Path(dst).resolve(), Path(source_dir).resolve()
    config = read_config(source_dir)
    if Architecture.from_hf_config(config) != arch:
        raise ModelFolderError(f"{source_dir / CONFIG_FILE} describes another architecture than the weights have")
    _refuse_bad_destination(dst, source_dir)
    with temporary_sibling(dst) as folder:
        with closing(ShardWriter(folder, manifest(arch), dtype, max_shard_bytes)) as writer:
            for name, tensor in weights:
                writer.add(name, tensor)
            written_dtype = writer.finish()
        copy_side_files(source_dir, folder, tokenizer_dir)
        write_config(folder, config, written_dtype)
        for path in folder.iterdir():
            sync(path)
        sync(folder)
        files = sorted(path.name for path in folder.iterdir())
        swap_in(folder, dst, replace=replace)
    return files


_CARD = "README.md"  # of exports
# What goes with the weights; copied where it is there.
_SETTINGS = ("generation_config.json",)
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
)
_CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of the templates beside the default one, as transformers writes it."""


def _shard_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a folder and its index (tensor name -> file name; empty for a single file)."""
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE], {}
    if not (folder / INDEX_FILE).exists():
        raise ModelFolderError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors weights can be read "
            f"(exgrpo convert makes them of .bin files)"
        )
    index = index_of(folder / INDEX_FILE)
    return sorted(set(index.values())), index


def _is_leftover(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], Tensor],
    expected: Mapping[str, tuple[int, ...]],
) -> bool:
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    embedding = "model.embed_tokens.weight"
    return (
        name == "lm_head.weight"
        and embedding in expected
        and embedding in shapes
        and torch.equal(get(name), get(embedding))
    )


def _shortened(items: list[str], limit: int = 8) -> str:
    more = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _refuse_bad_destination(dst: Path, source_dir: Path) -> None:
    """The destination will be deleted if it exists: make sure that it is a model folder, and not the source."""
    if source_dir.is_relative_to(dst):
        raise ModelFolderError(f"writing to {dst} would delete the source model {source_dir}: choose another folder")
    if dst.exists() and not dst.is_dir():
        raise ModelFolderError(f"{dst} is a file: choose a folder to write the model to")
    if dst.exists() and any(dst.iterdir()) and not (dst / CONFIG_FILE).exists():
        raise ModelFolderError(f"{dst} is not empty and no model folder ({CONFIG_FILE} is missing): choose another")


def copy_side_files(source_dir: Path, folder: Path, tokenizer_dir: str | Path | None = None) -> None:
    """Copy generation settings, and of `tokenizer_dir` (None: the same) tokenizer and chat template, as far as there
    are any."""
    _copy(_SETTINGS, source_dir, folder)
    tokenizer = Path(tokenizer_dir or source_dir)
    _copy(_TOKENIZER_FILES, tokenizer, folder)
    if (tokenizer / _CHAT_TEMPLATES).is_dir():
        (folder / _CHAT_TEMPLATES).mkdir()
        _copy(("*.jinja",), tokenizer / _CHAT_TEMPLATES, folder / _CHAT_TEMPLATES)


def strange_entries(folder: Path) -> list[str]:
    """What is in a folder and in none that `write_hf_folder` or an export made; or what those have and it lacks."""
    names = {path.name for path in folder.iterdir()}
    if (folder / _CHAT_TEMPLATES).is_dir() and not (folder / _CHAT_TEMPLATES).is_symlink():
        others = [path for path in (folder / _CHAT_TEMPLATES).iterdir() if path.suffix != ".jinja"]
        names -= set() if others else {_CHAT_TEMPLATES}
    patterns = (CONFIG_FILE, *_SETTINGS, *_TOKENIZER_FILES, SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors", _CARD)
    strange = [
        name
        for name in sorted(names)
        if not (folder / name).is_file() or not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    is_model = CONFIG_FILE in names and not names.isdisjoint({SINGLE_FILE, INDEX_FILE})
    return strange if strange or is_model else [f"no {CONFIG_FILE} and weights"]


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the files of a folder that go with the tokenizer and the chat template."""
    return _matching(_TOKENIZER_FILES, folder)


def _copy(patterns: tuple[str, ...], source: Path, folder: Path) -> None:
    for name in _matching(patterns, source):
        # A link could bring any file of this machine into the export.
        shutil.copyfile(file_inside(source, name), folder / name)


def _matching(patterns: tuple[str, ...], folder: Path) -> list[str]:
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write config.json with the dtype of the weights."""
    _write_json(folder / CONFIG_FILE, _with_dtype(config, dtype))


def _with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with its dtype set under the name it uses: `dtype`, or `torch_dtype` before transformers 4.56."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return config | {key: str(dtype).removeprefix("torch.") for key in keys}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
