"""The arithmetic of ranks, against the generator that Megatron-Core makes its groups with."""

import pytest

from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.plan.ranks import Ranks, lay_out

KINDS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}


@pytest.mark.parametrize("ranks", [Ranks(2, 1, 2, 2), Ranks(2, 2, 2, 2), Ranks(1, 2, 3, 4), Ranks(8, 1, 4, 2)])
def test_groups_are_those_of_megatron(ranks):
    from megatron.core.parallel_state import RankGenerator

    theirs = RankGenerator(
        tp=ranks.tensor, ep=1, dp=ranks.data, pp=ranks.pipeline, cp=ranks.context, order="tp-cp-ep-dp-pp"
    )
    for kinds in [(kind,) for kind in KINDS] + [("context", "data"), ("tensor", "pipeline"), ("tensor", "context")]:
        assert ranks.groups(*kinds) == theirs.get_ranks("-".join(KINDS[kind] for kind in kinds)), kinds


def test_eight_ranks_by_hand():
    ranks = Ranks(tensor=2, context=1, data=2, pipeline=2)
    assert ranks.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ranks.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list(ranks.of_stage(1)) == [4, 5, 6, 7]


def test_processes_that_the_layout_does_not_divide_are_refused_with_all_numbers():
    layout = MegatronConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    assert lay_out(16, layout) == Ranks(4, 1, 2, 2)
    with pytest.raises(ConfigError, match=r"4 \* 2 \* 1 = 8 does not divide the 12 processes"):
        lay_out(12, layout)
