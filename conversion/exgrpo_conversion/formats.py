"""Which format a checkpoint has, told by what is in it, and opening it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exgrpo_conversion import contexts
from exgrpo_conversion._bin_files import BIN_INDEX, SINGLE_BIN
from exgrpo_conversion._shards import INDEX_FILE, SINGLE_FILE
from exgrpo_conversion.claims import Claims
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.hf_source import HFSource
from exgrpo_conversion.legacy import LegacyFiles, is_legacy
from exgrpo_conversion.megatron_source import MegatronSource
from exgrpo_conversion.run_checkpoint import STATE_FILE, is_unfinished, newest_step, run_claims, run_model
from exgrpo_conversion.safe_metadata import METADATA_FILE
from exgrpo_conversion.source import Source
from exgrpo_conversion.torch_dist import TRACKER_FILE, TorchDistFiles, iteration_folder

FORMATS = {
    "hf": "a Hugging Face folder with safetensors",
    "hf_bin": "a Hugging Face folder with .bin files",
    "torch_dist": "a distributed checkpoint of Megatron",
    "bridge": "a distributed checkpoint of Megatron Bridge",
    "nemo2": "a NeMo 2 folder",
    "run": "a checkpoint of a run of this program",
    "legacy": "a Megatron checkpoint of one file a rank",
}


@dataclass(frozen=True)
class Found:
    """What a path turned out to be."""

    format: str
    """A key of FORMATS."""
    folder: Path
    """Where its weights are: the path itself, or what a tracker file in it points to."""


def open_source(path: str | Path, *, config: str | Path | None = None, unpickle: bool = False) -> Source:
    """Open a checkpoint of any format in FORMATS and check it against its config.

    Args:
        config: Hugging Face folder (config.json and tokenizer) of a Megatron checkpoint's model; not needed where the
            checkpoint holds one. What a checkpoint says of its model must agree with it.
        unpickle: allow formats whose files can run code when they are read ("legacy").

    Raises:
        ModelFolderError: none of the formats, incomplete, damaged, of another model than its config; or a pickle
            without leave to read it.
        UnsupportedModelError: a model without a mapping.
    """
    path = Path(path)
    config = None if config is None else Path(config)
    found = detect(path)
    if found.format in ("hf", "hf_bin"):
        if config is not None:
            raise ModelFolderError(f"{path} is {FORMATS[found.format]} and has its own config: leave --config out")
        return HFSource(path, found.format)
    return _OPEN[found.format](path, found.folder, config, unpickle)


def detect(path: Path) -> Found:
    """The format of what is at a path.

    Raises:
        ModelFolderError: there is nothing, or nothing that is known.
    """
    if not path.is_dir():
        raise ModelFolderError(f"{path} is not a folder: give the folder of a checkpoint")
    for look in (_hugging_face, _run, _nemo, _distributed, _one_file_a_rank):
        found = look(path)
        if found is not None:
            return found
    if (path / TRACKER_FILE).is_file():
        return detect(iteration_folder(path))
    raise ModelFolderError(f"{path} is no checkpoint: known are {'; '.join(FORMATS.values())}")


def _hugging_face(path: Path) -> Found | None:
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        return Found("hf", path)
    if (path / SINGLE_BIN).exists() or (path / BIN_INDEX).exists():
        return Found("hf_bin", path)
    return None


def _run(path: Path) -> Found | None:
    if is_unfinished(path):
        raise ModelFolderError(f"{path} is a checkpoint whose writing did not come to its end: choose another step")
    step = path if (path / STATE_FILE).is_file() else newest_step(path)
    return Found("run", step) if step is not None and (step / "policy").is_dir() else None


def _nemo(path: Path) -> Found | None:
    if not (path / "weights").is_dir() or not (path / "weights" / METADATA_FILE).is_file():
        return None
    return Found("nemo2", path)


def _distributed(path: Path) -> Found | None:
    if not (path / METADATA_FILE).is_file():
        return None
    return Found("bridge" if (path / contexts.BRIDGE_FILE).is_file() else "torch_dist", path)


def _one_file_a_rank(path: Path) -> Found | None:
    return Found("legacy", path) if is_legacy(path) else None


def _open_distributed(path: Path, folder: Path, config: Path | None, unpickle: bool) -> Source:
    del unpickle
    is_bridge = (folder / contexts.BRIDGE_FILE).is_file()
    claims = contexts.bridge_claims(folder) if is_bridge else contexts.common_claims(folder)
    source_format = "bridge" if is_bridge else "torch_dist"
    return _megatron(path, source_format, TorchDistFiles, folder, _find(config, path, folder), claims)


def _open_nemo(path: Path, folder: Path, config: Path | None, unpickle: bool) -> Source:
    del unpickle
    context = folder / "context"
    claims = contexts.nemo_claims(context) if context.is_dir() else Claims(str(context), {})
    return _megatron(path, "nemo2", TorchDistFiles, folder / "weights", _find(config, path, context), claims)


def _open_run(path: Path, folder: Path, config: Path | None, unpickle: bool) -> Source:
    del unpickle
    found = contexts.find_config(config, run_model(folder), folder)
    return _megatron(path, "run", TorchDistFiles, folder / "policy", found, run_claims(folder / "policy"))


def _open_legacy(path: Path, folder: Path, config: Path | None, unpickle: bool) -> Source:
    if not unpickle:
        raise ModelFolderError(
            f"{folder} is {FORMATS['legacy']}, pickles that can run code when they are read: allow it (--unpickle) if "
            "you trust who wrote them"
        )
    config_folder = _find(config, path, folder)
    files = LegacyFiles(folder)
    return MegatronSource(path, "legacy", files, config_folder, files.claims)


_OPEN: dict[str, Callable[[Path, Path, Path | None, bool], Source]] = {
    "torch_dist": _open_distributed,
    "bridge": _open_distributed,
    "nemo2": _open_nemo,
    "run": _open_run,
    "legacy": _open_legacy,
}


def _megatron(
    path: Path, format: str, files: Callable[[Path], TorchDistFiles], folder: Path, config: Path, claims: Claims
) -> Source:
    opened = files(folder)
    try:
        return MegatronSource(path, format, opened, config, claims)
    except BaseException:
        opened.close()
        raise


def _find(config: Path | None, path: Path, folder: Path) -> Path:
    """Also beside an iteration's folder, where the tracker file is."""
    places = [folder, path, folder.parent] if _ITERATION.fullmatch(folder.name) else [folder, path]
    return contexts.find_config(config, [place / contexts.HF_FOLDER for place in places], path)


_ITERATION = re.compile(r"iter_\d{7,}|release")
