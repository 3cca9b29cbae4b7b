"""A run that breaks on two ranks keeps the batch whole, and its losses come out of what is kept, on one."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from launch import launch

from exgrpo_megatron.debug.files import read_bad_step
from exgrpo_megatron.debug.recompute import loss_of
from exgrpo_megatron.debug_command import replay_recipe, replayed

SCRIPT = Path(__file__).with_name("run_bad_steps.py")

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_a_step_that_broke_on_two_ranks_comes_out_of_what_is_kept(tmp_path, data_parallel):
    launch(SCRIPT, 2, [str(tmp_path), "{}"], timeout_s=300)
    ((metrics, warnings),) = json.loads((tmp_path / "steps.json").read_text())
    (note,) = [text for text in warnings if text.startswith("bad: ")]
    assert note.startswith("bad: optimiser step 2: log-ratio 0.5 above that of debug.max_ratio = 1.5. Its batch is in")
    kept = read_bad_step(tmp_path / "run" / "debug" / "step_000001")
    # Four groups of four answers in two optimiser steps, each half of them trained by one of the ranks.
    assert [len(update.sequences) for update in kept.updates] == [8, 8]
    assert (kept.missing_ranks, len(list(kept.folder.glob("rank_*.safetensors")))) == ([], 2)
    shares = [json.loads(path.read_text())["updates"] for path in sorted(kept.folder.glob("rank_*.json"))]
    assert [[len(update["sequences"]) for update in share] for share in shares] == [[4, 4], [4, 4]]
    assert all(origin.question_id for update in kept.updates for origin in update.origins)
    assert np.mean([update.loss for update in kept.updates]) == pytest.approx(metrics["policy/loss"], rel=1e-12)
    for update in kept.updates:
        assert loss_of(update) == pytest.approx(update.loss, rel=1e-5)
    # The first had the weights that the run began with: on one rank it comes out of the tokens too.
    first = kept.updates[0]
    again = replayed(kept, tmp_path / "run" / "model", replay_recipe(kept.folder), data_parallel)[0]
    assert again.loss == pytest.approx(first.loss, rel=1e-4)
    assert again.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)
