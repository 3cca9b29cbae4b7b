"""While a run goes: rollouts, verifier, replay, training."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from troubles import Place, error_of, trouble

from exgrpo_megatron.agreement import AgreementGate
from exgrpo_megatron.algorithm.guards import Guards
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import AlarmsConfig, EnvConfig, GuardsConfig, MathEnvConfig
from exgrpo_megatron.data.order import QuestionOrder
from exgrpo_megatron.errors import ConfigError, DataError, UserError
from exgrpo_megatron.experience.alarms import Alarms
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.files import Row, write_answers
from exgrpo_megatron.metric_sinks import MetricsLogger
from exgrpo_megatron.plan.known_models import find_architecture
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.rewards.alarm import RewardAlarm
from exgrpo_megatron.rewards.function import FunctionVerifier, check_reward_function
from exgrpo_megatron.rewards.verifier import Verdict
from exgrpo_megatron.rollout import vllm_checks
from exgrpo_megatron.rollout.protocol import EngineFailure
from exgrpo_megatron.rollout.restarts import RestartingEngine
from exgrpo_megatron.step_metrics import step_warnings
from exgrpo_megatron.types import Group, Question, StoredAnswer, Trajectory

ONE_STEP = (
    "grpo.max_num_steps=1", "grpo.val_at_start=false", "checkpointing.enabled=false", "checkpointing.export_hf=false",
)  # fmt: skip


# Rollouts


def refused_by_vllm(place: Place, *overrides: str) -> str:
    place.patch.setattr(vllm_checks, "is_installed", lambda: True)
    config = load_recipe("recipe.yaml", ["policy.generation.backend=vllm", *overrides])
    found = find_architecture("Qwen/Qwen2.5-Math-7B")
    assert found is not None
    check = lambda: vllm_checks.check_vllm(config, found[0], world_size=1, data_parallel_size=1)  # noqa: E731
    return error_of(ConfigError, check)


@trouble
def small_cache(place: Place) -> str:
    return refused_by_vllm(place, "policy.generation.vllm_cfg.kv_cache_memory_bytes=1000000")


class Stuck:
    """An engine that always fails as vLLM's does when it runs out of time."""

    def load_weights(self, weights: object, version: int) -> None:
        pass

    def sample(self, requests: object, params: object) -> None:
        raise EngineFailure("96 answers are unfinished after policy.generation.vllm_cfg.timeout_s = 1200.0 s")

    def close(self) -> None:
        pass


@trouble
def engine_replaced(place: Place) -> str:
    engine = RestartingEngine(Stuck, dict, SingleProcess(), max_restarts=1)  # type: ignore[arg-type]
    error = error_of(UserError, lambda: engine.sample([], None))  # type: ignore[arg-type]
    return f"{place.logged()}\n{error}"


@trouble
def engine_disagrees(place: Place) -> str:
    """An engine that reports log-probs of -0.5 where the actor has -2.37."""
    del place
    ids = np.arange(4, dtype=np.int32)
    engine = SimpleNamespace(sample=lambda *_: [[SimpleNamespace(token_ids=ids, logprobs=np.full(4, -0.5))]])
    policy = SimpleNamespace(score=lambda *_: [SimpleNamespace(logprobs=np.full(4, -2.37))])
    config = load_recipe("recipe.yaml", ["policy.precision=bfloat16"])
    params = SimpleNamespace(temperature=1.0)
    parts = SimpleNamespace(config=config, comm=SingleProcess(), engine=engine, policy=policy, sampling=params)
    question = SimpleNamespace(id="q1", prompt_ids=ids)
    return f"error: {AgreementGate(parts).compare(0, [question]).fault}"  # type: ignore[arg-type, list-item]


# Verifier


@trouble
def bad_run(place: Place) -> str:
    """One step of a model with random weights, which closes no box; any gradient is too large for it."""
    place.patch.setattr("exgrpo_megatron.train_command.write_dashboard", lambda folder: folder)
    options = ("env.math.all_zero_alarm_steps=1", "policy.skip_grad_norm_above=1e-12", "data.validation=null")
    result = place.exgrpo("train", "recipe.yaml", *ONE_STEP, *options)
    assert result.code == 0, result
    return result.out


@trouble
def many_timeouts(place: Place) -> str:
    del place
    right, late = Verdict(1.0, "correct"), Verdict(0.0, "timeout")
    return "\n".join(RewardAlarm(MathEnvConfig()).observe([right, right, right, late]))


REWARDS = """
import os

def reward(question, response, answer):
    if response == "dies":
        os._exit(3)
    return float(response["score"])
"""


def reward_config(place: Place, function: str, **keys: object) -> EnvConfig:
    (place.folder / "my_rewards.py").write_text(REWARDS)
    return EnvConfig(reward_function=function, math=MathEnvConfig(num_workers=1), **keys)  # type: ignore[arg-type]


@trouble
def no_reward_function(place: Place) -> str:
    config = reward_config(place, "my_rewards:score")
    return error_of(ConfigError, lambda: check_reward_function(config))


@trouble
def reward_fails(place: Place) -> str:
    with closing(FunctionVerifier(reward_config(place, "my_rewards:reward"))) as verifier:
        verifier.grade([("2", "2", "1+1"), ("dies", "2", "1+1")])
    return place.logged()


# Replay


@trouble
def drained(place: Place) -> str:
    """A run of 700 steps in which, after step 412, 18% of the questions are left, for 103 steps more."""
    del place
    alarms = Alarms(AlarmsConfig(), last_step=700)
    return "\n".join(alarms.observe(412, {"freshness/data_left": 0.18, "freshness/steps_left": 103.0}))


@trouble
def ran_dry(place: Place) -> str:
    """A step that replays two of four questions, of which new ones would have to be three."""
    del place
    questions = [Question(f"q{n}", np.array([n], np.int32), str(n)) for n in range(4)]
    order = QuestionOrder(questions, seed=0, epoch_order="reshuffle")
    return error_of(DataError, lambda: order.take(3, {"q0", "q1"}))


@trouble
def guard_crossed(place: Place) -> str:
    del place
    guards = Guards(GuardsConfig(min_ess_replayed=0.5, action="on_policy"))
    return "\n".join(guards.observe(57, guards.crossed({"ratio_replayed/ess": 0.31})))


@trouble
def sampling_repeats(place: Place) -> str:
    del place
    return "\n".join(Alarms(AlarmsConfig(max_duplicates=0.5), 700).observe(90, {"freshness/duplicates": 0.62}))


def prefilled(place: Place, question_id: str, group_size: int) -> str:
    answer = StoredAnswer(np.array([3], np.int32), np.array([-0.5], np.float32), 0, 1)
    write_answers(place.folder / "old.parquet", [Row(question_id, 1, 0, 0, answer)], group_size=group_size)
    return place.fails("train", "recipe.yaml", "experience.prefill_path=old.parquet")


@trouble
def prefill_of_other_groups(place: Place) -> str:
    return prefilled(place, "q1", 8)


@trouble
def prefill_of_other_questions(place: Place) -> str:
    return prefilled(place, "other", 2)


@trouble
def not_stored(place: Place) -> str:
    """Log-probs that are not one a token, at the door of the buffer."""
    config = load_recipe("recipe.yaml")
    buffer = ExperienceBuffer(config.experience, 2, SingleProcess(), place.folder / "experience")
    ids = np.array([3, 4], np.int32)
    question = Question("q7", ids, "7+1", "8")
    good, bad = (
        Trajectory(ids, np.array(logprobs, np.float32), reward, False, "stop", 0)
        for logprobs, reward in (([-0.5, -0.5], 0.0), ([-0.5, np.nan], 1.0))
    )
    report = buffer.record([Group(question, (good, bad))], step=1, collect=True)
    nothing = SimpleNamespace(updates=[])
    return "\n".join(step_warnings(config, SimpleNamespace(updates=[], stored=nothing, report=report)))  # type: ignore[arg-type]


# Training


def no_number(place: Place) -> str:
    """A model of whose weights one is no number."""
    file = place.copy_model("model") / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, file, {"format": "pt"})
    return "policy.model_name=model"


@trouble
def diverged(place: Place) -> str:
    return place.fails("train", "recipe.yaml", no_number(place), *ONE_STEP)


@trouble
def sft_diverged(place: Place) -> str:
    return place.fails("sft", "recipe.yaml", no_number(place), "sft.data.generator=chain_arithmetic")


@trouble
def not_finite(place: Place) -> str:
    MetricsLogger([]).write(3, {"policy/loss": float("nan")})
    return place.logged()
