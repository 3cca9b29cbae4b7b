"""Which format a checkpoint has, told by what is in it, and opening it."""

from __future__ import annotations

from pathlib import Path

from exgrpo_conversion._bin_files import BIN_INDEX, SINGLE_BIN
from exgrpo_conversion._shards import INDEX_FILE, SINGLE_FILE
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.hf_source import HFSource
from exgrpo_conversion.source import Source

FORMATS = {
    "hf": "Hugging Face folder with safetensors",
    "hf_bin": "Hugging Face folder with .bin files",
    "torch_dist": "Megatron distributed checkpoint",
    "legacy": "Megatron checkpoint of one file a rank",
    "nemo2": "NeMo 2 folder",
    "run": "checkpoint of a run of this program",
}


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
    found = detect(path)
    return HFSource(path, found)


def detect(path: Path) -> str:
    """The name of the format in FORMATS.

    Raises:
        ModelFolderError: there is nothing, or nothing that is known.
    """
    if not path.is_dir():
        raise ModelFolderError(f"{path} is not a folder")
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        return "hf"
    if (path / SINGLE_BIN).exists() or (path / BIN_INDEX).exists():
        return "hf_bin"
    raise ModelFolderError(f"{path} is no checkpoint: known are {'; '.join(FORMATS.values())}")
