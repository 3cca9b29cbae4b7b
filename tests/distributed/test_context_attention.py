"""Positions shared by ranks get what one process computes for them, value and gradient, in padded and packed rows."""

from pathlib import Path

import pytest
from launch import launch

pytestmark = [pytest.mark.distributed]


def test_shared_positions_attend_as_whole_sequences_do() -> None:
    launch(Path(__file__).with_name("context_attention.py"), 4, timeout_s=300)
