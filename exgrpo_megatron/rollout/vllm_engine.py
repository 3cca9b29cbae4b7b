"""Rollouts by vLLM: one engine in (or beside) every process, or one shared by ranks that follow each other."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.rollout import vllm_process
from exgrpo_megatron.rollout.protocol import EngineFailure, SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.vllm_process import VLLMSettings
from exgrpo_megatron.rollout.weight_buckets import BucketPlan, Placed, send
from exgrpo_megatron.rollout.weight_buffers import Buffer, make_buffer

_STEPS_BETWEEN_LOOKS = 16
"""Engine steps after which ranks that share an engine ask each other whether the time is over."""

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class VLLMEngine:
    """Implements `RolloutEngine` with vLLM.

    The engine is built by the first `load_weights`, which therefore is collective over all processes (see
    `vllm_process.start`), as `close` is. Ranks that share an engine must sample the same requests together.

    A sample follows from (weights, prompt, seed, temperature), as with the embedded engine, but the two draw
    different tokens for one seed.
    """

    num_restarts = 0

    def __init__(
        self, arch: Architecture, settings: VLLMSettings, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """`on_progress` is called after every step of the engine."""
        self._on_progress = on_progress
        self._arch, self._settings = arch, settings
        self._plan = BucketPlan(manifest(arch), settings.dtype, settings.cfg.update_weights_bucket_megabytes * 10**6)
        self._llm: Any = None
        self._asleep = False
        self._version: int | None = None

    @property
    def shared_by_members(self) -> bool:
        """Whether ranks share one engine."""
        return self._settings.cfg.tensor_parallel_size > 1

    @property
    def policy_version(self) -> int:
        """Version of the weights in force."""
        return self._in_force()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights into the engine's, one bucket at a time, and forget every prompt computed with the old.

        The stream is read to its end whatever happens. Beside the model one bucket is held.

        Raises:
            ValueError: tensors are missing, unknown, misshapen or given twice. The engine has no weights then.
            EngineFailure: the engine cannot be built, or failed meanwhile; it must be replaced.
        """
        self._version = None
        stream = iter(weights)
        try:
            with _failing("vLLM cannot be started"):
                if self._llm is None:
                    self._llm = vllm_process.start(self._settings)
            with self._watched():
                self._push(stream, version)
        finally:
            for _ in stream:  # its producer may be a collective operation
                pass
        self._version = version

    def sample(self, requests: list[SampleRequest], params: SamplingParams) -> list[list[SampledResponse]]:
        """Responses by request, in the order of its seeds; the stop token and its log-prob are included.

        Raises:
            ValueError: a request or `params` that cannot be sampled; names the request's index. Nothing is sampled.
            FloatingPointError: the model produced log-probs that are not finite.
            EngineFailure: the engine died, failed, or took longer than `timeout_s`; it must be replaced.
        """
        version = self._in_force()
        self._check(requests, params)
        # One step of the engine may take longer than the limit looks for, hence the margin.
        with _failing("vLLM failed while it sampled"), self._watched(self._settings.cfg.timeout_s + 60):
            self._wake()
            outputs = self._generate(requests, params)
            self._sleep()
        return [
            [_response(outputs[index, seat], version) for seat in range(len(request.seeds))]
            for index, request in enumerate(requests)
        ]

    def close(self) -> None:
        """End the engine; `load_weights` would begin anew. The trainer's process groups stay."""
        llm, self._llm, self._version, self._asleep = self._llm, None, None, False
        if llm is not None:
            vllm_process.stop(llm)

    def _in_force(self) -> int:
        if self._version is None:
            raise RuntimeError("the rollout engine has no weights: call load_weights first")
        return self._version

    def _push(self, stream: Iterator[tuple[str, Tensor]], version: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        buffer = make_buffer(self._plan.capacity, device, separate_process=self._settings.cfg.separate_process)

        def deliver(piece: list[Placed]) -> None:
            with _failing("vLLM did not take the new weights"):
                self._llm.update_weights({"update_info": self._bucket_info(buffer, piece)})

        try:
            with _failing("vLLM did not take the new weights"):
                self._wake("weights")
                self._llm.start_weight_update()
            send(stream, self._plan, buffer, deliver)
            with _failing("vLLM did not take the new weights"):
                self._wake("kv_cache")
                self._llm.finish_weight_update(weight_version=str(version))
                if not self._llm.reset_prefix_cache():
                    raise RuntimeError("the prefix cache of the old weights could not be emptied")
        finally:
            buffer.close()

    def _bucket_info(self, buffer: Buffer, piece: list[Placed]) -> dict[str, Any]:
        tensors = [(placed.name, list(placed.shape), placed.offset) for placed in piece]
        if self._arch.tied:
            # The engine packs the output layer of a tied model separately, and would go on with the old one.
            tensors += [(_OUTPUT, shape, offset) for name, shape, offset in tensors if name == _EMBEDDING]
        dtype = str(self._plan.dtype).removeprefix("torch.")
        return {"buffer": buffer.handle(), "dtype": dtype, "tensors": tensors}

    def _generate(self, requests: list[SampleRequest], params: SamplingParams) -> dict[tuple[int, int], Any]:
        """The completion of every sample, by (request, place of its seed)."""
        from vllm.inputs import TokensPrompt  # noqa: PLC0415

        engine = self._llm.llm_engine
        for index, request in enumerate(requests):
            prompt = TokensPrompt(prompt_token_ids=request.prompt_ids.tolist())
            for seat, seed in enumerate(request.seeds):
                engine.add_request(f"{index}/{seat}", prompt, _vllm_params(params, seed))
        finished, num_steps, deadline = {}, 0, time.monotonic() + self._settings.cfg.timeout_s
        while engine.has_unfinished_requests():
            for output in engine.step():
                index, seat = map(int, output.request_id.split("/"))
                finished[index, seat] = output.outputs[0]
            num_steps += 1
            self._on_progress()
            if self._late(deadline, num_steps):
                raise TimeoutError(
                    f"{engine.get_num_unfinished_requests()} answers are unfinished after "
                    f"policy.generation.vllm_cfg.timeout_s = {self._settings.cfg.timeout_s:g} s"
                )
        return finished

    def _watched(self, seconds: float = math.inf) -> contextlib.AbstractContextManager[None]:
        """For calls to an engine in a process of its own, which may end, or not answer for so long."""
        if not self._settings.cfg.separate_process:
            return contextlib.nullcontext()
        return vllm_process.watched(self._llm, seconds)

    def _late(self, deadline: float, num_steps: int) -> bool:
        """Whether the time is over; ranks that share an engine leave it at the same step."""
        over = time.monotonic() > deadline
        if self._settings.cfg.tensor_parallel_size == 1:
            return over
        return num_steps % _STEPS_BETWEEN_LOOKS == 0 and vllm_process.any_member(over)

    def _wake(self, *tags: str) -> None:
        """On GPUs: give the engine its memory again, all of it or that of `tags`. Not run yet: no GPU."""
        if self._asleep:
            self._llm.wake_up(tags=list(tags) or None)
            self._asleep = tags == ("weights",)

    def _sleep(self) -> None:
        """On GPUs: leave the memory to the actor; the weights wait in main memory. Not run yet: no GPU."""
        if torch.cuda.is_available():
            self._llm.sleep(level=1)
            self._asleep = True

    def _check(self, requests: list[SampleRequest], params: SamplingParams) -> None:
        if params.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {params.max_new_tokens}: at least one token must be sampled")
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise ValueError(f"temperature = {params.temperature}: must be 0 (greedy) or a positive number")
        for index, request in enumerate(requests):
            fault = self._fault(request, params)
            if fault:
                raise ValueError(f"request {index}: {fault}")

    def _fault(self, request: SampleRequest, params: SamplingParams) -> str | None:
        """Why vLLM would refuse the request, and every other of the call with it."""
        prompt, longest = request.prompt_ids, self._settings.max_model_len
        if len(prompt) == 0:
            return "the prompt is empty; the first token is sampled after at least one"
        if len(prompt) + params.max_new_tokens > longest:
            return f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones are more than {longest}"
        outside = prompt[(prompt < 0) | (prompt >= self._arch.vocab_size)]
        if len(outside):
            return f"token id {outside[0]} is outside the vocabulary of {self._arch.vocab_size}"
        negative = [seed for seed in request.seeds if seed < 0]
        return f"seed {negative[0]} is negative" if negative else None


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Whatever goes wrong inside leaves an engine that must be replaced."""
    try:
        yield
    except Exception as error:
        raise EngineFailure(f"{what}: {error or type(error).__name__}") from error


def _vllm_params(params: SamplingParams, seed: int) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    return VLLMSamplingParams(
        temperature=params.temperature,
        max_tokens=params.max_new_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # the recipe's stop tokens are all there are
        seed=seed,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _response(completion: Any, version: int) -> SampledResponse:
    token_ids = np.array(completion.token_ids, dtype=np.int32)
    logprobs = np.array(
        [at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)], np.float32
    )
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(f"the logits of policy version {version} are not finite")
    return SampledResponse(token_ids, logprobs, "stop" if completion.finish_reason == "stop" else "length", version)
