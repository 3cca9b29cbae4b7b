"""The embedded rollout engine: batched key-value-cache sampling in plain torch, on the devices of the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.rollout.decoder import Decoder
from exgrpo_megatron.rollout.packed_weights import pack_weights
from exgrpo_megatron.rollout.protocol import SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.wave import Wave, plan_waves


class TorchEngine:
    """Implements `RolloutEngine` for dense Qwen2, Qwen3 and Llama models; the reference for other engines.

    A sample follows from (weights, prompt, seed, temperature): its random numbers are its own, so other requests, their
    order and `max_batch_size` do not change it. The one reservation is that matrix products of another batch size
    may round differently in the last bits, which can turn a draw that lies that close to a boundary.
    """

    num_restarts = 0
    shared_by_members = False
    """Every process holds the whole model and samples by itself."""

    def __init__(
        self,
        arch: Architecture,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_batch_size: int,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_batch_size` is the number of responses decoded at once; more are sampled in further waves. `on_progress`
        is called after every token of a wave."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size = {max_batch_size}: at least one response must be decoded at once")
        self._arch = arch
        self._dtype = dtype
        self._device = torch.device(device)
        self._max_batch_size = max_batch_size
        self._on_progress = on_progress
        self._loaded: tuple[Decoder, int] | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights in force."""
        return self._in_force()[1]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Build the new weights beside the old, check that they are whole, and only then put them in force.

        Both sets are held meanwhile. The tensors are copied and cast; the stream is read to its end.

        Raises:
            ValueError: tensors are missing, unknown, misshapen or given twice. The old weights and version stay.
        """
        packed = pack_weights(self._arch, weights, dtype=self._dtype, device=self._device)
        self._loaded = (Decoder(self._arch, packed), version)

    @torch.inference_mode()
    def sample(self, requests: list[SampleRequest], params: SamplingParams) -> list[list[SampledResponse]]:
        """Responses by request, in the order of its seeds; the stop token and its log-prob are included.

        Positions beyond the model's trained range are not refused here.

        Raises:
            ValueError: a request or `params` that cannot be sampled; names the request's index. Nothing is sampled.
            FloatingPointError: the model produced logits that are not finite.
        """
        decoder, version = self._in_force()
        _check_params(params)
        for index, request in enumerate(requests):
            _check_request(index, request, self._arch.vocab_size)
        responses: list[list[SampledResponse]] = [[] for _ in requests]
        for wave in plan_waves(requests, self._max_batch_size):
            results = Wave(decoder, [request for _, request in wave], params).run(version, self._on_progress)
            for (index, _), some in zip(wave, results, strict=True):
                responses[index].extend(some)
        return responses

    def close(self) -> None:
        """Give up the weights; `load_weights` would begin anew."""
        self._loaded = None

    def _in_force(self) -> tuple[Decoder, int]:
        if self._loaded is None:
            raise RuntimeError("the rollout engine has no weights: call load_weights first")
        return self._loaded


def _check_params(params: SamplingParams) -> None:
    if params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {params.max_new_tokens}: at least one token must be sampled")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise ValueError(f"temperature = {params.temperature}: must be 0 (greedy) or a positive number")


def _check_request(index: int, request: SampleRequest, vocab_size: int) -> None:
    prompt = request.prompt_ids
    if len(prompt) == 0:
        raise ValueError(f"request {index}: the prompt is empty; the first token is sampled after at least one")
    outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
    if len(outside):
        raise ValueError(f"request {index}: token id {outside[0]} is outside the vocabulary of {vocab_size}")
    negative = [seed for seed in request.seeds if seed < 0]
    if negative:
        raise ValueError(f"request {index}: seed {negative[0]} is negative")
