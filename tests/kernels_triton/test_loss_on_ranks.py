"""Two processes that share a vocabulary through gloo get the float64 numbers of whole rows."""

import sys
from pathlib import Path

import pytest
from interpreted import needs_interpreter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from launch import launch

pytestmark = [*needs_interpreter, pytest.mark.distributed]


def test_ranks_that_share_the_vocabulary_get_the_loss_of_whole_rows():
    launch(Path(__file__).with_name("loss_on_ranks.py"), 2, timeout_s=240)
