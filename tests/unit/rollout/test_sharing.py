"""Who of the processes that share a model samples what."""

import numpy as np
import pytest

from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.rollout.protocol import SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.sharing import sample_share

PARAMS = SamplingParams(max_new_tokens=4, temperature=1.0, stop_token_ids=(0,))


class Engine:
    """Answers each seed with itself as the only token, and keeps the seeds it was asked for."""

    policy_version = 3

    def __init__(self, shared_by_members):
        self.shared_by_members = shared_by_members
        self.asked = []

    def sample(self, requests, params):
        self.asked += [request.seeds for request in requests]
        one = np.ones(1, np.float32)
        return [
            [SampledResponse(np.array([seed], np.int32), one, "stop", 3) for seed in request.seeds]
            for request in requests
        ]

    def load_weights(self, weights, version): ...

    def close(self): ...


class Member(SingleProcess):
    def __init__(self, member, members):
        self.member, self.members = member, members


REQUESTS = [SampleRequest(np.array([1], np.int32), (10 * i, 10 * i + 1)) for i in range(5)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_every_request_is_in_the_part_of_one_member(shared, members):
    parts, asked = [], []
    for member in range(members):
        engine = Engine(shared)
        parts.append(sample_share(engine, REQUESTS, PARAMS, Member(member, members)))
        asked.append(engine.asked)
    assert sorted(index for part in parts for index in part) == [0, 1, 2, 3, 4]
    for part in parts:
        for index, responses in part.items():
            assert [response.token_ids[0] for response in responses] == list(REQUESTS[index].seeds)
    everything = [request.seeds for request in REQUESTS]
    if shared:
        # Members of one engine must call it together, with the same requests.
        assert asked == [everything] * members
    else:
        assert sorted(seeds for some in asked for seeds in some) == everything
        assert max(map(len, asked)) == -(-5 // members)
