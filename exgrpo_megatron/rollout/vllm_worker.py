"""The receiving end of a weight push, inside a vLLM worker: a backend of vLLM's weight-transfer interface.

vLLM imports this module in whichever process its worker runs, because `VLLMEngine` names it as worker extension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from exgrpo_megatron.rollout.weight_buckets import Placed, view
from exgrpo_megatron.rollout.weight_buffers import open_buffer

BACKEND = "exgrpo_buckets"
_VOCAB_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One piece of the weights: a buffer, and where each tensor lies in it."""

    buffer: dict[str, Any]
    dtype: str
    tensors: list[tuple[str, list[int], int]]
    """Name, shape, offset in bytes."""


class BucketReceiver(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """Loads pieces of the weights in place; a weight that did not come is an error, not a warning."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing: every piece says where it lies."""

    def start_weight_update(self) -> None:
        self._wanted = {name for name, _ in self.model.named_parameters()}
        self._loaded: set[str] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the sender fills the buffer again when this returns

    def receive_weights(self, update_info: BucketInfo) -> None:
        self._loaded |= self.model.load_weights(self._tensors(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        missing = self._wanted - self._loaded
        if missing:
            raise RuntimeError(f"no new values came for {', '.join(sorted(missing))}")

    def shutdown(self) -> None:
        """Nothing is held."""

    def _tensors(self, update_info: BucketInfo) -> Iterator[tuple[str, Tensor]]:
        buffer = open_buffer(update_info.buffer)
        # vLLM takes a module over once it has all its elements; one with padded rows waits for them until the end, with
        # no more than a reference to what it was given.
        waits = self.model_config.get_vocab_size() % DEFAULT_VOCAB_PADDING_SIZE != 0
        for name, shape, offset in update_info.tensors:
            tensor = view(buffer, Placed(name, tuple(shape), offset), getattr(torch, update_info.dtype))
            yield name, tensor.clone() if waits and name in _VOCAB_WEIGHTS else tensor


class Extension:
    """Adds nothing to the worker; naming it makes the worker's process import this module."""


WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
