"""What one layout saved, another one goes on from as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "policy")]

from launch import launch  # noqa: E402
from policy_models import max_difference, save_model  # noqa: E402
from test_layouts import CP2, OVERLAP, PP2, SP, TP2, VPP2, ZERO  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Layout = tuple[int, dict[str, Any]]

ONE: Layout = (1, {})
FLOAT32: dict[str, Layout] = {
    "one process": ONE,
    "DP2 + distributed optimizer + overlap": (2, ZERO | OVERLAP),
    "DP4 + distributed optimizer": (4, ZERO),
    "one process again": ONE,
    "TP2 x DP2 + distributed optimizer": (4, TP2 | ZERO),
    "PP2 x DP2, 2 chunks a stage + distributed optimizer": (4, PP2 | VPP2 | ZERO),
    "TP2 + sequence parallel": (2, TP2 | SP),
    "CP2 + distributed optimizer": (2, CP2 | ZERO),
    "PP2": (2, PP2),
}
BFLOAT16: dict[str, Layout] = {
    "DP2 + distributed optimizer": (2, ZERO),
    "PP2": (2, PP2),
    "one process": ONE,
    "DP2 + distributed optimizer again": (2, ZERO),
}


def test_a_run_goes_on_on_one_layout_after_another(tmp_path: Path) -> None:
    """Each layout loads what the one before saved, saves it again, and takes steps 2 and 3.

    What it saves is bit for bit what the first one saved, whose weights went on changing while it wrote. Losses and
    norms are those of the first one, which was not interrupted: to 1e-5; weights to 1e-4.
    """
    save_model("qwen2", tmp_path / "model", num_hidden_layers=4)
    whole, *resumed = chain(tmp_path, "float32", FLOAT32)
    for name, found in zip(list(FLOAT32)[1:], resumed, strict=True):
        for (loss, norm), (expected_loss, expected_norm) in zip(found["steps"], whole["steps"][2:], strict=True):
            assert loss == pytest.approx(expected_loss, abs=1e-5), name
            assert norm == pytest.approx(expected_norm, rel=1e-5), name
        assert max_difference(found["weights"], whole["weights"]) < 1e-4, name


def test_the_float32_originals_of_bfloat16_weights_survive_other_layouts(tmp_path: Path) -> None:
    """Saved again by every layout they are bit for bit the same, and the last one, which is the first one, takes the
    steps of the run that was not interrupted, bit for bit. The others round sums of bfloat16 numbers otherwise.
    """
    save_model("qwen3", tmp_path / "model", num_hidden_layers=4)
    whole, *_, last = chain(tmp_path, "bfloat16", BFLOAT16)
    assert last["steps"] == whole["steps"][2:]
    assert max_difference(last["weights"], whole["weights"]) == 0
    names = contents(tmp_path / "0").keys()
    assert sum(name.startswith("optimizer.state.fp32_param.") for name in names) == len(names) / 4


def chain(folder: Path, precision: str, layouts: dict[str, Layout]) -> list[dict[str, Any]]:
    """What each layout found; asserts that all saved the same."""
    found, before = [], ""
    for number, (name, (ranks, layout)) in enumerate(layouts.items()):
        out, after = folder / "found.pt", folder / str(number)
        args = [str(folder / "model"), str(out), json.dumps(layout), precision, before, str(after)]
        launch(HERE / "run_resume.py", ranks, args, timeout_s=400)
        found.append(torch.load(out))
        assert found[-1]["version"] == 4, name
        assert_same_contents(contents(after), contents(folder / "0"), name)
        before = str(after)
    return found


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return tensors


def assert_same_contents(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], name: str) -> None:
    assert ours.keys() == theirs.keys(), name
    for key, tensor in ours.items():
        other = theirs[key]
        # Vocabulary rows are padded to a multiple of the tensor-parallel ranks.
        shared = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, other.shape, strict=True))
        assert torch.equal(tensor[shared], other[shared]), (name, key)
