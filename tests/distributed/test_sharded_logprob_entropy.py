"""A vocabulary shared by ranks gives what one rank computes, value and gradient."""

from pathlib import Path

import pytest
from launch import launch

pytestmark = [pytest.mark.distributed]


@pytest.mark.parametrize("ranks", [1, 2])
def test_shared_columns_give_what_whole_rows_give(ranks: int) -> None:
    launch(Path(__file__).with_name("sharded_logprob_entropy.py"), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_fused_loss_of_shared_columns_is_that_of_float64_on_whole_rows(ranks: int) -> None:
    launch(Path(__file__).with_name("sharded_fused_loss.py"), ranks, timeout_s=300)
