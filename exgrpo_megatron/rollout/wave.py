"""One wave: rows that are prefilled together and decoded in step until each has stopped or is full."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from exgrpo_megatron.rollout.decoder import Decoder
from exgrpo_megatron.rollout.kv_cache import KVCache
from exgrpo_megatron.rollout.protocol import SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.sampling import choose_tokens, uniform_streams

_PREFILL_TOKENS = 8192
"""Padded prompt tokens run at once: bounds the activations of a prefill."""

_FIRST_NEW_COLUMNS = 64
"""Cache columns held for new tokens at first; most answers are much shorter than the longest allowed."""


def plan_waves(requests: list[SampleRequest], max_rows: int) -> list[list[tuple[int, SampleRequest]]]:
    """Cut requests into waves of at most `max_rows` samples, of like prompt lengths (padding is computed in vain).

    Each wave is a list of (index of the request, the request or a part of it); the parts of one request come in the
    order of its seeds. Longest prompts come first, so that a batch too large for the memory fails at once.
    """
    waves: list[list[tuple[int, SampleRequest]]] = []
    room = 0
    for index in sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids)):
        seeds = requests[index].seeds
        while seeds:
            if room == 0:
                waves.append([])
                room = max_rows
            part, seeds = seeds[:room], seeds[room:]
            waves[-1].append((index, SampleRequest(requests[index].prompt_ids, part)))
            room -= len(part)
    return waves


class Wave:
    """Rows of one sampling call, request by request; a finished row gives its place to the last living one.

    A slot is a row's fixed place in the results; `_slots` maps living rows to slots.
    """

    def __init__(self, decoder: Decoder, requests: list[SampleRequest], params: SamplingParams) -> None:
        self._decoder = decoder
        self._requests = requests
        self._params = params
        self._device = decoder.weights.embedding.device
        seeds = [seed for request in requests for seed in request.seeds]
        num_rows, limit = len(seeds), params.max_new_tokens
        self._uniforms = self._tensor(uniform_streams(seeds, limit))
        self._stops = self._tensor(np.array(params.stop_token_ids, dtype=np.int64))
        self._slots = torch.arange(num_rows, device=self._device)
        self._tokens = torch.zeros(num_rows, limit, dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros(num_rows, limit, device=self._device)
        self._num_tokens = torch.full((num_rows,), limit, device=self._device)
        self._stopped = torch.zeros(num_rows, dtype=torch.bool, device=self._device)
        self._prompt_lengths = self._tensor(np.array([len(request.prompt_ids) for request in requests]))
        self._repeats = self._tensor(np.array([len(request.seeds) for request in requests]))
        self._positions = self._prompt_lengths.repeat_interleave(self._repeats)
        self._width = max(len(request.prompt_ids) for request in requests)
        self._cache = self._new_cache()
        self._mask = self._padding_mask()

    def run(self, policy_version: int, on_progress: Callable[[], None] = lambda: None) -> list[list[SampledResponse]]:
        """Sample every row; responses by request, in the order of its seeds. `on_progress` is called a token.

        Raises:
            FloatingPointError: the model produced logits that are not finite.
        """
        logits = self._prefill()
        for index in range(self._params.max_new_tokens):
            tokens, logprobs = choose_tokens(logits, self._params.temperature, self._uniforms[self._slots, index])
            self._tokens[self._slots, index] = tokens
            self._logprobs[self._slots, index] = logprobs
            tokens = self._drop_finished(tokens, index + 1)
            if len(tokens) == 0 or index + 1 == self._params.max_new_tokens:
                break
            logits = self._decoder.step(tokens, self._positions, self._cache, self._mask)
            self._positions = self._positions + 1
            on_progress()
        return self._responses(policy_version)

    def _prefill(self) -> Tensor:
        """Run each prompt once, a bounded number of tokens at a time; logits [rows, vocab] after the prompts."""
        prompts_at_once = max(1, _PREFILL_TOKENS // self._width)
        logits, first_row = [], 0
        for first in range(0, len(self._requests), prompts_at_once):
            chunk = slice(first, first + prompts_at_once)
            tokens = self._tensor(_right_padded(self._requests[chunk]))
            repeats = self._repeats[chunk]
            some = self._decoder.prefill(tokens, self._prompt_lengths[chunk], repeats, self._cache, first_row)
            logits.append(some)
            first_row += len(some)
        self._cache.num_columns = self._width
        return torch.cat(logits)

    def _drop_finished(self, tokens: Tensor, num_tokens: int) -> Tensor:
        """Note the rows whose token is a stop token and drop them; the living rows' tokens."""
        finished = torch.isin(tokens, self._stops)
        if not finished.any():
            return tokens
        slots = self._slots[finished]
        self._stopped[slots] = True
        self._num_tokens[slots] = num_tokens
        living = (~finished).nonzero().squeeze(1)
        num_rows = len(living)
        # Filling the gaps from the end moves few rows, where keeping the order would move nearly all.
        targets = finished[:num_rows].nonzero().squeeze(1)
        sources = living[num_rows - len(targets) :]
        self._cache.keep_rows(num_rows, sources, targets)
        order = torch.arange(num_rows, device=self._device)
        order[targets] = sources
        self._slots, self._positions = self._slots[order], self._positions[order]
        self._mask = None if self._mask is None else self._mask[order]
        return tokens[order]

    def _responses(self, policy_version: int) -> list[list[SampledResponse]]:
        tokens = self._tokens.to("cpu", torch.int32).numpy()
        logprobs = self._logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(f"the logits of policy version {policy_version} are not finite")
        ends, stopped = self._num_tokens.tolist(), self._stopped.tolist()
        slots = iter(range(len(ends)))
        return [
            [
                SampledResponse(
                    token_ids=tokens[slot, : ends[slot]].copy(),
                    logprobs=logprobs[slot, : ends[slot]].copy(),
                    stop_reason="stop" if stopped[slot] else "length",
                    policy_version=policy_version,
                )
                for slot in (next(slots) for _ in request.seeds)
            ]
            for request in self._requests
        ]

    def _new_cache(self) -> KVCache:
        arch, embedding = self._decoder.arch, self._decoder.weights.embedding
        return KVCache(
            (arch.num_layers, len(self._slots), arch.num_kv_heads, arch.head_dim),
            capacity=self._width + _FIRST_NEW_COLUMNS,
            max_columns=self._width + self._params.max_new_tokens,
            dtype=embedding.dtype,
            device=self._device,
        )

    def _padding_mask(self) -> Tensor | None:
        """[rows, 1, 1, columns]: minus infinity between a row's prompt and the first new column, else 0."""
        if bool((self._positions == self._width).all()):
            return None
        columns = torch.arange(self._width + self._params.max_new_tokens, device=self._device)
        padded = (columns >= self._positions[:, None]) & (columns < self._width)
        mask = torch.zeros(padded.shape, dtype=self._decoder.weights.embedding.dtype, device=self._device)
        return mask.masked_fill_(padded, float("-inf"))[:, None, None, :]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _right_padded(requests: list[SampleRequest]) -> np.ndarray:
    """[requests, longest prompt] token ids, padded with 0."""
    padded = np.zeros((len(requests), max(len(request.prompt_ids) for request in requests)), dtype=np.int64)
    for row, request in zip(padded, requests, strict=True):
        row[: len(request.prompt_ids)] = request.prompt_ids
    return padded
