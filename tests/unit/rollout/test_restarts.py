"""An engine that fails is replaced, gets the same weights, and is asked the same again; up to a budget."""

import pytest
from tiny_models import CONFIGS, hf_weights, prompts, random_model

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.rollout.protocol import EngineFailure, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.restarts import RestartingEngine
from exgrpo_megatron.rollout.torch_engine import TorchEngine

PARAMS = SamplingParams(8, 1.0, (2,))


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIGS["qwen2 tied, biases"]())


class Failing(TorchEngine):
    """The embedded engine, but its next calls fail as `plan` says."""

    def __init__(self, arch, plan):
        super().__init__(arch, max_batch_size=8)
        self.plan = plan

    def load_weights(self, weights, version):
        super().load_weights(weights, version)
        if self.plan and self.plan[0] == "load":
            raise EngineFailure(self.plan.pop(0))

    def sample(self, requests, params):
        if self.plan and self.plan[0] == "sample":
            raise EngineFailure(self.plan.pop(0))
        return super().sample(requests, params)


class OtherRankFails(SingleProcess):
    """A second rank reports a failure at the given questions."""

    def __init__(self, *at):
        self.at, self.asked = at, 0

    def anywhere(self, flag):
        self.asked += 1
        return flag or self.asked in self.at


def make(model, plan, *, max_restarts=2, comm=None):
    arch = Architecture.from_hf_config(model.config.to_dict())
    weights = lambda: hf_weights(model).items()  # noqa: E731
    made = []

    def factory():
        made.append(Failing(arch, plan))
        return made[-1]

    engine = RestartingEngine(factory, weights, comm or SingleProcess(), max_restarts=max_restarts)
    return engine, made, weights


def requests():
    return [SampleRequest(prompt, (1, 2)) for prompt in prompts([3, 9])]


def answers(engine):
    return [[a.token_ids.tolist() for a in some] for some in engine.sample(requests(), PARAMS)]


@pytest.mark.parametrize("plan", [["sample"], ["load"], ["load", "sample"], ["sample", "load"]])
def test_failures_do_not_change_the_answers(model, plan):
    calm, _, weights = make(model, [])
    calm.load_weights(weights(), 4)
    failures = len(plan)
    engine, made, _ = make(model, plan)
    engine.load_weights(weights(), 4)
    assert answers(engine) == answers(calm)
    assert engine.policy_version == 4
    assert engine.num_restarts == failures == len(made) - 1


def test_an_engine_is_also_replaced_where_another_process_failed(model):
    engine, made, weights = make(model, [], comm=OtherRankFails(2))
    engine.load_weights(weights(), 4)
    first = answers(engine)
    assert (engine.num_restarts, len(made)) == (1, 2)
    assert answers(engine) == first


def test_beyond_the_budget_the_run_ends_with_the_reason_and_the_key(model):
    engine, _, weights = make(model, ["sample", "sample"], max_restarts=1)
    engine.load_weights(weights(), 4)
    with pytest.raises(UserError, match=r"^sample; it was replaced 1 times .*vllm_cfg\.max_restarts = 1"):
        engine.sample(requests(), PARAMS)
