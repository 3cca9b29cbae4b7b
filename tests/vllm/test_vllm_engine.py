"""The vLLM engine in the trainer's process, against the Megatron actor it gets its weights from."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from vllm_models import (
    TOLERANCE,
    VOCAB,
    largest_difference,
    make_engine,
    needs_vllm,
    requests,
    sampling,
    save_model,
    token_lists,
)

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.rollout.protocol import SampleRequest, SamplingParams

pytestmark = needs_vllm

MODELS = {"qwen2 tied": ("qwen2", True), "llama untied": ("llama", False)}
"""The other two combinations are in test_vllm_layouts.py."""


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory, data_parallel):
    """Actor and engine of one model, the engine with the actor's weights in buckets of one module each."""
    from policy_models import make_actor

    family, tied = MODELS[request.param]
    folder = save_model(tmp_path_factory.mktemp("model"), family, tied=tied)
    actor, engine = make_actor(folder, data_parallel), make_engine(folder, update_weights_bucket_megabytes=1)
    engine._plan.capacity = max(engine._plan._group_bytes.values())
    before = state_of_process()
    engine.load_weights(actor.export_weights(), actor.version)
    assert state_of_process() == before, "building the engine changed the trainer's generators or threads"
    yield actor, engine
    engine.close()


def state_of_process():
    numpy = np.random.get_state()
    generators = (random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist())
    return generators, torch.get_num_threads(), torch.set_num_threads, torch.distributed.get_world_size()


def test_logprobs_are_the_actors_before_and_after_optimiser_steps(pair):
    from policy_models import random_sequences

    actor, engine = pair
    for step in range(6):
        for temperature in (0.8, 0.0):
            answers = engine.sample(requests(), sampling(temperature))
            assert largest_difference(actor, requests(), answers, temperature or 1.0) < TOLERANCE, (step, temperature)
            assert {answer.policy_version for some in answers for answer in some} == {step}
        if step < 5:
            before = answers
            actor.update(random_sequences(6, seed=step, vocab=VOCAB), Objective(), temperature=0.8)
            engine.load_weights(actor.export_weights(), actor.version)
    # The steps moved the policy, and the long prompts, which the engine had cached, with it.
    assert largest_difference(actor, requests(), before, 1.0) > 100 * TOLERANCE


def test_a_sample_follows_from_its_seed_whatever_else_is_asked(pair):
    _, engine = pair
    together = token_lists(engine.sample(requests(), sampling()))
    alone = [token_lists(engine.sample([request], sampling()))[0] for request in reversed(requests())]
    assert alone[::-1] == together
    assert len({tuple(tokens) for tokens in together[1]}) > 1, "seeds of one prompt give different answers"


def test_the_stop_token_is_the_last_with_its_logprob_and_other_answers_are_cut(pair):
    _, engine = pair
    seen = set()
    for longest in (1, 24):  # one that cuts nearly every answer, and one within which nearly all stop
        for answer in (one for some in engine.sample(requests(samples=8), sampling(1.0, longest)) for one in some):
            assert len(answer.logprobs) == len(answer.token_ids)
            stops = np.isin(answer.token_ids, (2, 5))
            assert not stops[:-1].any()
            assert stops[-1] == (answer.stop_reason == "stop")
            assert (len(answer.token_ids) == longest) or stops[-1]
            seen.add(answer.stop_reason)
    assert seen == {"stop", "length"}


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "words"),
    [
        ([], 8, "request 1: the prompt is empty"),
        ([1] * 250, 8, "request 1: 250 prompt tokens and 8 new ones are more than 256"),
        ([1, VOCAB], 8, f"request 1: token id {VOCAB} is outside"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_is(pair, prompt, max_new_tokens, words):
    _, engine = pair
    good = requests()[0]
    with pytest.raises(ValueError, match=words):
        engine.sample(
            [good, SampleRequest(np.array(prompt, np.int32), (1,))], SamplingParams(max_new_tokens, 1.0, (2,))
        )
    assert len(engine.sample([good], sampling())[0]) == 4


def test_an_incomplete_stream_is_read_to_its_end_and_leaves_no_weights_in_force(pair):
    actor, engine = pair
    stream = iter([pair for pair in actor.export_weights() if pair[0] != "model.norm.weight"])
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        engine.load_weights(stream, 9)
    assert next(stream, None) is None
    with pytest.raises(RuntimeError, match="no weights"):
        engine.sample(requests(), sampling())
    engine.close()
    engine.load_weights(actor.export_weights(), actor.version)
    answers = engine.sample(requests(), sampling())
    assert largest_difference(actor, requests(), answers, 0.8) < TOLERANCE
