"""An engine in a process of its own: its death, and a time limit, in the middle of a rollout."""

from __future__ import annotations

import pytest
from vllm_models import (
    TOLERANCE,
    largest_difference,
    make_engine,
    needs_vllm,
    requests,
    sampling,
    save_model,
    token_lists,
)

from exgrpo_megatron.errors import UserError

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def actor(tmp_path_factory, data_parallel):
    from policy_models import make_actor

    return make_actor(save_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True), data_parallel)


@pytest.fixture(scope="module")
def engine(actor, tmp_path_factory, data_parallel):
    from exgrpo_megatron.rollout.restarts import RestartingEngine

    folder = save_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    engine = RestartingEngine(
        lambda: make_engine(folder, separate_process=True, update_weights_bucket_megabytes=1),
        actor.export_weights,
        data_parallel,
        max_restarts=1,
    )
    engine.load_weights(actor.export_weights(), 0)
    yield engine
    engine.close()


def test_an_engine_that_dies_is_replaced_and_gives_the_answers_it_would_have_given(engine, actor):
    from exgrpo_megatron.rollout import vllm_process

    expected = engine.sample(requests(), sampling())
    assert largest_difference(actor, requests(), expected, 0.8) < TOLERANCE
    vllm_process.kill(engine._engine._llm)
    answers = engine.sample(requests(), sampling())
    assert engine.num_restarts == 1
    assert token_lists(answers) == token_lists(expected)
    assert largest_difference(actor, requests(), answers, 0.8) < TOLERANCE


def test_a_rollout_beyond_its_time_ends_the_run_once_the_restarts_are_used_up(engine):
    assert engine.num_restarts == 1
    inner = engine._engine
    object.__setattr__(inner._settings, "cfg", inner._settings.cfg.model_copy(update={"timeout_s": 1e-3}))
    with pytest.raises(UserError, match=r"timeout_s = 0\.001 s; it was replaced 1 times .*max_restarts = 1"):
        engine.sample(requests(), sampling())
