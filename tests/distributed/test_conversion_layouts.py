"""What `convert` writes loads into Megatron's models on any layout, and what they save converts back, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "conversion")]

from hf_models import FAMILIES, tiny_model  # noqa: E402
from launch import launch  # noqa: E402

from exgrpo_conversion.convert import Target, convert  # noqa: E402
from exgrpo_conversion.formats import open_source  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
TIED, UNTIED = "qwen2 tied", "qwen3 untied"
LAYOUTS = {
    "TP2": {"megatron_cfg": TP2, "saved": [UNTIED]},
    "PP2": {"megatron_cfg": PP2, "saved": [TIED]},
    "TP2 x PP2": {"megatron_cfg": TP2 | PP2, "saved": [UNTIED]},
    "PP2, 3 layers and 1": {"megatron_cfg": PP2 | {"num_layers_in_first_pipeline_stage": 3}, "saved": [UNTIED]},
    "TP2 x PP2, 2 chunks a stage": {"megatron_cfg": TP2 | PP2 | VPP2, "saved": [TIED]},
}
SAVED = [(layout, model) for layout, case in LAYOUTS.items() for model in case["saved"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(models, what Megatron saved of them); that every model loads on every layout is asserted by the processes."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("saved")
    for family in FAMILIES:
        for tied in (True, False):
            folder = models / f"{family} {'tied' if tied else 'untied'}"
            tiny_model(family, tied, num_hidden_layers=4).save_pretrained(folder / "hf")
            for target in ("torch_dist", "nemo2"):
                with open_source(folder / "hf") as source:
                    # Files smaller than the model: a layer's tensors then lie in several.
                    convert(source, Target(target, folder / target, max_shard_bytes=30_000), id)
    launch(HERE / "run_conversion.py", 4, [str(models), str(out), json.dumps(LAYOUTS)], timeout_s=1200)
    return models, out


@pytest.mark.parametrize("saved_as", ["torch_dist", "legacy"])
@pytest.mark.parametrize(("layout", "model"), SAVED)
def test_what_megatron_saved_converts_to_the_model_it_came_from(
    layout: str, model: str, saved_as: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    models, saved = folders
    with open_source(saved / layout / model / saved_as, config=models / model / "hf", unpickle=True) as source:
        assert source.format == saved_as
        convert(source, Target("hf", tmp_path / "hf"), id)
    expected, found = (load_file(folder / "hf" / "model.safetensors") for folder in (models / model, tmp_path))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
