"""Sampling shared out over the processes of a data-parallel rank, whether or not they run one engine together."""

from __future__ import annotations

from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.rollout.protocol import RolloutEngine, SampledResponse, SampleRequest, SamplingParams


def sample_share(
    engine: RolloutEngine, requests: list[SampleRequest], params: SamplingParams, comm: Communicator
) -> dict[int, list[SampledResponse]]:
    """This process's part of what its data-parallel rank samples: index of the request -> its responses.

    Every request is in the part of exactly one member, which alone grades its responses; all members give the same
    requests.
    """
    part = range(comm.member, len(requests), comm.members)
    if engine.shared_by_members:
        sampled = engine.sample(requests, params)
        return {index: sampled[index] for index in part}
    return dict(zip(part, engine.sample([requests[index] for index in part], params), strict=True))
