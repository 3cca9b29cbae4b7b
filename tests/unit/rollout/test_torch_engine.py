"""The embedded engine against transformers, and its promises about seeds, counts, stops and loading."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONFIGS, engine_of, full_forward_logprobs, hf_weights, prompts, random_model

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.rollout.protocol import SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.torch_engine import TorchEngine

STOP = 5


@pytest.fixture(scope="module", params=CONFIGS.keys())
def model(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    return random_model(CONFIGS[request.param]())


@pytest.fixture(scope="module")
def qwen2() -> transformers.PreTrainedModel:
    return random_model(CONFIGS["qwen2 tied, biases"]())


def params(max_new_tokens: int = 24, temperature: float = 1.0, stops: tuple[int, ...] = (STOP,)) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature, stops)


def requests_of(lengths: list[int], samples: int) -> list[SampleRequest]:
    return [SampleRequest(p, tuple(range(100 * i, 100 * i + samples))) for i, p in enumerate(prompts(lengths))]


def tokens_of(responses: list[list[SampledResponse]]) -> list[list[list[int]]]:
    return [[response.token_ids.tolist() for response in group] for group in responses]


def assert_logprobs_equal_the_full_forward(
    model: transformers.PreTrainedModel,
    requests: list[SampleRequest],
    responses: list[list[SampledResponse]],
    temperature: float = 1.0,
    tolerance: float = 1e-5,
) -> None:
    for request, group in zip(requests, responses, strict=True):
        for response in group:
            expected = full_forward_logprobs(model, request.prompt_ids, response, temperature)
            np.testing.assert_allclose(response.logprobs, expected, rtol=0, atol=tolerance)


# --- agreement with transformers -------------------------------------------------------------------------------


def test_logprobs_of_samples_equal_an_uncached_forward_of_transformers(model: transformers.PreTrainedModel) -> None:
    requests = requests_of([1, 9, 4, 4, 13], samples=4)
    responses = engine_of(model).sample(requests, params())
    assert_logprobs_equal_the_full_forward(model, requests, responses)


def test_greedy_tokens_equal_generate_of_transformers(model: transformers.PreTrainedModel) -> None:
    requests = requests_of([3, 7, 12], samples=1)
    responses = engine_of(model).sample(requests, params(temperature=0.0))
    for request, (response,) in zip(requests, responses, strict=True):
        ids = torch.from_numpy(request.prompt_ids).long()[None]
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=STOP,
            pad_token_id=0,
        )
        assert response.token_ids.tolist() == generated[0, len(request.prompt_ids) :].tolist()
    assert_logprobs_equal_the_full_forward(model, requests, responses)


def test_a_sample_is_the_inverse_cdf_of_its_own_uniforms_under_the_uncached_model(
    qwen2: transformers.PreTrainedModel,
) -> None:
    """An independent sampler: no cache, no batch, numpy's cumulative sum over a float64 softmax."""
    (prompt,) = prompts([6])
    ((response,),) = engine_of(qwen2).sample([SampleRequest(prompt, (77,))], params(stops=()))
    ids = prompt.tolist()
    for uniform in np.random.Generator(np.random.PCG64(77)).random(24):
        with torch.no_grad():
            logits = qwen2(torch.tensor([ids])).logits[0, -1].double()
        ids.append(int(np.searchsorted(torch.softmax(logits, -1).cumsum(-1).numpy(), uniform, side="right")))
    assert response.token_ids.tolist() == ids[len(prompt) :]


def test_the_frequencies_of_4000_first_tokens_agree_with_the_softmax(qwen2: transformers.PreTrainedModel) -> None:
    (prompt,) = prompts([5], seed=4)
    (group,) = engine_of(qwen2, max_batch_size=1000).sample(
        [SampleRequest(prompt, tuple(range(4000)))], params(max_new_tokens=1)
    )
    counts = np.bincount([response.token_ids[0] for response in group], minlength=21)
    with torch.no_grad():
        logits = qwen2(torch.from_numpy(prompt).long()[None]).logits[0, -1]
    expected = 4000 * torch.softmax(logits.double(), -1).numpy()
    common = expected >= 5  # the usual condition of the chi-square test; the rare tokens make one class
    observed, wanted = (
        np.append(counts[common], counts[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    statistic = torch.tensor(((observed - wanted) ** 2 / wanted).sum())
    degrees = torch.tensor(len(wanted) - 1.0, dtype=torch.float64)
    p_value = torch.special.gammaincc(degrees / 2, statistic / 2).item()
    assert len(wanted) >= 5
    assert p_value > 0.01


def test_logprobs_at_temperature_0_7_are_of_the_scaled_logits(qwen2: transformers.PreTrainedModel) -> None:
    requests = requests_of([4, 8], samples=4)
    responses = engine_of(qwen2).sample(requests, params(temperature=0.7))
    assert_logprobs_equal_the_full_forward(qwen2, requests, responses, temperature=0.7)


def test_long_prompts_prefilled_in_several_parts_and_a_grown_cache_change_nothing(
    qwen2: transformers.PreTrainedModel,
) -> None:
    """20 prompts of up to 600 tokens exceed the 8192 of one prefill, 150 new tokens the 64 columns held at first."""
    requests = [SampleRequest(p, (i,)) for i, p in enumerate(prompts([600, 3] + 18 * [590]))]
    responses = engine_of(qwen2).sample(requests, params(max_new_tokens=150, stops=()))
    # 750 positions: rounding of the attention sums grows beyond that of the short sequences elsewhere.
    assert_logprobs_equal_the_full_forward(qwen2, requests[:4], responses[:4], tolerance=3e-5)


def test_a_bfloat16_engine_agrees_with_float32_within_its_precision(qwen2: transformers.PreTrainedModel) -> None:
    engine = TorchEngine(Architecture.from_hf_config(qwen2.config.to_dict()), dtype=torch.bfloat16, max_batch_size=8)
    engine.load_weights(hf_weights(qwen2).items(), 0)
    requests = requests_of([4, 8], samples=4)
    # bfloat16 has 8 bits: logits of about 4 carry errors of about 4 / 256 per operation.
    assert_logprobs_equal_the_full_forward(qwen2, requests, engine.sample(requests, params()), tolerance=0.25)


# --- seeds and batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch_size", [1, 3, 7, 64])
def test_the_same_seed_gives_the_same_sample_in_any_batch(
    qwen2: transformers.PreTrainedModel, max_batch_size: int
) -> None:
    requests = requests_of([2, 11, 5, 5, 8], samples=5)
    reference = engine_of(qwen2).sample(requests, params())
    again = engine_of(qwen2, max_batch_size=max_batch_size).sample(requests[::-1], params())[::-1]
    assert tokens_of(again) == tokens_of(reference)
    for group, expected_group in zip(again, reference, strict=True):
        for response, expected in zip(group, expected_group, strict=True):
            np.testing.assert_allclose(response.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_a_sample_alone_equals_the_sample_among_others(qwen2: transformers.PreTrainedModel) -> None:
    requests = requests_of([2, 11, 5], samples=5)
    engine = engine_of(qwen2)
    among_others = tokens_of(engine.sample(requests, params()))
    alone = engine.sample([SampleRequest(requests[1].prompt_ids, requests[1].seeds[3:4])], params())
    assert tokens_of(alone) == [[among_others[1][3]]]


def test_a_lower_limit_only_cuts_the_samples(qwen2: transformers.PreTrainedModel) -> None:
    requests = requests_of([2, 11], samples=6)
    engine = engine_of(qwen2)
    longer, shorter = (tokens_of(engine.sample(requests, params(limit))) for limit in (24, 6))
    assert shorter == [[tokens[:6] for tokens in group] for group in longer]


def test_seeds_that_differ_only_above_32_bits_give_different_samples(qwen2: transformers.PreTrainedModel) -> None:
    (prompt,) = prompts([5])
    ((low, high),) = tokens_of(engine_of(qwen2).sample([SampleRequest(prompt, (7, 7 + 2**40))], params(stops=())))
    assert low != high


# --- counts, stops, results ------------------------------------------------------------------------------------


def test_every_request_gets_as_many_responses_as_it_has_seeds(qwen2: transformers.PreTrainedModel) -> None:
    counts = [8, 7, 0, 8, 7, 1]
    requests = [SampleRequest(p, tuple(range(k))) for p, k in zip(prompts([4, 4, 4, 9, 2, 1]), counts, strict=True)]
    responses = engine_of(qwen2, max_batch_size=10).sample(requests, params())
    assert [len(group) for group in responses] == counts
    assert_logprobs_equal_the_full_forward(qwen2, requests, responses)


def test_no_requests_and_requests_without_seeds_give_nothing(qwen2: transformers.PreTrainedModel) -> None:
    engine = engine_of(qwen2)
    assert engine.sample([], params()) == []
    assert engine.sample([SampleRequest(prompts([3])[0], ())], params()) == [[]]


def test_a_stopped_answer_ends_with_its_only_stop_token_and_the_log_prob_of_it(
    qwen2: transformers.PreTrainedModel,
) -> None:
    requests = requests_of([4, 8], samples=20)
    responses = engine_of(qwen2).sample(requests, params(max_new_tokens=60, stops=(STOP, 9)))
    stopped = [response for group in responses for response in group if response.stop_reason == "stop"]
    assert {int(response.token_ids[-1]) for response in stopped} == {STOP, 9}
    for response in stopped:
        assert not set(response.token_ids[:-1].tolist()) & {STOP, 9}
        assert len(response.logprobs) == len(response.token_ids) <= 60
    assert_logprobs_equal_the_full_forward(qwen2, requests, responses)


def test_an_answer_without_a_stop_token_is_flagged_as_truncated(qwen2: transformers.PreTrainedModel) -> None:
    responses = engine_of(qwen2).sample(requests_of([4, 8], samples=20), params(max_new_tokens=8))
    reasons = {response.stop_reason for group in responses for response in group}
    assert reasons == {"stop", "length"}
    for response in (response for group in responses for response in group):
        assert (STOP in response.token_ids) == (response.stop_reason == "stop")
        assert len(response.token_ids) == 8 or response.stop_reason == "stop"


def test_a_stop_token_in_the_last_place_counts_as_stopped(qwen2: transformers.PreTrainedModel) -> None:
    engine, requests = engine_of(qwen2), requests_of([4], samples=1)
    ((free,),) = engine.sample(requests, params(max_new_tokens=1, stops=()))
    ((stopped,),) = engine.sample(requests, params(max_new_tokens=1, stops=(int(free.token_ids[0]),)))
    assert (free.stop_reason, stopped.stop_reason) == ("length", "stop")
    assert free.token_ids.tolist() == stopped.token_ids.tolist()


def test_responses_carry_the_contract_types_and_the_version(qwen2: transformers.PreTrainedModel) -> None:
    ((response,),) = engine_of(qwen2, version=12).sample(requests_of([4], samples=1), params())
    assert response.token_ids.dtype == np.int32
    assert response.logprobs.dtype == np.float32
    assert response.policy_version == 12


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (SampleRequest(np.array([], dtype=np.int32), (1,)), "request 1: the prompt is empty"),
        (SampleRequest(np.array([3, 21], dtype=np.int32), (1,)), "request 1: token id 21 is outside .* of 21"),
        (SampleRequest(np.array([-1], dtype=np.int32), ()), "request 1: token id -1 is outside"),
        (SampleRequest(np.array([1], dtype=np.int32), (4, -2)), "request 1: seed -2"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_named(
    qwen2: transformers.PreTrainedModel, bad: SampleRequest, rule: str
) -> None:
    good = SampleRequest(prompts([3])[0], (0,))
    with pytest.raises(ValueError, match=rule):
        engine_of(qwen2).sample([good, bad], params())


@pytest.mark.parametrize(("limit", "temperature"), [(0, 1.0), (8, -0.1), (8, float("nan"))])
def test_sampling_parameters_without_meaning_are_refused(
    qwen2: transformers.PreTrainedModel, limit: int, temperature: float
) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens|temperature"):
        engine_of(qwen2).sample(requests_of([4], samples=1), params(limit, temperature))


def test_logits_that_are_not_finite_raise_and_name_the_version(qwen2: transformers.PreTrainedModel) -> None:
    engine, weights = engine_of(qwen2), hf_weights(qwen2)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    engine.load_weights(weights.items(), 8)
    with pytest.raises(FloatingPointError, match="policy version 8"):
        engine.sample(requests_of([4, 6], samples=3), params())


def test_an_engine_without_weights_says_so(qwen2: transformers.PreTrainedModel) -> None:
    engine = engine_of(qwen2)
    engine.close()
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.sample([], params())
    with pytest.raises(RuntimeError, match="load_weights"):
        _ = engine.policy_version


# --- loading ---------------------------------------------------------------------------------------------------


def _broken(weights: dict[str, torch.Tensor], defect: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights.items():
        if defect == "missing" and name == "model.layers.1.mlp.up_proj.weight":
            continue
        if defect == "misshapen" and name == "model.layers.0.self_attn.k_proj.weight":
            yield name, tensor.t()
            continue
        yield name, tensor
        if defect == "given twice" and name == "model.layers.1.self_attn.v_proj.bias":
            yield name, tensor
    if defect == "unknown":
        yield "lm_head.weight", weights["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("defect", "line"),
    [
        ("missing", "missing: model.layers.1.mlp.up_proj.weight"),
        ("unknown", "unknown: lm_head.weight"),
        ("misshapen", r"misshapen: model.layers.0.self_attn.k_proj.weight is \[32, 16\], not \[16, 32\]"),
        ("given twice", "given twice: model.layers.1.self_attn.v_proj.bias"),
    ],
)
def test_a_stream_that_does_not_fit_leaves_the_old_weights_and_version_in_force(
    qwen2: transformers.PreTrainedModel, defect: str, line: str
) -> None:
    engine, requests = engine_of(qwen2, version=3), requests_of([4], samples=8)
    before = tokens_of(engine.sample(requests, params()))
    other = hf_weights(random_model(qwen2.config, seed=1))
    with pytest.raises(ValueError, match=line):
        engine.load_weights(_broken(other, defect), 4)
    assert engine.policy_version == 3
    assert tokens_of(engine.sample(requests, params())) == before


def test_all_misfits_are_listed_after_the_stream_was_read_to_its_end(qwen2: transformers.PreTrainedModel) -> None:
    """2 unknown, 1 misshapen, and missing the other 25 of the model's 2 * 12 + 2 tensors."""
    read: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "model.norm.weight", "b"):
            read.append(name)
            yield name, torch.zeros(3)

    engine = engine_of(qwen2)
    with pytest.raises(ValueError, match=r"(?s)\(28 tensors\).*unknown: a.*misshapen: model.norm.weight.*unknown: b"):
        engine.load_weights(stream(), 4)
    assert read == ["a", "model.norm.weight", "b"]


def test_a_stream_that_breaks_off_leaves_the_old_weights_in_force(qwen2: transformers.PreTrainedModel) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(hf_weights(random_model(qwen2.config, seed=1)).items())[:5]
        raise ConnectionError("the sender is gone")

    engine, requests = engine_of(qwen2), requests_of([4], samples=8)
    before = tokens_of(engine.sample(requests, params()))
    with pytest.raises(ConnectionError):
        engine.load_weights(stream(), 4)
    assert engine.policy_version == 3
    assert tokens_of(engine.sample(requests, params())) == before


def test_new_weights_of_any_order_and_float_type_take_over_with_their_version(
    qwen2: transformers.PreTrainedModel,
) -> None:
    engine, other = engine_of(qwen2), random_model(qwen2.config, seed=1)
    engine.load_weights(reversed([(name, tensor.double()) for name, tensor in hf_weights(other).items()]), 4)
    requests = requests_of([4, 7], samples=3)
    responses = engine.sample(requests, params())
    assert {response.policy_version for group in responses for response in group} == {engine.policy_version} == {4}
    assert_logprobs_equal_the_full_forward(other, requests, responses)


def test_the_engine_keeps_no_hold_on_the_tensors_it_was_given(qwen2: transformers.PreTrainedModel) -> None:
    def reused_buffers() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in hf_weights(qwen2).items():
            buffer = tensor.clone()
            yield name, buffer
            buffer.fill_(float("nan"))

    engine = engine_of(qwen2)
    engine.load_weights(reused_buffers(), 4)
    requests = requests_of([4], samples=2)
    assert_logprobs_equal_the_full_forward(qwen2, requests, engine.sample(requests, params()))
